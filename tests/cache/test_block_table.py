"""Block arithmetic and the visit of table entries."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import check_invariants, fork, init_cache, release, reserve
from jaxkv.block_table import blocks_held, fold_entries, init_tables

Array = jax.Array

# Wider than one chunk of the visit (1,024 entries), with several rows in a chunk.
WIDE = dataclasses.replace(SMALL, block_size=1, num_blocks=2100, max_seqs=3, max_blocks_per_seq=700)


@pytest.mark.parametrize(
    ("kv_len", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 4)]
)
def test_blocks_held_around_block_edges_is_the_ceiling(kv_len: int, blocks: int) -> None:
    """Field case A1: four tokens fill one block of four, the fifth needs another."""
    assert int(blocks_held(SMALL, jnp.int32(kv_len))) == blocks


def test_tables_when_new_are_empty() -> None:
    tables = init_tables(SMALL)
    assert np.all(np.asarray(tables.blocks) == SMALL.no_block)
    assert not np.any(np.asarray(tables.kv_lens))


@jax.jit
def _visits(rows: Array, first: Array, last: Array) -> tuple[Array, Array, Array]:
    """Returns how often each entry was visited, the id seen there, and how many places were real."""

    def step(carry: tuple[Array, ...], row: Array, column: Array, ids: Array) -> tuple[Array, ...]:
        count, seen, real = carry
        count = count.at[row, column].add(1, mode="drop")
        seen = seen.at[row, column].set(ids, mode="drop")
        return count, seen, real + jnp.sum(ids < WIDE.no_block)

    start = (jnp.zeros_like(rows), jnp.full_like(rows, -1), jnp.int32(0))
    return fold_entries(WIDE, rows, first, last, step, start)


_column = st.integers(0, WIDE.max_blocks_per_seq)


@settings(max_examples=50)
@given(st.lists(st.tuples(_column, _column), min_size=3, max_size=3))
def test_fold_entries_any_ranges_visits_each_entry_once(ranges: list[tuple[int, int]]) -> None:
    rows = np.arange(2100, dtype=np.int32).reshape(3, 700)[:, ::-1]
    first, last = np.array(ranges, np.int32).T
    count, seen, real = _visits(rows, first, last)
    column = np.arange(700)
    inside = (column >= first[:, None]) & (column < last[:, None])
    np.testing.assert_array_equal(count, inside)
    np.testing.assert_array_equal(seen, np.where(inside, rows, -1))
    assert int(real) == inside.sum()


def test_fold_entries_empty_ranges_visits_nothing() -> None:
    zeros = np.zeros(3, np.int32)
    count, _, real = _visits(np.zeros((3, 700), np.int32), zeros, zeros)
    assert not np.any(count)
    assert int(real) == 0


def test_release_of_more_entries_than_a_chunk_frees_all() -> None:
    """The visit takes several chunks here, and shared blocks lie in different ones."""
    cache = init_cache(WIDE)
    cache, _ = jax.jit(lambda c: reserve(WIDE, c, jnp.array([0]), jnp.array([700]), 700))(cache)
    cache = jax.jit(lambda c: fork(WIDE, c, jnp.array([0, 0]), jnp.array([1, 2])))(cache)
    assert Counter(np.asarray(cache.pool.ref_counts).tolist()) == {3: 700, 0: 1400}
    cache = jax.jit(lambda c: release(WIDE, c, jnp.array([True, True, True])))(cache)
    assert int(cache.pool.num_free) == WIDE.num_blocks
    check_invariants(WIDE, cache)
