"""Attention of queries to the tokens of their own block, block by block; plain jnp, small, on every platform.

The part of a chunk's attention that a quantised cache does in full precision.  Its cost per query is one block, whatever the
length of the sequence.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import Array


def own_block_attention(
    q: Array,
    kv: Array,
    *,
    scale: Array | float,
    soft_cap: Array | float | None,
    window: Array | int | None,
) -> tuple[Array, Array]:
    """Returns causal attention inside each block: the query in slot j sees slots 0 .. j.

    Args:
      q: float[row, block, slot, q_head, head_dim].
      kv: f32[row, block, kv_head, slot, 2 * head_dim], finite in every slot.
      scale, soft_cap, window: as in `paged_attention`.

    Returns:
      out f32[row, block, slot, q_head, head_dim], lse f32[row, block, slot, q_head].
    """
    rows, blocks, slots, num_q_heads, head_dim = q.shape
    keys, values = kv[..., :head_dim], kv[..., head_dim:]
    grouped = (q.astype(jnp.float32) * scale).reshape(
        rows, blocks, slots, kv.shape[2], -1, head_dim
    )
    scores = jnp.einsum("rbqhgd,rbhkd->rbhgqk", grouped, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    query, key = jnp.arange(slots)[:, None], jnp.arange(slots)[None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    scores = jnp.where(seen[None, None, None, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)  # finite: a query sees at least itself
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("rbhgqk,rbhkd->rbqhgd", weights / total, values, precision="highest")
    lse = jnp.moveaxis((peak + jnp.log(total))[..., 0], 4, 2)
    return out.reshape(q.shape), lse.reshape(rows, blocks, slots, num_q_heads)
