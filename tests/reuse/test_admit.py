"""Admitting, registering and evicting, one case after the other; the driver compares with the plain model."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from driver import token_kv
from reuse_driver import CROWDED, WIDTH, WORDS, ReuseDriver

from jaxkv import StatusBit, memory_profile, pool_snapshot
from jaxkv.eviction import lru


def small_pool() -> ReuseDriver:
    """Returns a driver whose pool has 4 blocks left."""
    d = ReuseDriver(CROWDED, lru)
    d.leave_blocks(4)
    return d


def text(first: int, count: int) -> list[int]:
    """Returns `count` tokens that differ from those of other firsts."""
    return [100 * first + i for i in range(count)]


def test_admit_same_prompt_twice_computes_one_block_again() -> None:
    """Field case B1: 8 tokens, blocks of 4; at most 7 may be found."""
    d = ReuseDriver(CROWDED, lru)
    assert d.admit((0, text(1, 8), 0)) == (StatusBit(0), [0])
    d.register(0)
    assert d.admit((1, text(1, 8), 0)) == (StatusBit(0), [4])
    assert d.refs(1) == [2, 1]
    d.register(1)
    # The recomputed block is given up for the one that was there.
    assert d.refs(0) == d.refs(1) == [2, 2]


def test_register_after_decoding_makes_the_answer_findable() -> None:
    """Field cases A2 and B2: prompt of 8, again with 5 generated, then prompt + 4 generated + 1."""
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 8), 0))
    d.register(0)
    d.admit((1, text(1, 8), 0))
    d.write((1, text(2, 5)))
    d.register(1)
    third = text(1, 8) + text(2, 4) + [9]
    assert d.admit((2, third, 0)) == (StatusBit(0), [12])
    d.write((0, [1]))
    d.register(0)
    assert int(d.cache.reuse.index.findable.sum()) == 3


def test_admit_in_other_namespaces_finds_nothing() -> None:
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 5), 0))
    d.register(0)
    assert d.admit((1, text(1, 5), 1), (2, text(1, 5), 3), (3, text(1, 5), 0))[1] == [0, 0, 4]


def test_blocks_are_findable_only_once_they_are_registered() -> None:
    """Field cases G9, G10, C8: two equal prompts in one call; an abort before registration."""
    d = ReuseDriver(CROWDED, lru)
    assert d.admit((0, text(1, 9), 0), (1, text(1, 9), 0)) == (StatusBit(0), [0, 0])
    d.release(0)
    assert (d.num_free, d.num_cached) == (8, 0)
    assert d.admit((0, text(1, 9), 0))[1] == [0]
    d.register(0, 1)
    assert d.refs(0) == d.refs(1) == [2, 2, 1]
    d.release(0, 1)
    assert (d.num_free, d.num_cached) == (9, 2)


def test_register_of_a_slot_that_was_not_admitted_is_refused() -> None:
    d = ReuseDriver(CROWDED, lru)
    d.write((0, text(1, 4)))
    assert d.register(0) == StatusBit.NOT_ADMITTED
    assert d.register(3) == StatusBit.NOT_ADMITTED
    assert d.admit((0, text(1, 4), 0))[0] == StatusBit.SLOT_IN_USE
    d.release(0)
    d.admit((0, text(1, 4), 0))
    d.fork((0, 2))
    assert d.register(2) == StatusBit(0)


def test_rewritten_block_is_no_longer_found_under_its_old_tokens() -> None:
    """Field case C3: register a full block, roll back 2 tokens, append others, register again."""
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 8), 0))
    d.register(0)
    d.truncate((0, 6))
    d.write((0, [1, 2]))
    d.register(0)
    d.release(0)
    assert d.num_cached == 2
    assert d.admit((1, text(1, 9), 0))[1] == [4]
    assert d.admit((2, [*text(1, 6), 1, 2, 3], 0))[1] == [8]


def test_rewritten_block_that_others_share_is_copied_and_stays_findable() -> None:
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 8), 0))
    d.register(0)
    d.fork((0, 1))
    d.truncate((1, 6))
    d.write((1, [1, 2]))
    assert d.admit((2, text(1, 9), 0))[1] == [8]


def test_admit_needs_what_is_not_cached() -> None:
    """Field case H'1: pool of 4, A of 12 tokens finished; A + 5 is refused, A + 4 accepted with 12 found."""
    for running in (False, True):
        d = small_pool()
        d.admit((0, text(1, 12), 0))
        d.register(0)
        if not running:
            d.release(0)
        assert d.admit((1, text(1, 12) + text(2, 5), 0)) == (StatusBit.OUT_OF_BLOCKS, [0])
        assert d.admit((1, text(1, 12) + text(2, 4), 0)) == (StatusBit(0), [12])


