"""One layer of a quantised cache: write, seal, and attend over codes and open blocks.

What a query reads depends only on its position, never on the call it came in::

    query at p:   codes of the blocks before block p // block_size     (paged_attention over the SealedStore)
                + full precision of its own block, up to p             (open block; in a chunk, the chunk's own tokens)
    out = merge by log-sum-exp

One new token a row (decode) goes into the open block first and is read from there.  A chunk is laid out block by block
(`_stage`): the open block's tokens, then the new ones; each block is read by its own queries, the full ones are sealed, and the
tokens of the last one go into the open store.  Codes are made of what the open store would hold, rounded to its format, so
they do not depend on the chunks either.

What may or may not happen to a pool is a loop of one round or none, never a `lax.cond`: XLA for CUDA copies what a cond returns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from pallas_kernels.block_seal import seal_blocks
from pallas_kernels.cached_attention.own_block import own_block_attention
from pallas_kernels.dispatch import when
from pallas_kernels.kv_write import write_kv
from pallas_kernels.layout import Array, BatchView, KVStore, decode, encode
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sealed import QuantisedStore, SealedStore

Options = dict[str, Any]
Carry = TypeVar("Carry")


def quantised_attention(
    q: Array,
    k: Array,
    v: Array,
    store: QuantisedStore,
    layer: Array,
    view: BatchView,
    read: BatchView,
    options: Options,
    implementation: str,
) -> tuple[Array, QuantisedStore]:
    """Returns (out, store) of one layer; see `cached_attention`.

    `read` is the view with the rows that are not to be read empty (see `rows_to_read`).

    Raises:
      ValueError: the view names no open blocks.
    """
    if view.open_ids is None:
        raise ValueError("view.open_ids: expected i32[row] for a quantised store, got None")
    num_wide = store.layout.num_wide_layers
    call = _Call(q, k, v, view, read, options, implementation)
    if store.wide is None:
        return _quantised_layer(call, store, layer)
    end = store.layout.num_layers - num_wide
    is_wide = (layer < num_wide) | (layer >= end)
    wide_layer = jnp.where(layer < num_wide, layer, layer - end + num_wide)
    carry = jnp.zeros_like(q), store
    carry = when(is_wide, lambda _, carry: _wide_layer(call, carry[1], wide_layer), carry)
    return when(
        ~is_wide, lambda _, carry: _quantised_layer(call, carry[1], layer - num_wide), carry
    )


class _Call(NamedTuple):
    """What the caller of `cached_attention` gave, but for the store."""

    q: Array
    k: Array
    v: Array
    view: BatchView
    read: BatchView
    options: Options
    implementation: str


def _wide_layer(call: _Call, store: QuantisedStore, layer: Array) -> tuple[Array, QuantisedStore]:
    """A layer that is not quantised."""
    how: Options = {"implementation": call.implementation}
    wide = write_kv(cast(KVStore, store.wide), layer, call.k, call.v, call.view, **how)
    out = paged_attention(call.q, wide, layer, call.read, **call.options, **how)
    return cast(Array, out), dataclasses.replace(store, wide=wide)


def _quantised_layer(
    call: _Call, store: QuantisedStore, layer: Array
) -> tuple[Array, QuantisedStore]:
    how: Options = {"implementation": call.implementation}
    tail = _tail_view(call.view, store.layout.block_size)
    write = _write_token if call.view.query_len == 1 else _write_chunk
    store, own, own_lse = write(call, store, layer, tail)
    past, past_lse = paged_attention(
        call.q, store.sealed, layer, call.read, **call.options, **how, return_lse=True
    )
    return _merge(call.q.dtype, past, past_lse, own, own_lse), store


def _write_token(
    call: _Call, store: QuantisedStore, layer: Array, tail: BatchView
) -> tuple[QuantisedStore, Array, Array]:
    """Decode: one token a row, through the open block.

    Returns:
      The store, and out and lse of the attention to the token's own block.
    """
    how: Options = {"implementation": call.implementation}
    open_ = write_kv(store.open, layer, call.k, call.v, tail, **how)
    read = _tail_view(call.read, store.layout.block_size)
    out, lse = paged_attention(call.q, open_, layer, read, **call.options, **how, return_lse=True)
    full = (tail.q_lens > 0) & (tail.kv_lens == store.layout.block_size)
    ids = jnp.where(full, _tail_ids(call.view, store), store.layout.sealed.no_block)
    open_ids = jnp.minimum(tail.block_tables[:, 0], open_.layout.num_blocks - 1)
    store = dataclasses.replace(store, open=open_)
    return (
        _seal(store, layer, lambda layer: decode(open_.layout, open_.kv[layer, open_ids]), ids),
        out,
        lse,
    )


def _write_chunk(
    call: _Call, store: QuantisedStore, layer: Array, tail: BatchView
) -> tuple[QuantisedStore, Array, Array]:
    """Several tokens a row: each reads its own block as staged; full blocks are sealed, the last goes open.

    Returns:
      The store, and out and lse of the attention of each token to its own block.
    """
    view, block_size = call.view, store.layout.block_size
    slot = (view.kv_lens - view.q_lens) % block_size
    staged = _stage(call, store.open, layer, slot)  # [row, block, kv_head, token, 2 * head_dim]
    rows, num_staged = staged.shape[:2]
    position = jnp.arange(num_staged * block_size, dtype=jnp.int32)[None, :]
    query = jnp.clip(position - slot[:, None], 0, view.query_len - 1)
    q = jnp.take_along_axis(call.q, query[:, :, None, None], axis=1)
    q = q.reshape(rows, num_staged, block_size, *q.shape[2:])
    out, lse = own_block_attention(q, staged, **call.options)
    out, lse = (x.reshape(rows, num_staged * block_size, *x.shape[3:]) for x in (out, lse))
    back = slot[:, None] + jnp.arange(view.query_len, dtype=jnp.int32)[None, :]
    out = jnp.take_along_axis(out, back[:, :, None, None], axis=1)
    lse = jnp.take_along_axis(lse, back[:, :, None], axis=1)
    valid = jnp.arange(view.query_len, dtype=jnp.int32)[None, :] < call.read.q_lens[:, None]
    lse = jnp.where(valid[..., None], lse, -jnp.inf)

    column = ((view.kv_lens - view.q_lens) // block_size)[:, None]
    column += jnp.arange(num_staged, dtype=jnp.int32)[None, :]
    full = ((column + 1) * block_size <= view.kv_lens[:, None]) & (view.q_lens > 0)[:, None]
    ids = jnp.take_along_axis(
        view.block_tables, jnp.minimum(column, view.block_tables.shape[1] - 1), axis=1
    )
    ids = jnp.where(full, ids, store.layout.sealed.no_block).reshape(-1)
    store = _seal(store, layer, lambda _: staged.reshape(-1, *staged.shape[2:]), ids)

    first = view.q_lens - tail.q_lens
    token = first[:, None] + jnp.arange(tail.query_len, dtype=jnp.int32)[None, :]
    token = jnp.clip(token, 0, view.query_len - 1)[:, :, None, None]
    k, v = (jnp.take_along_axis(x, token, axis=1) for x in (call.k, call.v))
    how: Options = {"implementation": call.implementation}
    return dataclasses.replace(store, open=write_kv(store.open, layer, k, v, tail, **how)), out, lse


def _tail_view(view: BatchView, block_size: int) -> BatchView:
    """Returns the view of each row's last block as the open store sees it: one block a row, positions from 0."""
    running = view.q_lens > 0
    begin = jnp.maximum(view.kv_lens - 1, 0) // block_size * block_size
    kv_lens = jnp.where(running, view.kv_lens - begin, 0)
    q_lens = jnp.minimum(view.q_lens, kv_lens)
    offset = jnp.arange(min(view.query_len, block_size), dtype=jnp.int32)[None, :]
    positions = (kv_lens - q_lens)[:, None] + offset
    return BatchView(
        block_tables=cast(Array, view.open_ids)[:, None],
        kv_lens=kv_lens,
        q_lens=q_lens,
        positions=jnp.where(offset < q_lens[:, None], positions, 0),
        open_ids=None,
    )


