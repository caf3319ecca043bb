"""Reference counts and the free stack against counting by hand."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import block_pool
from jaxkv.block_pool import BlockPool, init_pool

NUM_BLOCKS = 9
_take = jax.jit(functools.partial(block_pool.take, width=4))
_share = jax.jit(block_pool.share)
_drop = jax.jit(block_pool.drop)


def free_ids(pool: BlockPool) -> list[int]:
    """Returns the ids on the free stack, top first."""
    return np.asarray(pool.free_stack)[: int(pool.num_free)][::-1].tolist()


def check(pool: BlockPool, owners: Counter[int]) -> None:
    """Asserts that counts and free ids are what `owners` says."""
    counts = np.asarray(pool.ref_counts).tolist()
    assert counts == [owners[block] for block in range(NUM_BLOCKS)]
    assert sorted(free_ids(pool)) == [b for b in range(NUM_BLOCKS) if not owners[b]]


def test_pool_when_new_has_every_block_free_and_gives_block_0_first() -> None:
    pool = init_pool(NUM_BLOCKS)
    assert free_ids(pool) == list(range(NUM_BLOCKS))
    assert not np.any(np.asarray(pool.ref_counts))


def test_take_for_several_rows_gives_distinct_blocks_and_sentinels() -> None:
    pool, ids = _take(init_pool(NUM_BLOCKS), jnp.array([2, 0, 4, 1]))
    n = NUM_BLOCKS
    assert np.asarray(ids).tolist() == [[0, 1, n, n], [n, n, n, n], [2, 3, 4, 5], [6, n, n, n]]
    assert free_ids(pool) == [7, 8]
    check(pool, Counter(range(7)))


def test_take_everything_leaves_an_empty_stack() -> None:
    pool, ids = _take(init_pool(NUM_BLOCKS), jnp.array([4, 4, 1]))
    assert sorted(np.asarray(ids)[np.asarray(ids) < NUM_BLOCKS].tolist()) == list(range(9))
    assert int(pool.num_free) == 0


def test_drop_twice_in_one_call_frees_once() -> None:
    """Field case I1: free([7, 7]) with two owners puts 7 on the free stack once."""
    pool, _ = _take(init_pool(NUM_BLOCKS), jnp.array([4, 4, 0]))
    pool = _share(pool, jnp.array([7]))
    pool = _drop(pool, jnp.array([7, 7]))
    assert free_ids(pool).count(7) == 1
    check(pool, Counter(range(7)))


def test_drop_twice_of_three_owners_keeps_the_block() -> None:
    """Field case I1, the other way round: an owner is left, so nothing is freed."""
    pool, _ = _take(init_pool(NUM_BLOCKS), jnp.array([1]))
    pool = _drop(_share(pool, jnp.array([0, 0])), jnp.array([0, 0]))
    check(pool, Counter([0]))


def test_drop_of_a_free_block_shows_in_the_count() -> None:
    """Field case I1: a broken caller is not hidden by clamping, and the stack stays without doubles."""
    pool = _drop(init_pool(NUM_BLOCKS), jnp.array([7, 7]))
    assert int(pool.ref_counts[7]) == -2
    assert free_ids(pool).count(7) == 1


@pytest.mark.parametrize("operation", [_share, _drop])
def test_pool_sentinel_ids_change_nothing(operation: object) -> None:
    """Field case J3: NO_BLOCK is dropped; it must not reach the last block."""
    pool, _ = _take(init_pool(NUM_BLOCKS), jnp.array([4, 4, 1]))
    after = operation(pool, jnp.full(4, NUM_BLOCKS))  # type: ignore[operator]
    for old, new in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)


@given(st.data())
def test_pool_random_operations_match_counting(data: st.DataObject) -> None:
    """Field case I2: whatever the order of taking, sharing and dropping, the counts are exact."""
    pool, owners = init_pool(NUM_BLOCKS), Counter[int]()
    for _ in range(data.draw(st.integers(1, 6))):
        live = [block for block in range(NUM_BLOCKS) if owners[block]]
        action = data.draw(st.sampled_from(["take", "share", "drop"] if live else ["take"]))
        if action == "take":
            free = NUM_BLOCKS - len(live)
            wanted = []
            for _ in range(3):
                wanted.append(data.draw(st.integers(0, min(4, free - sum(wanted)))))
            pool, ids = _take(pool, jnp.array(wanted))
            taken = [b for b in np.asarray(ids).ravel().tolist() if b < NUM_BLOCKS]
            assert len(taken) == len(set(taken)) == sum(wanted)
            assert not set(taken) & set(live)
            owners.update(taken)
        else:
            named = data.draw(st.lists(st.sampled_from(live), max_size=6))
            if action == "drop":
                named = [b for i, b in enumerate(named) if named[:i].count(b) < owners[b]]
            ids = np.array([*named, *[NUM_BLOCKS] * (6 - len(named))], np.int32)
            ids = data.draw(st.permutations(ids.tolist()))
            pool = (_share if action == "share" else _drop)(pool, np.array(ids, np.int32))
            owners = owners + Counter(named) if action == "share" else owners - Counter(named)
        check(pool, owners)
