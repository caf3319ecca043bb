"""Reserve, truncate and release on small examples with known answers; `Driver` compares every step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import SMALL, Driver, assert_only_status_differs, programs, token_kv

from jaxkv import StatusBit, check_invariants, fork, init_cache, release, reserve, truncate

# Room ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8])
def test_reserve_decode_takes_a_block_only_at_the_edge(prompt_len: int) -> None:
    """Field case A1: before position p is written the table holds p // 4 + 1 blocks."""
    driver = Driver(dataclasses.replace(SMALL, max_blocks_per_seq=5), query_len=8)
    driver.append((0, prompt_len))
    for position in range(prompt_len, prompt_len + 6):
        driver.append((0, 1))
        assert len(driver.refs(0)) == position // 4 + 1


def test_reserve_in_pieces_holds_each_token_once() -> None:
    """Field cases A3 and N2: ten tokens in chunks of four are positions 0..3, 4..7, 8..9."""
    run = programs(SMALL)
    cache, positions = init_cache(SMALL), []
    pad = [SMALL.no_seq] * 3
    for size in (4, 4, 2):
        k, v = token_kv(SMALL, np.zeros((4, 6)))
        ids, lens = np.array([0, *pad], np.int32), np.array([size, 0, 0, 0], np.int32)
        cache, view = run.append(cache, ids, lens, k, v)
        positions += np.asarray(view.positions)[0, :size].tolist()
    assert positions == list(range(10))


def test_reserve_chunked_prefill_peaks_at_its_blocks_and_returns_them() -> None:
    """Field cases C1 and C6: 10 tokens in chunks of 4 peak at 3 blocks; 14 in chunks of 6 at 4."""
    for chunk, prompt_len, peak in ((4, 10, 3), (6, 14, 4)):
        driver = Driver(SMALL)
        for begin in range(0, prompt_len, chunk):
            driver.append((2, min(chunk, prompt_len - begin)))
        assert driver.num_free == SMALL.num_blocks - peak
        driver.release(2)
        assert driver.num_free == SMALL.num_blocks


def test_reserve_more_than_free_is_refused_before_anything_happens() -> None:
    """Field case I4: 2 blocks are free, 8 tokens and one to come need 3."""
    driver = Driver(SMALL, query_len=16)
    driver.append((0, 16), (1, 16), (2, 4))
    assert driver.append((3, 8), (4, 1)) == StatusBit.OUT_OF_BLOCKS
    assert driver.append((3, 8)) == StatusBit(0)
    assert driver.num_free == 0


def test_reserve_last_block_of_the_pool_is_given_out() -> None:
    driver = Driver(SMALL, query_len=16)
    driver.append((0, 16), (1, 16), (2, 12))
    assert driver.num_free == 0
    driver.release(1)
    driver.append((3, 16))
    assert driver.num_free == 0


def test_reserve_to_the_width_of_the_table_works_and_past_it_is_refused() -> None:
    driver = Driver(SMALL, query_len=16)
    driver.append((0, 15))
    assert driver.append((0, 2)) == StatusBit.SEQ_TOO_LONG
    assert driver.append((0, 1)) == StatusBit(0)
    assert driver.append((0, 1)) == StatusBit.SEQ_TOO_LONG
    assert driver.append((0, 0)) == StatusBit(0)


@pytest.mark.parametrize(
    ("rows", "bit"),
    [
        ([(0, 1), (-1, 1)], StatusBit.INVALID_SEQ),
        ([(6, 1)], StatusBit.INVALID_SEQ),
        ([(0, 1), (0, 1)], StatusBit.DUPLICATE_SEQ),
        ([(0, -1)], StatusBit.INVALID_Q_LEN),
        ([(0, 7)], StatusBit.INVALID_Q_LEN),
        ([(1, 1), (-2, 1), (1, 1), (3, 9)], StatusBit(0)),
    ],
)
def test_reserve_bad_rows_are_refused_whole(rows: list[tuple[int, int]], bit: StatusBit) -> None:
    driver = Driver(SMALL)
    driver.append((0, 5))
    assert driver.append(*rows) & bit == bit
    assert driver.num_free == SMALL.num_blocks - 2


