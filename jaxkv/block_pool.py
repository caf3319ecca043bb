"""Ownership of blocks: reference counts and a stack of free ids.

Invariants:
  * ``ref_counts[b]`` is the number of table entries that name block b; a block with count 0 is free.
  * ``free_stack[:num_free]`` holds every free id once; what lies above is left over and never read.
  * No operation touches the whole pool: the cost follows the number of ids given, not num_blocks.
  * Counts are never clamped.  Callers check before they change (see `cache`).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ref_counts", "free_stack", "num_free"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Which blocks are owned, and how often.

    Attributes:
      ref_counts: i32[block].
      free_stack: i32[block]; entries below `num_free` are the free ids, the top is taken first.
      num_free: i32[].
    """

    ref_counts: Array
    free_stack: Array
    num_free: Array

    @property
    def num_blocks(self) -> int:
        """Static number of blocks; also the sentinel NO_BLOCK."""
        return self.ref_counts.shape[0]


def init_pool(num_blocks: int) -> BlockPool:
    """Returns a pool with every block free; block 0 is taken first."""
    return BlockPool(
        ref_counts=jnp.zeros(num_blocks, jnp.int32),
        free_stack=jnp.arange(num_blocks - 1, -1, -1, dtype=jnp.int32),
        num_free=jnp.int32(num_blocks),
    )


def take(pool: BlockPool, num_wanted: Array, width: int) -> tuple[BlockPool, Array]:
    """Takes blocks for several rows at once and gives each a count of 1.

    REQUIRES: sum(num_wanted) <= num_free, and num_wanted <= width.

    Args:
      pool: the pool.
      num_wanted: i32[row], blocks for each row.
      width: static upper bound of `num_wanted`.

    Returns:
      The pool, and i32[row, width] ids; entries past a row's count hold NO_BLOCK.
    """
    start = jnp.cumsum(num_wanted) - num_wanted
    column = jnp.arange(width, dtype=jnp.int32)
    wanted = column[None, :] < num_wanted[:, None]
    place = pool.num_free - 1 - start[:, None] - column[None, :]
    ids = pool.free_stack[jnp.where(wanted, place, 0)]
    ids = jnp.where(wanted, ids, pool.num_blocks)
    taken = BlockPool(
        ref_counts=pool.ref_counts.at[ids].set(1, mode="drop"),
        free_stack=pool.free_stack,
        num_free=pool.num_free - jnp.sum(num_wanted),
    )
    return taken, ids


def share(pool: BlockPool, ids: Array) -> BlockPool:
    """Adds one owner to each id (i32[...], repeats count, NO_BLOCK is skipped)."""
    return dataclasses.replace(pool, ref_counts=pool.ref_counts.at[ids].add(1, mode="drop"))


def drop(pool: BlockPool, ids: Array) -> BlockPool:
    """Takes one owner from each id (i32[n], repeats count, NO_BLOCK is skipped); frees what has none left.

    REQUIRES: every named block has at least as many owners as the call takes.
    """
    pool, last = disown(pool, ids)
    return push(pool, jnp.where(last, ids, pool.num_blocks))


def disown(pool: BlockPool, ids: Array) -> tuple[BlockPool, Array]:
    """Takes one owner from each id as `drop` does, but frees nothing.

    Returns:
      The pool, and bool[n]: the places whose block has no owner left; one place for each such block.
    """
    counts = pool.ref_counts.at[ids].add(-1, mode="drop")
    orphan = (ids < pool.num_blocks) & (counts[jnp.minimum(ids, pool.num_blocks - 1)] == 0)
    # A block may be named twice in `ids`.  Its count is 0 now, so the count itself can elect one place:
    # the smallest -(place + 1) wins.
    ticket = -(jnp.arange(ids.shape[0], dtype=jnp.int32) + 1)
    orphan_ids = jnp.where(orphan, ids, pool.num_blocks)
    counts = counts.at[orphan_ids].min(ticket, mode="drop")
    winner = orphan & (counts[jnp.minimum(ids, pool.num_blocks - 1)] == ticket)
    # Zeroing through the winners makes this write wait for the read above.  Without that order XLA would
    # copy the whole array to keep what the read needs.
    counts = counts.at[jnp.where(winner, ids, pool.num_blocks)].set(0, mode="drop")
    return dataclasses.replace(pool, ref_counts=counts), winner


def push(pool: BlockPool, ids: Array) -> BlockPool:
    """Puts blocks without owners on the free stack; i32[n], NO_BLOCK is skipped, none twice."""
    freed = ids < pool.num_blocks
    place = pool.num_free + jnp.cumsum(freed) - 1
    place = jnp.where(freed, place, pool.num_blocks)
    return dataclasses.replace(
        pool,
        free_stack=pool.free_stack.at[place].set(ids, mode="drop"),
        num_free=pool.num_free + jnp.sum(freed, dtype=jnp.int32),
    )
