"""Causal attention over the call's own tokens, without a cache: for training and for full-forward checks.

Invariant: same meaning as the paged op (scale, window, GQA order, float32 softmax), no state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.qwen.modeling import Array, Attend, Qwen, Window


def dense_attend(scale: float) -> Attend[None]:
    """Returns an `attend` for `Qwen.forward` whose carry is None; rows hold tokens 0 .. q_pos - 1.

    Query j of kv group g sees keys max(0, j - window + 1) .. j of kv head q_head // group.  Padding belongs at
    the end of a row, where no real token sees it.
    """

    def attend(
        carry: None, layer: Array, q: Array, k: Array, v: Array, window: Window
    ) -> tuple[Array, None]:
        del layer
        rows, length, num_q_heads, head_dim = q.shape
        grouped = q.astype(jnp.float32).reshape(rows, length, k.shape[2], -1, head_dim)
        scores = jnp.einsum("rqhgd,rkhd->rhgqk", grouped, k.astype(jnp.float32)) * scale
        query = jnp.arange(length, dtype=jnp.int32)[:, None]
        key = jnp.arange(length, dtype=jnp.int32)[None, :]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        probs = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("rhgqk,rkhd->rqhgd", probs, v.astype(jnp.float32))
        return out.reshape(rows, length, num_q_heads, head_dim).astype(q.dtype), None

    return attend


def dense_forward(model: Qwen, tokens: Array) -> Array:
    """Returns hidden float[row, q_pos, hidden] of i32[row, q_pos] whole sequences, without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden, _ = model.forward(tokens, positions, dense_attend(model.config.head_dim**-0.5), None)
    return hidden