def test_reserve_huge_q_len_is_refused() -> None:
    """Arithmetic near the end of int32 must not wrap into a good call."""
    driver = Driver(SMALL)
    run, cache = programs(SMALL), driver.cache
    k, v = token_kv(SMALL, np.zeros((4, 6)))
    for q_len in (2**31 - 1, 2**31 - 4, -(2**31)):
        lens = np.array([q_len, 1, 0, 0], np.int32)
        after, view = run.append(cache, np.array([0, 1, 2, 5], np.int32), lens, k, v)
        assert int(after.status.bits) & StatusBit.INVALID_Q_LEN
        assert not np.any(np.asarray(view.q_lens))
        assert_only_status_differs(cache, after)


def test_reserve_padding_rows_leave_block_0_alone() -> None:
    """Field cases E3, E10 and J3: rows 3 and 2 live, padding carries NaN; `Driver` rereads all slots."""
    driver = Driver(SMALL)
    driver.append((0, 3), (1, 4), (4, 6))
    driver.append((SMALL.no_seq, 6), (1, 2), (SMALL.no_seq, 3), (0, 1))
    driver.append((SMALL.no_seq, 1), (SMALL.no_seq, 1))
    assert driver.num_free == SMALL.num_blocks - 5


def test_reserve_after_shuffled_releases_keeps_contents() -> None:
    """Block ids in no order: sequences of every length are freed and made again."""
    driver = Driver(SMALL)
    driver.append((0, 6), (1, 5), (2, 1), (3, 6))
    for victim, length in ((1, 6), (3, 2), (0, 4), (2, 5), (1, 3)):
        driver.release(victim)
        driver.append((victim, length))
    blocks = np.asarray(driver.cache.tables.blocks)
    assert np.any(np.diff(blocks[blocks < SMALL.no_block]) < 0)