def test_chain_freed_together_goes_from_its_end() -> None:
    """Field cases H'2, H'3 and G8: also after the whole chain was hit again, and registered in two pieces."""
    d = small_pool()
    d.admit((0, text(1, 10), 0))
    d.register(0)
    d.write((0, text(3, 3)))
    d.register(0)
    d.release(0)
    assert (d.num_free, d.num_cached) == (1, 3)
    whole = text(1, 10) + text(3, 2) + [7]
    assert d.admit((1, whole, 0))[1] == [12]
    d.release(1)
    d.admit((2, text(5, 8), 0))
    assert d.num_cached == 2
    d.release(2)
    assert d.admit((1, whole, 0))[1] == [8]


def test_admit_does_not_evict_what_it_matched() -> None:
    """The oldest cached blocks are the very ones this call found."""
    d = small_pool()
    for slot, first in enumerate((1, 2)):
        d.admit((slot, text(first, 8), 0))
        d.register(slot)
    d.release(0)
    d.release(1)
    assert d.admit((0, [*text(1, 8), 5], 0)) == (StatusBit(0), [8])
    assert d.num_cached == 1
    d.release(0)
    assert d.admit((0, [*text(2, 8), 5], 0))[1] == [4]


def test_fork_refused_for_want_of_blocks_leaves_everything() -> None:
    """Field case D3, with the pool full of cached blocks that belong to nobody the call may take from."""
    d = small_pool()
    d.admit((0, text(1, 6), 0))
    d.register(0)
    d.write((1, [5, 6, 7]))
    d.fork((0, 1), (0, 2))
    d.leave_blocks(1)
    assert d.write((1, [1]), (2, [2]), (0, [4])) == StatusBit.OUT_OF_BLOCKS
    assert d.refs(0) == [3, 3]
    d.truncate((4, 4))
    assert d.write((1, [1]), (2, [2])) == StatusBit(0)


def test_evict_gives_up_cached_blocks_alone() -> None:
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 9), 0), (1, text(2, 9), 0))
    d.register(0, 1)
    d.release(1)
    assert d.evict(-1) == 0
    assert d.evict(1) == 1
    assert d.admit((2, text(2, 9), 0))[1] == [4]
    assert d.evict(9) == 0
    d.release(0, 2)
    assert d.evict(2) == 2
    assert d.evict(9) == 1
    assert d.num_free == CROWDED.num_blocks


@pytest.mark.parametrize("prompt", [[], [1, 2, 3]])
def test_admit_short_prompts_leave_no_trace(prompt: list[int]) -> None:
    """Field case C4."""
    d = ReuseDriver(CROWDED, lru)
    assert d.admit((0, prompt, 0)) == (StatusBit(0), [0])
    if prompt:
        d.register(0)
        d.release(0)
    assert (d.num_free, d.num_cached) == (CROWDED.num_blocks, 0)
    assert int(d.cache.reuse.index.findable.sum()) == 0


def test_ten_rounds_of_hits_neither_leak_nor_make_blocks() -> None:
    """Field cases I2 and I3: cached blocks that an admit revives stay cached when it ends."""
    d = ReuseDriver(CROWDED, lru)
    for _ in range(10):
        d.admit((0, text(1, 11), 0))
        d.register(0)
        d.release(0)
        assert (d.num_free, d.num_cached) == (CROWDED.num_blocks - 2, 2)


def test_reorder_takes_namespaces_along_and_caches_what_nobody_names() -> None:
    """The last slot's sequence goes to two slots, then to none: its full blocks stay findable."""
    d = ReuseDriver(CROWDED, lru)
    none = CROWDED.no_seq
    d.admit((4, text(1, 9), 1))
    d.register(4)
    assert d.reorder([4, none, 4, none, none]) == StatusBit(0)
    assert d.refs(0) == d.refs(2) == [2, 2, 2]
    assert d.register(0, 2) == StatusBit(0)
    assert d.register(1) == StatusBit.NOT_ADMITTED
    d.reorder([none] * 5)
    assert (d.num_free, d.num_cached) == (9, 2)
    assert d.admit((1, text(1, 9), 1))[1] == [8]


def test_prompt_in_uneven_pieces_leaves_nothing_behind() -> None:
    """Field cases C1 and C2: blocks of 4, pieces of 6, 6 and 2; then an end before the first step, twice."""
    d = ReuseDriver(CROWDED, lru)
    prompt = text(1, 14)
    d.admit((0, prompt[:6], 0))
    d.write((0, prompt[6:12]))
    d.write((0, prompt[12:]))
    d.register(0)
    assert d.refs(0) == [1, 1, 1, 1]
    assert d.admit((1, prompt, 0)) == (StatusBit(0), [12])
    assert d.release(1) == StatusBit(0)
    assert d.release(1) == StatusBit.DOUBLE_RELEASE
    assert d.release(0) == StatusBit(0)
    assert (d.num_free, d.num_cached) == (CROWDED.num_blocks - 3, 3)


