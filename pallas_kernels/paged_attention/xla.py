"""Paged attention in jnp with a running softmax over chunks of blocks; runs anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore, decode
from pallas_kernels.paged_attention.spec import query_valid

BLOCKS_PER_CHUNK = 4


def paged_attention_xla(
    q: Array,
    store: KVStore,
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
    heads = layout.num_kv_heads
    group = num_q_heads // heads
    bs = layout.block_size
    chunk = BLOCKS_PER_CHUNK * bs
    tables = jnp.minimum(view.block_tables, layout.num_blocks - 1)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % BLOCKS_PER_CHUNK)))
    qs = q.astype(jnp.float32) * scale
    # [row, kv_head, q_pos*group, d]
    qs = qs.reshape(rows, query_len, heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    qs = qs.reshape(rows, heads, query_len * group, head_dim)
    valid_q = query_valid(view)
    qpos = jnp.where(valid_q, view.positions, -1)
    qpos = jnp.repeat(qpos, group, axis=1)  # [row, q_pos*group]
    last = jnp.max(view.kv_lens)

    def body(state):
        index, peak, total, acc = state
        ids = jax.lax.dynamic_slice_in_dim(tables, index * BLOCKS_PER_CHUNK, BLOCKS_PER_CHUNK, axis=1)
        kv = decode(layout, store.kv[layer, ids])  # [row, col, head, slot, 2d]
        keys, values = kv[..., :head_dim], kv[..., head_dim:]
        s = jnp.einsum("rhqd,rchsd->rhqcs", qs, keys).reshape(rows, heads, -1, chunk)
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        kpos = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        seen = kpos[None, None, :] <= qpos[:, :, None]
        if window is not None:
            seen &= kpos[None, None, :] > qpos[:, :, None] - window
        s = jnp.where(seen[:, None], s, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(s, axis=-1))
        safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        w = jnp.exp(s - safe[..., None])
        corr = jnp.exp(peak - safe)
        total = total * corr + jnp.sum(w, axis=-1)
        live = (kpos[None] < view.kv_lens[:, None]).reshape(rows, BLOCKS_PER_CHUNK, 1, bs, 1)
        values = jnp.where(live, values, 0.0)
        pv = jnp.einsum("rhqcs,rchsd->rhqd", w.reshape(rows, heads, -1, BLOCKS_PER_CHUNK, bs), values)
        acc = acc * corr[..., None] + pv
        return index + 1, new_peak, total, acc

    n = -(-last // chunk)
    init = (
        jnp.int32(0),
        jnp.full(qs.shape[:3], -jnp.inf, jnp.float32),
        jnp.zeros(qs.shape[:3], jnp.float32),
        jnp.zeros(qs.shape, jnp.float32),
    )
    _, peak, total, acc = jax.lax.while_loop(lambda s: s[0] < n, body, init)
    safe_total = jnp.where(total > 0, total, 1.0)
    out = acc / safe_total[..., None]
    lse = jnp.where(total > 0, peak + jnp.log(safe_total), -jnp.inf)
    out = out.reshape(rows, heads, query_len, group, head_dim).transpose(0, 2, 1, 3, 4)
    lse = lse.reshape(rows, heads, query_len, group).transpose(0, 2, 1, 3)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(rows, query_len, num_q_heads)
