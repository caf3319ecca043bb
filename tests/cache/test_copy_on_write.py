"""Fork and copy-on-write: who shares what, and what each owner reads; K and V differ everywhere."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from driver import SMALL, Driver, programs, token_kv

from jaxkv import StatusBit, init_cache, reorder

WIDE = dataclasses.replace(SMALL, num_blocks=24, max_seqs=6)


def test_fork_then_diverging_writes_copy_the_open_block_once() -> None:
    """Field case D1: block 0 stays shared, the tail is copied once, slots 4-5 are equal and 6 differ."""
    driver = Driver(SMALL)
    driver.append((0, 6))
    driver.fork((0, 1))
    free = driver.num_free
    driver.append((0, 1), (1, 1))
    assert driver.refs(0) == [2, 1]
    assert driver.refs(1) == [2, 1]
    assert driver.num_free == free - 1
    for one, other in zip(driver.read(0), driver.read(1), strict=True):
        np.testing.assert_array_equal(one[:, :6], other[:, :6])
        assert np.all(one[:, 6, :, 0] != other[:, 6, :, 0])


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_fork_three_children_in_any_order_each_keep_the_parents_tokens(
    order: tuple[int, ...],
) -> None:
    """Field case D2: every child's first six tokens are the parent's, whoever writes first."""
    driver = Driver(WIDE)
    driver.append((0, 6))
    before = driver.read(0)
    driver.fork(*[(0, child) for child in order])
    driver.release(0)
    driver.append(*[(child, 1) for child in order])
    for child in order:
        for now, then in zip(driver.read(child), before, strict=True):
            np.testing.assert_array_equal(now[:, :6], then)


@pytest.mark.parametrize("siblings", [1, 2, 3, 4, 5])
def test_reserve_k_siblings_into_one_tail_needs_k_minus_1_blocks(siblings: int) -> None:
    """The pool has exactly the blocks for k - 1 copies: a k-th, even one given back at once, is refused."""
    driver = Driver(dataclasses.replace(WIDE, num_blocks=6), rows=6)
    driver.append((0, 6))
    for _ in range(5 - siblings):
        driver.append((5, 4))
    driver.fork(*[(0, slot) for slot in range(1, siblings)])
    assert driver.append(*[(slot, 1) for slot in range(siblings)]) == StatusBit(0)
    assert driver.num_free == 0
    assert [driver.refs(slot)[1] for slot in range(siblings)] == [1] * siblings


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_reserve_some_of_the_owners_copy_and_the_others_keep_the_block(writers: int) -> None:
    driver = Driver(WIDE, rows=6)
    driver.append((0, 6))
    driver.fork((0, 1), (0, 2), (0, 3))
    free = driver.num_free
    driver.append(*[(slot, 1) for slot in range(writers)])
    assert free - driver.num_free == writers
    assert driver.refs(3)[1] == 4 - writers


def test_reserve_into_a_full_shared_block_copies_nothing() -> None:
    driver = Driver(WIDE)
    driver.append((0, 4))
    driver.fork((0, 1))
    free = driver.num_free
    driver.append((0, 1), (1, 1))
    assert free - driver.num_free == 2, "a new block each, and no copy"
    assert driver.refs(0)[0] == driver.refs(1)[0] == 2


def test_reserve_of_nothing_into_a_shared_tail_copies_nothing() -> None:
    driver = Driver(WIDE)
    driver.append((0, 6))
    driver.fork((0, 1))
    free = driver.num_free
    driver.append((0, 0), (1, 0))
    assert driver.num_free == free


def test_reserve_when_copies_do_not_fit_is_refused_and_the_parent_unchanged() -> None:
    """Field case D3: pool 4, a parent of 6 tokens, three children that all write."""
    driver = Driver(dataclasses.replace(SMALL, num_blocks=4))
    driver.append((0, 6))
    driver.fork((0, 1), (0, 2), (0, 3))
    assert driver.refs(0) == [4, 4]
    assert driver.append((1, 1), (2, 1), (3, 1)) == StatusBit.OUT_OF_BLOCKS
    assert driver.refs(0) == [4, 4]
    assert driver.num_free == 2
    assert driver.append((1, 1), (2, 1)) == StatusBit(0), "two of the three fit"


def test_fork_permutations_reorder_beams_exactly() -> None:
    """Field case D4: beam_idx [1, 1, 0] gives rows 1, 1, 0; then [1, 0, 2] swaps the first two."""
    driver = Driver(WIDE)
    driver.append((0, 5), (1, 6), (2, 3))
    first = [driver.read(slot) for slot in range(3)]
    driver.fork((1, 0), (1, 1), (0, 2))
    second = [driver.read(slot) for slot in range(3)]
    for now, source in zip(second, (first[1], first[1], first[0]), strict=True):
        np.testing.assert_array_equal(now, source)
    assert driver.refs(0) == driver.refs(1) == [2, 2]
    assert driver.refs(2) == [1, 1], "the third beam's old block went back to the pool"
    driver.append((0, 2), (1, 2))
    third = [driver.read(slot) for slot in range(3)]
    driver.fork((1, 0), (0, 1), (2, 2))
    for slot, source in enumerate((1, 0, 2)):
        np.testing.assert_array_equal(driver.read(slot), third[source])


def test_reorder_takes_all_slots_at_once_and_moves_no_bytes() -> None:
    """Field case D4 in one call a step: [1, 1, 0], then [1, 0, 2]; slots that nobody names are empty."""
    driver = Driver(WIDE)
    driver.append((0, 5), (1, 6), (2, 3), (4, 2))
    rows, before = [driver.read(slot) for slot in range(3)], driver.cache.store
    none = WIDE.no_seq
    assert driver.reorder([1, 1, 0, none, 4, 3]) == StatusBit(0)
    assert np.array_equal(driver.cache.store.kv, before.kv, equal_nan=True)
    for slot, source in enumerate((1, 1, 0)):
        np.testing.assert_array_equal(driver.read(slot), rows[source])
    assert [driver.refs(slot) for slot in range(6)] == [[2, 2], [2, 2], [1, 1], [], [1], []]
    driver.append((0, 2), (1, 2))
    third = [driver.read(slot) for slot in range(3)]
    assert driver.reorder([1, 0, 2, none, none, 0]) == StatusBit(0)
    for slot, source in ((0, 1), (1, 0), (2, 2), (5, 0)):
        np.testing.assert_array_equal(driver.read(slot), third[source])
    for bad in (-1, none + 1):
        assert driver.reorder([1, 1, bad, 0, 2, none]) == StatusBit.INVALID_SEQ
    with pytest.raises(ValueError, match="source: expected an entry for each of 6 slots, got 2"):
        reorder(WIDE, driver.cache, np.array([0, 1]))


def test_fork_of_constant_k_and_v_never_swaps_them() -> None:
    """Field case D8: K = 1 and V = 2 through fork, copy, reorder and read."""
    run = programs(SMALL)
    shape = token_kv(SMALL, np.zeros((4, 6)))[0].shape
    k, v = np.full(shape, 1, np.float32), np.full(shape, 2, np.float32)
    ids = np.array([0, 5, 5, 5], np.int32)
    cache, _ = run.append(init_cache(SMALL), ids, np.array([6, 0, 0, 0], np.int32), k, v)
    pad = [SMALL.no_seq] * 2
    src, dst = np.array([0, 0, 0, 0], np.int32), np.array([1, 2, *pad], np.int32)
    cache = run.fork(cache, src, dst)
    ids, lens = np.array([0, 1, 2, 5], np.int32), np.array([1, 1, 2, 0], np.int32)
    cache, _ = run.append(cache, ids, lens, k, v)
    cache = run.fork(cache, np.array([2, 0, 0, 0], np.int32), np.array([0, 2, *pad], np.int32))
    got_k, got_v = run.read_all(cache)
    for slot, length in ((0, 8), (1, 7), (2, 7)):
        assert np.all(np.asarray(got_k)[slot, :, :length] == 1)
        assert np.all(np.asarray(got_v)[slot, :, :length] == 2)


def test_fork_onto_a_slot_in_use_releases_it_first() -> None:
    driver = Driver(WIDE)
    driver.append((0, 6), (1, 6))
    driver.fork((0, 1))
    assert driver.num_free == WIDE.num_blocks - 2


def test_fork_onto_itself_changes_nothing() -> None:
    driver = Driver(WIDE)
    driver.append((0, 6))
    driver.fork((0, 0))
    assert driver.refs(0) == [1, 1]


@pytest.mark.parametrize(
    ("pairs", "bit"),
    [
        ([(3, 1)], StatusBit.EMPTY_SLOT),
        ([(0, 1), (3, 2)], StatusBit.EMPTY_SLOT),
        ([(0, 1), (0, 1)], StatusBit.DUPLICATE_SEQ),
        ([(0, -1)], StatusBit.INVALID_SEQ),
        ([(0, 9)], StatusBit.INVALID_SEQ),
        ([(-1, 1)], StatusBit.INVALID_SEQ),
        ([(6, 1)], StatusBit.INVALID_SEQ),
    ],
)
def test_fork_bad_pairs_are_refused_whole(pairs: list[tuple[int, int]], bit: StatusBit) -> None:
    driver = Driver(WIDE)
    driver.append((0, 6))
    assert driver.fork(*pairs) == bit
    assert driver.refs(0) == [1, 1]


def test_fork_copies_no_bytes() -> None:
    driver = Driver(WIDE)
    driver.append((0, 6))
    before = np.asarray(driver.cache.store.kv).tobytes()
    driver.fork((0, 1), (0, 2))
    assert np.asarray(driver.cache.store.kv).tobytes() == before