def test_admit_of_slots_that_do_not_exist_changes_nothing() -> None:
    """Field case J3: -1 is no slot and not the last one either; one bad row refuses the whole call."""
    d = ReuseDriver(CROWDED, lru)
    d.admit((4, text(1, 9), 0))
    d.register(4)
    for bad in (-1, CROWDED.max_seqs + 1):
        assert d.admit((bad, text(1, 9), 0), (0, text(1, 9), 0))[0] == StatusBit.INVALID_SEQ
    assert d.admit((0, text(1, 9), 0), (0, text(2, 9), 0))[0] == StatusBit.DUPLICATE_SEQ
    assert d.admit((0, text(1, 24), 0), (4, [1], 0))[0] == StatusBit.SLOT_IN_USE
    assert d.refs(4) == [1, 1, 1]


def test_forked_answers_share_what_was_found_and_diverge_alone() -> None:
    """Field cases D1 and D9: three samples of a prompt that is found once; two answers become findable."""
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 6), 0))
    d.register(0)
    d.release(0)
    assert d.admit((0, text(1, 6), 0)) == (StatusBit(0), [4])
    d.fork((0, 1), (0, 2))
    d.write((0, [5, 6]), (1, [7, 8]), (2, [5, 6]))
    d.register(0, 1, 2)
    assert (d.refs(0), d.refs(1), d.refs(2)) == ([3, 2], [3, 1], [3, 2])
    d.release(0, 1, 2)
    assert d.num_cached == 3
    assert d.admit((3, [*text(1, 6), 7, 8, 9], 0))[1] == [8]


def test_snapshot_and_profile_tell_live_shared_cached_and_free_apart() -> None:
    """Two sequences share two blocks, one of them forks its tail, a third has ended."""
    d = ReuseDriver(CROWDED, lru)
    d.admit((0, text(1, 10), 0), (3, text(4, 8), 0))
    d.register(0, 3)
    d.admit((1, text(1, 9), 0))
    d.fork((1, 2))
    d.release(3)
    snapshot, profile = pool_snapshot(d.cache, "now"), memory_profile(d.cache)
    assert (snapshot.num_live, snapshot.num_shared, snapshot.num_cached) == (4, 3, 2)
    assert snapshot.num_free == d.num_free == 5
    assert snapshot.kv_lens == {0: 10, 1: 9, 2: 9}
    blocks = np.asarray(d.cache.tables.blocks)
    assert snapshot.tables == {slot: tuple(blocks[slot, :3].tolist()) for slot in (0, 1, 2)}
    assert sorted(snapshot.num_tokens.tolist()) == [0] * 5 + [1, 2] + [4] * 4
    assert snapshot.fragmentation == profile.fragmentation == 5 / 16
    assert profile.used_blocks == 4
    assert profile.shared_saved_bytes == 5 * profile.kv_total_bytes // CROWDED.num_blocks
    d.release(0, 1, 2)
    assert memory_profile(d.cache).used_blocks == pool_snapshot(d.cache).num_live == 0


def test_transitions_never_ask_the_host() -> None:
    """Hits, misses, an eviction and a refused call; the driver's programs refuse to be traced twice."""
    d = small_pool()
    run, rows = d._run, d.rows
    kv = token_kv(CROWDED, np.zeros((rows, WIDTH), np.int64))
    calls = []
    for prompt in (text(1, 9), text(1, 9), text(2, 12), text(1, 9), text(1, 24)):
        tokens = np.full((rows, WIDTH), -7, np.int32)
        tokens[0, : len(prompt)] = prompt
        ids = np.array([0, *[CROWDED.no_seq] * (rows - 1)], np.int32)
        lens, words = np.full(rows, len(prompt), np.int32), WORDS[[0] * rows]
        calls.append(jax.device_put((ids, tokens, lens, words, *kv)))
    mask = jax.device_put(np.arange(CROWDED.max_seqs) == 0)
    cache, found = jax.device_put(d.cache), []
    with jax.transfer_guard("disallow"):
        for ids, tokens, *rest in calls:
            cache, _, hits = run.admit(cache, ids, tokens, *rest)
            cache, _ = run.register(cache, ids, tokens)
            cache = run.release(cache, mask)
            found.append(hits)
    assert [int(hits[0]) for hits in found] == [0, 8, 0, 4, 0]
    assert StatusBit(int(cache.status.bits)) & StatusBit.OUT_OF_BLOCKS
