"""Writing new tokens one at a time; the contract, not a fast path."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore, encode


def write_kv_reference(
    store: KVStore, layer: Array, k: Array, v: Array, view: BatchView
) -> KVStore:
    """Returns the store with the new tokens written; see spec.py."""
    layout = store.layout
    rows, query_len = view.positions.shape

    def write_one(index: Array, kv: Array) -> Array:
        row, j = index // query_len, index % query_len
        position = view.kv_lens[row] - view.q_lens[row] + j
        block = view.block_tables[row, position // layout.block_size]
        real = (j < view.q_lens[row]) & (block < layout.num_blocks)
        token = encode(layout, jnp.concatenate([k[row, j], v[row, j]], axis=-1))
        written = kv.at[layer, block, :, position % layout.block_size].set(token)
        return jnp.where(real, written, kv)

    kv = jax.lax.fori_loop(0, rows * query_len, write_one, store.kv)
    return dataclasses.replace(store, kv=kv)
