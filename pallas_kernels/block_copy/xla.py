"""Copying whole blocks one after the other; runs anywhere, in place when the store is donated."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.layout import Array, KVStore


def copy_blocks_xla(store: KVStore, src: Array, dst: Array, count: Array) -> KVStore:
    """Returns the store with the first `count` pairs copied; see `copy_blocks`."""

    if src.shape[0] == 0:
        return store

    def copy_one(i: Array, kv: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(kv, src[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(kv, block, dst[i], axis=1)

    return dataclasses.replace(store, kv=jax.lax.fori_loop(0, count, copy_one, store.kv))