def _tail_ids(view: BatchView, store: QuantisedStore) -> Array:
    """Returns i32[row]: the pool's id of each row's last block."""
    column = jnp.maximum(view.kv_lens - 1, 0) // store.layout.block_size
    return jnp.take_along_axis(view.block_tables, column[:, None], axis=1)[:, 0]


def _stage(call: _Call, open_: KVStore, layer: Array, slot: Array) -> Array:
    """Lays the open block's tokens and the new ones of each row out in whole blocks.

    Args:
      call: the call.
      open_: the open blocks.
      layer: i32[].
      slot: i32[row], tokens already in the open block.

    Returns:
      f32[row, block, kv_head, token, 2 * head_dim], rounded to the open format; zeros where no token is.
    """
    layout, view = open_.layout, call.view
    block_size, rows = layout.block_size, slot.shape[0]
    num_staged = 1 + (block_size + view.query_len - 2) // block_size
    new = decode(layout, encode(layout, jnp.concatenate([call.k, call.v], axis=-1)))
    position = jnp.arange(num_staged * block_size, dtype=jnp.int32)[None, :]
    token = position - slot[:, None]
    new = jnp.take_along_axis(
        new, jnp.clip(token, 0, view.query_len - 1)[:, :, None, None], axis=1
    ).transpose(0, 2, 1, 3)  # [row, kv_head, staged token, 2 * head_dim]
    ids = jnp.minimum(cast(Array, view.open_ids), layout.num_blocks - 1)
    old = decode(layout, open_.kv[layer, ids])  # [row, kv_head, token, 2 * head_dim]
    old = jnp.pad(old, ((0, 0), (0, 0), (0, (num_staged - 1) * block_size), (0, 0)))
    is_old = ((token < 0) & (view.q_lens > 0)[:, None])[:, None, :, None]
    is_new = ((token >= 0) & (token < view.q_lens[:, None]))[:, None, :, None]
    staged = jnp.where(is_new, new, jnp.where(is_old, old, 0.0))
    staged = staged.reshape(rows, layout.num_kv_heads, num_staged, block_size, -1)
    return staged.transpose(0, 2, 1, 3, 4)


