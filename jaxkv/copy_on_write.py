"""Copying shared open blocks before they are written, and what the copies cost.

Invariants:
  * Of k siblings that write into one open block k - 1 copy it; the last keeps it. A full block is never copied.
  * A sealed format copies no codes: of a block that is not full it has none.  Its open block is copied, and where a block
    of the pool is replaced by a new one only the wide layers are.

References: doc 000 section 3.2; Kwon et al. 2023 section 4.4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp

from jaxkv.config import CacheConfig
from jaxkv.kv_store import Store, copy_pairs
from jaxkv.open_block import write_open_blocks, writers_that_copy
from pallas_kernels.layout import KVLayout, KVStore
from pallas_kernels.sealed import QuantisedStore

if TYPE_CHECKING:
    from jaxkv.cache import PagedKVCache

Array = jax.Array


def shared_tails(
    config: CacheConfig, cache: PagedKVCache, slot: Array, old_lens: Array, asked: Array
) -> tuple[Array, Array]:
    """Finds the open block of each writing row, and which rows must copy it first.

    Args:
      config: the cache's config.
      cache: the cache before.
      slot, old_lens, asked: i32[row], slots, lengths before, new tokens.

    Returns:
      tail i32[row] (NO_BLOCK where the row writes into no open block), copies i32[row] of 0 or 1.
    """
    into_open = (asked > 0) & (old_lens % config.block_size != 0)
    tail = cache.tables.blocks[slot, old_lens // config.block_size]
    tail = jnp.where(into_open, tail, config.no_block)
    copies = writers_that_copy(tail, into_open, cache.pool.ref_counts)
    return tail, copies.astype(jnp.int32)


def copy_shared(
    config: CacheConfig,
    cache: PagedKVCache,
    rows: tuple[Array, Array, Array],
    tail: Array,
    copy_to: Array,
) -> PagedKVCache:
    """Copies the bytes of shared open blocks to where their writers go on.

    Args:
      config: the cache's config.
      cache: the cache before.
      rows: (slot, old_lens, asked), i32[row] each.
      tail, copy_to: i32[row] ids of the pool's blocks; NO_BLOCK in `copy_to` where nothing is copied.

    Returns:
      The cache with its bytes and its open blocks changed.
    """
    if cache.open_blocks is None:
        return cache.map_stores(lambda store: copy_pairs(cast(KVStore, store), tail, copy_to))
    open_blocks, src, dst = write_open_blocks(config, cache.open_blocks, *rows)

    def copied(store: Store) -> Store:
        store = cast(QuantisedStore, store)
        wide = None if store.wide is None else copy_pairs(store.wide, tail, copy_to)
        return dataclasses.replace(store, open=copy_pairs(store.open, src, dst), wide=wide)

    return dataclasses.replace(cache.map_stores(copied), open_blocks=open_blocks)


def count_copies(
    config: CacheConfig, before: PagedKVCache, after: PagedKVCache, asked: Array
) -> Array:
    """Returns i32[2]: the blocks of the pool and the open blocks that a reserve copied.

    A copy shows in the tables: a slot's last block was not full, the slot writes, and the block is another one now.

    Args:
      config: the cache's config.
      before, after: the cache around one `reserve`.
      asked: i32[max_seqs], new tokens of every slot.
    """
    lens = before.tables.kv_lens
    filling = (asked > 0) & (lens % config.block_size != 0)
    column = (lens // config.block_size)[:, None]

    def tail(cache: PagedKVCache) -> Array:
        return jnp.take_along_axis(cache.tables.blocks, column, axis=1, mode="clip")[:, 0]

    pool = jnp.sum(filling & (tail(before) != tail(after)), dtype=jnp.int32)
    if before.open_blocks is None or after.open_blocks is None:
        return jnp.stack([pool, jnp.zeros_like(pool)])
    moved = filling & (before.open_blocks.ids != after.open_blocks.ids)
    return jnp.stack([pool, jnp.sum(moved, dtype=jnp.int32)])


def copied_bytes(config: CacheConfig, num_copies: tuple[int, int]) -> int:
    """Returns the bytes that so many copies of blocks of the pool and of open blocks moved, all layers."""
    layout = config.layout
    blocks, open_blocks = num_copies
    if isinstance(layout, KVLayout):
        return blocks * (layout.nbytes // config.num_blocks)
    wide = 0 if layout.wide is None else layout.wide.nbytes // config.num_blocks
    return blocks * wide + open_blocks * (layout.open.nbytes // config.max_seqs)
