"""Which open block each sequence writes into, for quantised formats: a small pool of full-precision blocks.

Invariants:
  * A sequence with tokens in its last block that are not sealed (kv_len % block_size != 0) has an open block.
  * An open block holds the tokens of block ``(kv_len - 1) // block_size`` of its sequences, and nothing else; it stays with them
    when that block is full, until the next `reserve` begins a new one, so that `truncate` can go back into it.
  * There are max_seqs open blocks and a sequence has at most one, so they never run out.
  * Open blocks are shared by `fork` and copied on write, by the same rule as blocks: of k siblings that write, k - 1 copy.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkv import block_pool
from jaxkv.block_pool import BlockPool
from jaxkv.config import CacheConfig

Array = jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pool", "ids"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class OpenBlocks:
    """Ownership of the open blocks.

    Attributes:
      pool: their ref counts and free stack; ``pool.num_blocks == max_seqs``, also the sentinel "none".
      ids: i32[seq], the open block of each slot; `max_seqs` for none.
    """

    pool: BlockPool
    ids: Array


def init_open_blocks(config: CacheConfig) -> OpenBlocks | None:
    """Returns the open blocks of an empty cache; None if its format has none."""
    if not config.is_quantised:
        return None
    return OpenBlocks(
        pool=block_pool.init_pool(config.max_seqs),
        ids=jnp.full(config.max_seqs, config.max_seqs, jnp.int32),
    )


def writers_that_copy(ids: Array, writes: Array, ref_counts: Array) -> Array:
    """Returns bool[row]: which rows may not write into the block ids[row] they share.

    Of the rows that write into one block with ref k, the first k - 1 must not; if all owners write, the last keeps it.

    Args:
      ids: i32[row], ids past the pool where a row has no block.
      writes: bool[row].
      ref_counts: i32[block].
    """
    num_blocks = ref_counts.shape[0]
    real = writes & (ids < num_blocks)
    same = (ids[:, None] == ids[None, :]) & real[:, None] & real[None, :]
    earlier = jnp.sum(jnp.tril(same, k=-1), axis=1)
    return real & (earlier < ref_counts[jnp.minimum(ids, num_blocks - 1)] - 1)


def write_open_blocks(
    config: CacheConfig, blocks: OpenBlocks, slot: Array, old_lens: Array, asked: Array
) -> tuple[OpenBlocks, Array, Array]:
    """Gives each writing row an open block of its own.

    REQUIRES: the reserve succeeds; no slot twice.

    Args:
      config: the cache's config.
      blocks: ownership before.
      slot, old_lens, asked: i32[row], slots, lengths before, and new tokens (0: the row writes nothing).

    Returns:
      Ownership after, and i32[row] pairs (from, to): the open blocks to copy; `max_seqs` where nothing is copied.
    """
    none = config.max_seqs
    old = jnp.where(asked > 0, blocks.ids[slot], none)
    leaves = writers_that_copy(old, asked > 0, blocks.pool.ref_counts)
    takes = (asked > 0) & (leaves | (old == none))
    pool, new = block_pool.take(blocks.pool, takes.astype(jnp.int32), 1)
    pool = block_pool.drop(pool, jnp.where(leaves, old, none))
    ids = jnp.where(takes, new[:, 0], old)
    copied = leaves & (old_lens % config.block_size != 0)
    written = jnp.where(asked > 0, slot, none)
    after = OpenBlocks(pool=pool, ids=blocks.ids.at[written].set(ids, mode="drop"))
    return after, jnp.where(copied, old, none), jnp.where(copied, ids, none)


def fork_open_blocks(
    config: CacheConfig, blocks: OpenBlocks, source: Array, target: Array, real: Array
) -> OpenBlocks:
    """Makes each real target slot a second owner of its source's open block; what it had is dropped.

    A source `max_seqs` has none.
    """
    none = config.max_seqs
    shared = jnp.where(real & (source < none), blocks.ids[jnp.minimum(source, none - 1)], none)
    pool = block_pool.share(blocks.pool, shared)
    pool = block_pool.drop(pool, jnp.where(real, blocks.ids[target], none))
    written = jnp.where(real, target, none)
    return OpenBlocks(pool=pool, ids=blocks.ids.at[written].set(shared, mode="drop"))


def drop_open_blocks(
    config: CacheConfig, blocks: OpenBlocks, slot: Array, gone: Array
) -> OpenBlocks:
    """Takes the open block from each slot[row] where gone[row]; no slot twice."""
    none = config.max_seqs
    pool = block_pool.drop(blocks.pool, jnp.where(gone, blocks.ids[slot], none))
    written = jnp.where(gone, slot, none)
    return OpenBlocks(pool=pool, ids=blocks.ids.at[written].set(none, mode="drop"))


def can_truncate(
    config: CacheConfig, blocks: OpenBlocks, slot: Array, old_lens: Array, new_lens: Array
) -> Array:
    """Returns bool[row]: the new length does not cut into a sealed block whose tokens are only codes.

    A cut at a block's edge always can; a cut into the last block can while its open block is there.
    """
    at_edge = new_lens % config.block_size == 0
    last = jnp.maximum(old_lens - 1, 0) // config.block_size
    in_last = (new_lens // config.block_size == last) & (blocks.ids[slot] < config.max_seqs)
    return at_edge | in_last | (new_lens == old_lens)


def truncate_open_blocks(
    config: CacheConfig,
    blocks: OpenBlocks,
    slot: Array,
    old_lens: Array,
    new_lens: Array,
    real: Array,
) -> OpenBlocks:
    """Drops the open blocks of rows whose last block is another one after the cut."""
    old_last = (old_lens - 1) // config.block_size
    moved = (new_lens - 1) // config.block_size != old_last
    return drop_open_blocks(config, blocks, slot, real & (new_lens < old_lens) & moved)