def _seal(store: QuantisedStore, layer: Array, read: Any, ids: Array) -> QuantisedStore:
    """Seals the blocks `read(layer)` returns where ids name one; reads and writes nothing if none does."""

    def seal_once(turn: Array, sealed: SealedStore) -> SealedStore:
        # Tied to the turn: XLA would compute what does not depend on it before the loop, needed or not.
        tied, _ = jax.lax.optimization_barrier((layer, turn))
        kv, _ = jax.lax.optimization_barrier((read(tied), turn))
        return seal_blocks(sealed, tied, kv, ids)

    sealed = when(jnp.any(ids < store.layout.sealed.no_block), seal_once, store.sealed)
    return dataclasses.replace(store, sealed=sealed)


def _merge(dtype: Any, a: Array, a_lse: Array, b: Array, b_lse: Array) -> Array:
    """Returns the attention over two disjoint sets of keys, given that over each; zeros where both are empty."""
    peak = jnp.maximum(a_lse, b_lse)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    a_weight, b_weight = jnp.exp(a_lse - peak), jnp.exp(b_lse - peak)
    total = a_weight + b_weight
    total = jnp.where(total == 0, 1.0, total)
    out = a.astype(jnp.float32) * (a_weight / total)[..., None]
    return (out + b.astype(jnp.float32) * (b_weight / total)[..., None]).astype(dtype)