# Rolling back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_len", [0, 1, 3, 4, 5, 7, 8])
def test_truncate_to_any_length_returns_the_blocks_behind_it(kv_len: int) -> None:
    """Field case E9: 8 tokens cut to 5; nothing past the cut is held or read."""
    driver = Driver(SMALL, query_len=8)
    driver.append((1, 8))
    driver.truncate((1, kv_len))
    assert driver.num_free == SMALL.num_blocks - -(-kv_len // 4)
    driver.append((1, 3))
    assert driver.read(1)[0].shape[1] == kv_len + 3


def test_truncate_shared_sequence_leaves_the_sibling_whole() -> None:
    driver = Driver(SMALL, query_len=8)
    driver.append((0, 7))
    driver.fork((0, 1))
    driver.truncate((1, 2))
    assert driver.refs(0) == [2, 1]
    driver.append((1, 1), (0, 1))
    assert driver.refs(0) == [1, 1]


def test_truncate_longer_than_the_sequence_is_refused() -> None:
    """Field case K6: trimming by a negative amount changes nothing."""
    driver = Driver(SMALL)
    driver.append((0, 5))
    assert driver.truncate((0, 6)) == StatusBit.INVALID_KV_LEN
    assert driver.truncate((0, -1)) == StatusBit.INVALID_KV_LEN
    assert driver.read(0)[0].shape[1] == 5


# Ending ----------------------------------------------------------------------------------------------


def test_release_twice_is_refused_and_counts_stay() -> None:
    """Field cases C2 and I1: the first release returns the blocks, the second changes nothing."""
    driver = Driver(SMALL)
    driver.append((3, 5), (1, 2))
    driver.release(3)
    assert driver.num_free == SMALL.num_blocks - 1
    assert driver.release(3) == StatusBit.DOUBLE_RELEASE
    assert driver.release(3, 1) == StatusBit.DOUBLE_RELEASE
    assert driver.release(1) == StatusBit(0)
    assert driver.num_free == SMALL.num_blocks


def test_release_of_unwritten_blocks_returns_them() -> None:
    """Field case C2: a sequence that has its blocks but never ran is aborted."""

    @jax.jit
    def reserve_then_abort() -> Any:
        cache, _ = reserve(SMALL, init_cache(SMALL), jnp.array([2]), jnp.array([5]), 6)
        return release(SMALL, cache, jnp.arange(SMALL.max_seqs) == 2)

    cache = reserve_then_abort()
    check_invariants(SMALL, cache)
    assert int(cache.pool.num_free) == SMALL.num_blocks


def test_release_and_reuse_without_waiting_gives_the_new_owner_its_bytes() -> None:
    """Field case C7: nobody waits between the write, the abort and the new owner's write."""
    run = programs(SMALL)
    cache = init_cache(SMALL)
    ids, lens = np.array([0, 5, 5, 5], np.int32), np.array([6, 0, 0, 0], np.int32)
    old, new = (token_kv(SMALL, np.full((4, 6), number)) for number in (11, 77))
    cache, _ = run.append(cache, ids, lens, *old)
    cache = run.release(cache, np.arange(SMALL.max_seqs) == 0)
    ids = np.array([1, 5, 5, 5], np.int32)
    cache, _ = run.append(cache, ids, lens, *new)
    k, v = run.read_all(cache)
    np.testing.assert_array_equal(np.asarray(k)[1, :, :6], new[0][:, 0])
    np.testing.assert_array_equal(np.asarray(v)[1, :, :6], new[1][:, 0])


def test_reserve_and_release_many_times_neither_leaks_nor_makes_blocks() -> None:
    """Field case I2: ten rounds leave the count where it was."""
    driver = Driver(SMALL)
    for round_ in range(10):
        driver.append((0, 6), (round_ % 4 + 1, 3))
        driver.fork((0, round_ % 4 + 1))
        driver.release(0, round_ % 4 + 1)
        assert driver.num_free == SMALL.num_blocks


# Arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int16, np.int32])
def test_transitions_any_integer_width_is_converted(dtype: Any) -> None:
    """Field case E6: lengths and ids of other widths give the same result."""

    @jax.jit
    def steps(ids: Any, lens: Any, target: Any, cut: Any) -> Any:
        cache, view = reserve(SMALL, init_cache(SMALL), ids, lens, 6)
        cache = fork(SMALL, cache, ids[:1], target)
        return truncate(SMALL, cache, ids[:1], cut), view

    cache, view = steps(*(np.array(x, dtype) for x in ([1, 0], [5, 2], [4], [3])))
    assert np.asarray(view.kv_lens).tolist() == [5, 2]
    assert np.asarray(cache.tables.kv_lens).tolist() == [2, 3, 0, 0, 5]
    assert int(cache.status.bits) == 0
    check_invariants(SMALL, cache)


@pytest.mark.parametrize("call", ["reserve", "fork", "truncate"])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.array([0.0]), np.array([1]), r"expected an integer vector, got float32\[1\]"),
        (np.array([[0]]), np.array([1]), r"expected an integer vector, got int32\[1, 1\]"),
        (np.array([0, 1]), np.array([1]), "expected the 2 rows of .*, got 1"),
    ],
)
def test_transitions_bad_arrays_raise_at_trace_time(
    call: str, first: Any, second: Any, message: str
) -> None:
    functions = {
        "reserve": functools.partial(reserve, query_len=6),
        "fork": fork,
        "truncate": truncate,
    }
    cache = jax.eval_shape(functools.partial(init_cache, SMALL))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(functions[call], SMALL), cache, first, second)


def test_transitions_no_rows_change_nothing() -> None:
    none = np.zeros(0, np.int32)
    cache = init_cache(SMALL)

    @jax.jit
    def steps(cache: Any) -> Any:
        cache, view = reserve(SMALL, cache, none, none, 2)
        return truncate(SMALL, fork(SMALL, cache, none, none), none, none), view

    after, view = steps(cache)
    assert view.positions.shape == (0, 2)
    assert_only_status_differs(cache, after)
    assert int(after.status.bits) == 0


def test_reserve_query_len_0_raises() -> None:
    with pytest.raises(ValueError, match="query_len: expected at least 1, got 0"):
        reserve(SMALL, init_cache(SMALL), jnp.array([0]), jnp.array([0]), 0)


@pytest.mark.parametrize("mask", [np.ones(4, bool), np.ones(5, np.int32)])
def test_release_bad_mask_raises(mask: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=r"seq_mask: expected bool\[5\], got (bool\[4\]|int32\[5\])"
    ):
        release(SMALL, init_cache(SMALL), mask)
