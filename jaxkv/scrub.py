"""Zeroing freed blocks (`CacheConfig.scrub_on_free`): nobody gets a block that still holds another's bytes.

A transition that frees blocks pushes their ids on the free stack, so what it freed is the stack between the old and the
new `num_free`.  The transition itself zeroes those blocks before it ends: a tenant's bytes go when its sequence
goes, not when the block is next needed.  `reserve` does so between evicting and handing out.

Invariants:
  * Every free block, and every free open block, is all zero: codes, scales and wide layers, all layers, a draft model's too.
  * A cached block keeps its bytes until it is evicted; a block that is kept keeps the bytes of truncated tokens until it is
    freed, out of reach of every sequence that does not own it.
  * The work follows the blocks freed, never the pool; with the option off there is none, and no program changes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxkv.block_pool import BlockPool
from jaxkv.config import CacheConfig
from jaxkv.kv_store import Store
from jaxkv.open_block import OpenBlocks
from pallas_kernels.block_zero import Pool, zero_blocks
from pallas_kernels.layout import KVStore

if TYPE_CHECKING:
    from jaxkv.cache import PagedKVCache

Array = jax.Array

_BATCH = 64  # ids a kernel call is given; a transition that frees nothing makes none


def scrub_freed(config: CacheConfig, cache: PagedKVCache, pool: BlockPool) -> PagedKVCache:
    """Zeroes the blocks that were freed between the cache's pool and `pool`.

    REQUIRES: since then blocks were only freed, none was taken.

    Args:
      config: the cache's config; nothing happens unless it says `scrub_on_free`.
      cache: with the ownership before.
      pool: ownership after.

    Returns:
      The cache with its bytes changed; its pool is still the one before.
    """
    if not config.scrub_on_free:
        return cache

    def scrubbed(store: Store) -> Store:
        num_free = cache.pool.num_free
        if isinstance(store, KVStore):
            return _zero_above(store, num_free, pool)
        return dataclasses.replace(
            store,
            sealed=_zero_above(store.sealed, num_free, pool),
            wide=None if store.wide is None else _zero_above(store.wide, num_free, pool),
        )

    return cache.map_stores(scrubbed)


def scrub_freed_open(
    config: CacheConfig, cache: PagedKVCache, after: OpenBlocks | None
) -> PagedKVCache:
    """Zeroes the open blocks that were freed between the cache's and `after`; none may have been taken."""
    before = cache.open_blocks
    if not config.scrub_on_free or before is None or after is None:
        return cache
    num_free, pool = before.pool.num_free, after.pool

    def scrubbed(store: Store) -> Store:
        if isinstance(store, KVStore):
            return store
        return dataclasses.replace(store, open=_zero_above(store.open, num_free, pool))

    return cache.map_stores(scrubbed)


def _zero_above(store: Pool, num_free: Array, pool: BlockPool) -> Pool:
    """Zeroes the blocks on the free stack from `num_free` to its top."""
    size = min(_BATCH, pool.num_blocks)

    def batch(state: tuple[Array, Pool]) -> tuple[Array, Pool]:
        done, store = state
        place = jnp.minimum(done + jnp.arange(size, dtype=jnp.int32), pool.num_blocks - 1)
        count = jnp.minimum(pool.num_free - done, size)
        return done + size, zero_blocks(store, pool.free_stack[place], count)

    return jax.lax.while_loop(lambda state: state[0] < pool.num_free, batch, (num_free, store))[1]
