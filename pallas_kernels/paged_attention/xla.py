r"""Paged attention in jnp: a running softmax over chunks of blocks; runs on every platform.

Cost follows the lengths: the loop ends at the longest row, and with a window it starts at the earliest key
any row sees.  Full blocks and the open block are read apart, because only an open block has slots that may
hold NaN: V needs a select there, and nowhere else (a select over all of V is a second pass over the KV).

One chunk on its way::

    table --> ids[row, column] --> gather K half [row, kv_head, key, head_dim] -- . q --> scores --> weights
                              \--> gather V half [row, kv_head, key, head_dim] -- . weights --> accumulator

A chunk is small enough to stay in the cache between its gathers and its products.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore, decode
from pallas_kernels.paged_attention.spec import last_seen, query_valid
from pallas_kernels.sealed import SealedBlocks, SealedStore, unseal

TOKENS_PER_CHUNK = 64


class _Softmax(NamedTuple):
    """Running softmax: peak, total f32[row, kv_head, query]; acc f32[row, kv_head, query, head_dim]."""

    peak: Array
    total: Array
    acc: Array


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
    layout = store.layout
    rows, query_len, num_q_heads, head_dim = q.shape
    heads, block_size = layout.num_kv_heads, layout.block_size
    group = num_q_heads // heads
    columns = max(1, TOKENS_PER_CHUNK // block_size)

    # A "query" below is one (q_pos, q_head within the group) pair of a kv head.
    queries = (q.astype(jnp.float32) * scale).reshape(rows, query_len, heads, group, head_dim)
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(rows, heads, query_len * group, head_dim)
    query_pos = jnp.repeat(jnp.where(query_valid(view), view.positions, -1), group, axis=1)
    query_end = jnp.repeat(last_seen(store, view), group, axis=1)

    def attend(
        state: _Softmax, keys: Array, values: Array, key_pos: Array, key_end: Array
    ) -> _Softmax:
        """Adds keys at key_pos i32[row, key], of which those below key_end i32[row, 1] exist."""
        # With K as the left operand XLA:CPU need not repack it for a few queries: 57 us a chunk against
        # 113.  The barrier keeps the compiler from folding the transpose back into the product.
        scores = jnp.einsum("rhkd,rhqd->rhkq", keys, queries, precision="highest")
        scores = jax.lax.optimization_barrier(scores).transpose(0, 1, 3, 2)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = (key_pos < key_end)[:, None, :] & (key_pos[:, None, :] <= query_end[:, :, None])
        if window is not None:
            seen &= key_pos[:, None, :] > query_pos[:, :, None] - window
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
        finite_peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # nothing seen yet: exp(-inf - 0) = 0
        weights = jnp.exp(scores - finite_peak[..., None])
        shrink = jnp.exp(state.peak - finite_peak)
        update = jnp.einsum("rhqk,rhkd->rhqd", weights, values, precision="highest")
        return _Softmax(
            peak=peak,
            total=state.total * shrink + jnp.sum(weights, axis=-1),
            acc=state.acc * shrink[..., None] + update,
        )

    slot = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    sealed = isinstance(store, SealedStore)
    num_full = (view.kv_lens - sealed) // block_size  # a query's own block is not read as codes
    num_full = jnp.maximum(num_full, 0)[:, None]  # i32[row, 1]
    tables = jnp.minimum(view.block_tables, layout.num_blocks - 1)
    # Past a row's full blocks read its last full one again: finite, cached, and of weight 0.
    last_full = jnp.take_along_axis(tables, jnp.maximum(num_full - 1, 0), axis=1)
    column = jnp.arange(tables.shape[1], dtype=jnp.int32)[None, :]
    full_ids = jnp.where(column < num_full, tables, last_full)
    full_ids = jnp.pad(full_ids, ((0, 0), (0, -full_ids.shape[1] % columns)), mode="edge")

    def full_chunk(chunk: Array, state: _Softmax) -> _Softmax:
        ids = jax.lax.dynamic_slice_in_dim(full_ids, chunk * columns, columns, axis=1)
        key_pos = chunk * columns * block_size
        key_pos += jnp.arange(columns * block_size, dtype=jnp.int32)[None, :]
        key_pos = jnp.broadcast_to(key_pos, (rows, columns * block_size))
        return attend(state, *_read(store, layer, ids), key_pos, num_full * block_size)

    state = _Softmax(
        peak=jnp.full(queries.shape[:3], -jnp.inf, jnp.float32),
        total=jnp.zeros(queries.shape[:3], jnp.float32),
        acc=jnp.zeros(queries.shape, jnp.float32),
    )
    first = jnp.int32(0)
    if window is not None:
        running = view.q_lens > 0
        earliest = jnp.where(running, view.kv_lens - view.q_lens - window + 1, view.kv_lens)
        first = jnp.maximum(jnp.min(earliest), 0) // (columns * block_size)
    end = (jnp.max(num_full) + columns - 1) // columns
    state = jax.lax.fori_loop(first, end, full_chunk, state)
    # A row without full blocks has read somebody's block with weight 0; 0 * NaN must not stay.
    state = state._replace(acc=jnp.where(state.total[..., None] == 0, 0.0, state.acc))

    if not sealed:
        open_ids = jnp.take_along_axis(tables, jnp.minimum(num_full, tables.shape[1] - 1), axis=1)
        written = num_full * block_size + slot < view.kv_lens[:, None]
        keys, values = _read(store, layer, open_ids)
        values = jnp.where(written[:, None, :, None], values, 0.0)
        state = attend(state, keys, values, num_full * block_size + slot, view.kv_lens[:, None])

    empty = state.total == 0  # not "total > 0": a NaN that a query sees must reach the output
    total = jnp.where(empty, 1.0, state.total)
    out = jnp.where(empty[..., None], 0.0, state.acc / total[..., None])
    lse = jnp.where(empty, -jnp.inf, state.peak + jnp.log(total))
    out = out.reshape(rows, heads, query_len, group, head_dim).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(rows, heads, query_len, group).transpose(0, 2, 1, 3)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(rows, query_len, num_q_heads)


def _read(store: KVStore | SealedStore, layer: Array, ids: Array) -> tuple[Array, Array]:
    """Returns K and V f32[row, kv_head, key, head_dim] of the blocks ids i32[row, column]."""
    layout = store.layout
    rows, heads, head_dim = ids.shape[0], layout.num_kv_heads, layout.head_dim
    if isinstance(store, SealedStore):
        arrays = (store.codes, store.key_affine, store.value_affine)
        blocks = unseal(store.layout, SealedBlocks(*(x[layer, ids] for x in arrays)))
        keys, values = (x.transpose(0, 2, 1, 3, 4) for x in blocks)
    else:
        head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        keys, values = (
            decode(
                store.layout, store.kv[layer, ids[:, None, :], head, :, begin : begin + head_dim]
            )
            for begin in (0, head_dim)
        )
    return keys.reshape(rows, heads, -1, head_dim), values.reshape(rows, heads, -1, head_dim)
