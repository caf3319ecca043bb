r"""Paged attention in jnp: a running softmax over chunks of one row after another; runs on every platform.

Cost follows the lengths: a list of items names the chunks of each row that hold keys its queries may see, whatever the
other rows hold.  One item on its way::

    item --> row, chunk --> ids[column] --> gather, select --> buffer [kv_head, key, K|V] -- . q --> scores --> weights
                                                                         \------- . weights --> accumulator of the row

The buffer stays in the cache of one core between its gather and its products; that is why rows do not go side by side and
no gather runs on several cores (see `_fill`).  16 rows of 40 to 740 tokens, 30 layers, 2 cores: 55 ms; all rows
side by side, each step on both cores, took 100.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore, decode
from pallas_kernels.paged_attention.spec import last_seen, query_valid
from pallas_kernels.sealed import SealedStore, unseal_keys, unseal_values

CHUNK_BYTES = 192 * 1024  # of the buffer at most, unless two blocks are more
# Up to here multiplying both halves of the buffer costs less than cutting it in two (an infinite V then makes the key's score NaN).
FEW_QUERIES = 16


class _Softmax(NamedTuple):
    """Running softmax of one row, or results of all ([row, ...]).

    peak, total f32[kv_head, query]; acc f32[kv_head, query, head_dim].
    """

    peak: Array
    total: Array
    acc: Array


class _Buffer(NamedTuple):
    """A chunk as read.

    kv: f32[kv_head, key, 2 * head_dim], K beside V; affine: of a sealed store, its affine arrays' rows, [column, ...] each.
    """

    kv: Array
    affine: tuple[Array, ...]


class _Items(NamedTuple):
    """What there is to read, row after row.

    first, num_chunks: i32[row], first chunk of each row and how many; end: i32[row], items of this and all earlier rows;
    key_end: i32[row], no query sees a key from here on; tables: i32[row, column], columns full of chunks, all ids in range.
    """

    first: Array
    num_chunks: Array
    end: Array
    key_end: Array
    tables: Array


def paged_attention_xla(
    q: Array,
    store: KVStore | SealedStore,
    layer: Array,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None,
    window: Array | int | None,
) -> tuple[Array, Array]:
    """Returns (out q.dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]); see spec.py."""
    rows, query_len, num_q_heads, head_dim = q.shape
    heads, block_size = store.layout.num_kv_heads, store.layout.block_size
    group = num_q_heads // heads
    # A "query" below is one (q_pos, q_head within the group) pair of a kv head.
    queries = (q.astype(jnp.float32) * scale).reshape(rows, query_len, heads, group, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(rows, heads, query_len * group, head_dim)
    query_pos = jnp.repeat(jnp.where(query_valid(view), view.positions, -1), group, axis=1)
    query_end = jnp.repeat(last_seen(store, view), group, axis=1)
    few = queries.shape[2] <= FEW_QUERIES
    if few:
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, head_dim)))

    columns = CHUNK_BYTES // (heads * block_size * 2 * head_dim * 4)
    columns = max(2, min(columns, view.block_tables.shape[1]))
    columns = 1 << (columns.bit_length() - 1)  # lengths are often powers of two: no chunk in part
    chunk_len = columns * block_size
    items = _items(store, view, query_end, columns, window)
    empty = _Softmax(
        peak=jnp.full(queries.shape[1:3], -jnp.inf, jnp.float32),
        total=jnp.zeros(queries.shape[1:3], jnp.float32),
        acc=jnp.zeros(queries.shape[1:], jnp.float32),
    )

    def read(
        index: Array, carry: tuple[_Softmax, _Softmax, _Buffer]
    ) -> tuple[_Softmax, _Softmax, _Buffer]:
        """One item; the state starts anew with each row, and what it is at last stays in the results."""
        state, results, buffer = carry
        row = jnp.sum(items.end <= index)
        turn = index - items.end[row] + items.num_chunks[row]
        chunk = items.first[row] + turn
        ids = jax.lax.dynamic_slice(items.tables, (row, chunk * columns), (1, columns))[0]
        key_pos = chunk * chunk_len + jnp.arange(chunk_len, dtype=jnp.int32)
        buffer = _fill(buffer, store, layer, ids, key_pos < items.key_end[row])
        seen = key_pos[None, :] <= query_end[row][:, None]
        if window is not None:
            seen &= key_pos[None, :] > query_pos[row][:, None] - window
        keys = buffer.kv if few else buffer.kv[..., :head_dim]
        values = buffer.kv if few else buffer.kv[..., head_dim:]
        state = jax.tree.map(lambda x, start: jnp.where(turn == 0, start, x), state, empty)
        state = _attend(state, queries[row], keys, values, seen, soft_cap)
        results = jax.tree.map(
            lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, row, 0), results, state
        )
        return state, results, buffer

    results = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), empty)
    carry = empty, results, _empty_buffer(store, columns)
    _, results, _ = jax.lax.fori_loop(0, items.end[-1], read, carry)

    nothing = results.total == 0  # not "total > 0": a NaN that a query sees must reach the output
    total = jnp.where(nothing, 1.0, results.total)
    out = jnp.where(nothing[..., None], 0.0, results.acc[..., -head_dim:] / total[..., None])
    lse = jnp.where(nothing, -jnp.inf, results.peak + jnp.log(total))
    out = out.reshape(rows, heads, query_len, group, head_dim).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(rows, heads, query_len, group).transpose(0, 2, 1, 3)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(rows, query_len, num_q_heads)


def _items(
    store: KVStore | SealedStore,
    view: BatchView,
    query_end: Array,
    columns: int,
    window: Array | int | None,
) -> _Items:
    """Returns the chunks of so many columns that hold what the queries see, the last of which i32[row, query] is given."""
    block_size, no_block = store.layout.block_size, store.layout.no_block
    chunk_len = columns * block_size
    key_end = jnp.max(query_end, axis=1) + 1
    first = jnp.zeros_like(key_end)
    if window is not None:
        first = jnp.maximum(view.kv_lens - view.q_lens - window + 1, 0) // chunk_len
    num_chunks = jnp.maximum((key_end + chunk_len - 1) // chunk_len - first, 0)
    # Past a row's last block its last one is read again: it is in the cache, and none of it is taken.
    last = jnp.maximum(key_end - 1, 0)[:, None] // block_size
    width = view.block_tables.shape[1]
    column = jnp.arange(width + -width % columns, dtype=jnp.int32)[None, :]
    tables = jnp.take_along_axis(view.block_tables, jnp.minimum(column, last), axis=1)
    return _Items(
        first, num_chunks, jnp.cumsum(num_chunks), key_end, jnp.minimum(tables, no_block - 1)
    )


def _attend(
    state: _Softmax,
    queries: Array,
    keys: Array,
    values: Array,
    seen: Array,
    soft_cap: Array | float | None,
) -> _Softmax:
    """Adds keys and values f32[kv_head, key, n] to the state of a row where seen bool[query, key]."""
    # With K as the left operand XLA:CPU need not repack it for a few queries.  The barrier keeps the
    # compiler from folding the transpose back into the product.
    scores = jnp.einsum("hkd,hqd->hkq", keys, queries, precision="highest")
    scores = jax.lax.optimization_barrier(scores).transpose(0, 2, 1)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    finite_peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing seen yet: exp(-inf - 0) = 0
    weights = jnp.exp(scores - finite_peak[..., None])
    shrink = jnp.exp(state.peak - finite_peak)
    update = jnp.einsum("hqk,hkd->hqd", weights, values, precision="highest")
    return _Softmax(
        peak=peak,
        total=state.total * shrink + jnp.sum(weights, axis=-1),
        acc=state.acc * shrink[..., None] + update,
    )


def _empty_buffer(store: KVStore | SealedStore, columns: int) -> _Buffer:
    """Returns the buffer of a chunk of so many blocks."""
    layout = store.layout
    shape = layout.num_kv_heads, columns * layout.block_size, 2 * layout.head_dim
    affine = (store.key_affine, store.value_affine) if isinstance(store, SealedStore) else ()
    return _Buffer(
        kv=jnp.zeros(shape, jnp.float32),
        affine=tuple(jnp.zeros((columns, *x.shape[2:]), x.dtype) for x in affine),
    )


def _fill(
    buffer: _Buffer, store: KVStore | SealedStore, layer: Array, ids: Array, exists: Array
) -> _Buffer:
    """Returns the buffer with the blocks ids i32[column]; K and V are 0 where exists bool[key] is False.

    Slots without a token may hold NaN, which no weight of 0 takes out of a product.

    Everything is written in two parts.  XLA:CPU runs a gather from a large array on all its threads, however little
    is gathered, unless it updates a part of a buffer in place; an update of the whole is no update.
    """
    layout = store.layout
    heads, head_dim, block_size = layout.num_kv_heads, layout.head_dim, layout.block_size
    middle = len(ids) // 2
    parts = ((ids[:middle], 0), (ids[middle:], middle))

    def put(kv: Array, piece: Array, key: int, channel: int) -> Array:
        piece = piece.reshape(heads, -1, piece.shape[-1])
        piece = jnp.where(exists[key : key + piece.shape[1], None], piece, 0.0)
        return jax.lax.dynamic_update_slice(kv, piece, (0, key, channel))

    kv, affine = buffer
    if isinstance(store, KVStore):
        head = jnp.arange(heads, dtype=jnp.int32)[:, None]
        for part, column in parts:
            blocks = decode(store.layout, store.kv[layer, part[None, :], head])
            kv = put(kv, blocks, column * block_size, 0)
        return _Buffer(kv, affine)

    def rows_of(into: Array, array: Array) -> Array:
        for part, column in parts:
            into = jax.lax.dynamic_update_slice_in_dim(into, array[layer, part], column, axis=0)
        return into

    affine = rows_of(affine[0], store.key_affine), rows_of(affine[1], store.value_affine)
    for unseal, rows, channel in zip(
        (unseal_keys, unseal_values), affine, (0, head_dim), strict=True
    ):
        codes = store.codes[layer, ids, ..., channel : channel + head_dim]
        kv = put(kv, unseal(store.layout, codes, rows).swapaxes(0, 1), 0, channel)
    return _Buffer(kv, affine)
