"""Writing new tokens by one XLA scatter; runs anywhere, in place when the store is donated."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore, encode
from pallas_kernels.paged_attention.spec import query_valid


def write_kv_xla(store: KVStore, layer: Array, k: Array, v: Array, view: BatchView) -> KVStore:
    """Returns the store with the new tokens written; see spec.py."""
    layout = store.layout
    column = view.positions // layout.block_size  # padding has position 0: in range, dropped below
    block = jnp.take_along_axis(view.block_tables, column, axis=1)
    block = jnp.where(query_valid(view), block, layout.no_block)
    slot = view.positions % layout.block_size
    fused = encode(layout, jnp.concatenate([k, v], axis=-1))  # [row, q_pos, kv_head, 2 * head_dim]
    kv = store.kv.at[layer, block, :, slot].set(fused, mode="drop")
    return dataclasses.replace(store, kv=kv)
