"""Which blocks a sequence holds, in order, and how many tokens it has.

Invariants:
  * Row s holds ``ceil(kv_lens[s] / block_size)`` blocks from column 0 on and NO_BLOCK beyond.
  * A slot is in use exactly when its kv_len is above 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxkv.config import CacheConfig

Array = jax.Array
Carry = TypeVar("Carry")

_CHUNK = 1024


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["blocks", "kv_lens"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class BlockTables:
    """Block tables of all slots.

    Attributes:
      blocks: i32[seq, max_blocks].
      kv_lens: i32[seq].
    """

    blocks: Array
    kv_lens: Array


def init_tables(config: CacheConfig) -> BlockTables:
    """Returns tables in which every slot is empty."""
    shape = (config.max_seqs, config.max_blocks_per_seq)
    return BlockTables(
        blocks=jnp.full(shape, config.no_block, jnp.int32),
        kv_lens=jnp.zeros(config.max_seqs, jnp.int32),
    )


def blocks_held(config: CacheConfig, kv_lens: Array) -> Array:
    """Returns how many blocks `kv_lens` tokens need: ceil(kv_len / block_size), any shape."""
    return (kv_lens + config.block_size - 1) // config.block_size


def fold_entries(
    config: CacheConfig,
    rows: Array,
    first: Array,
    last: Array,
    step: Callable[[Carry, Array, Array, Array], Carry],
    carry: Carry,
) -> Carry:
    """Visits the entries ``[first[i], last[i])`` of each row of a table, in chunks.

    The work is proportional to the number of entries visited, whatever the width of the table: the
    entries of all rows are numbered by a prefix sum, and a chunk finds its rows by binary search.

    Args:
      config: the cache's config.
      rows: i32[n, max_blocks], table rows.
      first, last: i32[n], half-open column ranges.
      step: called as ``step(carry, row i32[c], column i32[c], ids i32[c])``; places past the end have
        row n, column max_blocks and id NO_BLOCK.
      carry: what the steps thread through.

    Returns:
      The last carry.
    """
    num_rows, width = rows.shape
    if num_rows == 0:
        return carry
    count = jnp.maximum(last - first, 0)
    end = jnp.cumsum(count)
    size = min(_CHUNK, num_rows * width)

    def visit(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        done, carry = state
        place = done + jnp.arange(size, dtype=jnp.int32)
        real = place < end[-1]
        row = jnp.searchsorted(end, place, side="right").astype(jnp.int32)
        safe_row = jnp.minimum(row, num_rows - 1)
        column = first[safe_row] + place - (end - count)[safe_row]
        column = jnp.where(real, column, width)
        ids = rows[safe_row, jnp.minimum(column, width - 1)]
        ids = jnp.where(real, ids, config.no_block)
        return done + size, step(carry, jnp.where(real, row, num_rows), column, ids)

    start = (jnp.int32(0), carry)
    return jax.lax.while_loop(lambda state: state[0] < end[-1], visit, start)[1]
