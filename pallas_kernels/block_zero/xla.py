"""Zeroing whole blocks one after the other; runs anywhere, in place when the store is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Array, KVStore
from pallas_kernels.sealed import SealedStore


def zero_blocks_xla(
    store: KVStore | SealedStore, ids: Array, count: Array
) -> KVStore | SealedStore:
    """Returns the store with the first `count` blocks named set to 0; see `zero_blocks`."""
    if ids.shape[0] == 0:
        return store

    def zero_one(i: Array, store: KVStore | SealedStore) -> KVStore | SealedStore:
        def zero(pool: Array) -> Array:
            block = jnp.zeros((pool.shape[0], 1, *pool.shape[2:]), pool.dtype)
            return jax.lax.dynamic_update_slice_in_dim(pool, block, ids[i], axis=1)

        return jax.tree.map(zero, store)

    return jax.lax.fori_loop(0, count, zero_one, store)
