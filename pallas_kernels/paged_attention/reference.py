"""Paged attention in plain float32 jnp: one dense gather, one softmax.  The contract, not a fast path."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore, decode
from pallas_kernels.sealed import SealedBlocks, SealedStore, unseal


def paged_attention_reference(
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
    tables = jnp.minimum(view.block_tables, layout.num_blocks - 1)
    if isinstance(store, SealedStore):
        arrays = (store.codes, store.key_affine, store.value_affine)
        blocks = SealedBlocks(*(x[layer, tables] for x in arrays))
        kv = jnp.concatenate(unseal(store.layout, blocks), axis=-1)
    else:
        kv = decode(store.layout, store.kv[layer, tables])
    # [row, column, kv_head, slot, 2 * head_dim]
    kv = kv.transpose(0, 2, 1, 3, 4).reshape(rows, layout.num_kv_heads, -1, 2 * head_dim)
    kv = jnp.repeat(
        kv, num_q_heads // layout.num_kv_heads, axis=1
    )  # [row, q_head, key, 2 * head_dim]
    keys, values = kv[..., :head_dim], kv[..., head_dim:]

    scores = jnp.einsum("rqhd,rhkd->rqhk", q.astype(jnp.float32), keys, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)

    key_pos = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, None, :]
    query_index = jnp.arange(query_len, dtype=jnp.int32)[None, :]
    query_pos = ((view.kv_lens - view.q_lens)[:, None] + query_index)[:, :, None]
    if isinstance(store, SealedStore):  # the blocks before the query's own
        seen = key_pos // layout.block_size < query_pos // layout.block_size
    else:
        seen = key_pos <= query_pos
    seen &= (query_index < view.q_lens[:, None])[:, :, None]
    if window is not None:
        seen &= key_pos > query_pos - window
    seen = seen[:, :, None, :]  # [row, q_pos, 1, key]

    scores = jnp.where(seen, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.where(seen, jnp.exp(scores - peak), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probs = weights / jnp.where(total != 0, total, 1.0)
    some_query_sees = jnp.any(seen, axis=(1, 2))[:, None, :, None]  # [row, 1, key, 1]
    values = jnp.where(some_query_sees, values, 0.0)
    out = jnp.einsum("rqhk,rhkd->rqhd", probs, values, precision="highest")
    lse = jnp.where(total != 0, peak + jnp.log(jnp.where(total != 0, total, 1.0)), -jnp.inf)
    return out.astype(q.dtype), lse[..., 0]
