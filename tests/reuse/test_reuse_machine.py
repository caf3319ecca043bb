"""Random sequences of all transitions with prefix reuse, failures among them, against `PlainReuse`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from driver import assert_only_status_differs, token_kv
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from reuse_driver import CROWDED, SPACES, WIDTH, ReuseDriver

from jaxkv import CacheConfig, StatusBit
from jaxkv.eviction import Fair, Policy, cost_aware, fair, lru

ROWS = 4
_slots = st.integers(0, CROWDED.max_seqs - 1)
_some_slots = st.lists(_slots, min_size=1, max_size=ROWS, unique=True)
_any_ids = st.integers(-1, CROWDED.max_seqs + 1)
_sources = st.permutations(range(CROWDED.max_seqs)) | st.lists(
    st.integers(0, CROWDED.no_seq), min_size=CROWDED.max_seqs, max_size=CROWDED.max_seqs
)
_spaces = st.sampled_from([0, 0, 0, 1, 2, 3])
# Few different blocks, so that prompts share beginnings; the tail makes lengths of all residues.
_blocks = st.lists(
    st.sampled_from([(1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 1, 2)]), min_size=1, max_size=4
)
_tails = st.lists(st.integers(1, 2), min_size=0, max_size=4)
_texts = st.builds(lambda blocks, tail: [t for b in blocks for t in b] + tail, _blocks, _tails)
_new = st.lists(st.integers(1, 2), max_size=6)


class ReuseMachine(RuleBasedStateMachine):
    """Takes every step in a real and a plain cache; `ReuseDriver` compares them after each."""

    policy: ClassVar[Policy] = lru
    config: ClassVar[CacheConfig] = CROWDED
    outcomes: ClassVar[Counter[StatusBit]] = Counter()
    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.driver = ReuseDriver(self.config, self.policy, rows=ROWS)

    @initialize(warm=st.sampled_from([True, True, False]))
    def begin(self, warm: bool) -> None:
        """Most sequences begin with 9 of the 11 blocks cached, so that what follows must evict."""
        if warm:
            prompts = [(0, [1] * 12, 0), (1, [2] * 12, 0), (2, [1, 2] * 6, 1)]
            self.admit_register_release(prompts, keep=False)

    def _take(self, transition: Callable[..., StatusBit], *args: Any) -> StatusBit:
        evicted = self.driver.plain.turnover, self.driver.plain.remainder
        bits = transition(*args)
        self.outcomes[bits] += 1
        self.happened["evicted"] += evicted != (
            self.driver.plain.turnover, self.driver.plain.remainder,
        )  # fmt: skip
        return bits

    def _admit(self, rows: list[tuple[int, list[int], int]]) -> None:
        bits, hits = self.driver.admit(*rows)
        self.outcomes[bits] += 1
        self.happened["hit"] += sum(hits) > 0

    @rule(
        rows=st.lists(
            st.tuples(_slots, _texts, _spaces), min_size=1, max_size=3, unique_by=lambda r: r[0]
        ),
        keep=st.sampled_from([False, False, True]),
    )
    def admit_register_release(self, rows: list[tuple[int, list[int], int]], keep: bool) -> None:
        """A request's whole life, or its beginning; slots in use are released first."""
        plain = self.driver.plain
        self._take(self.driver.release, *[slot for slot, _, _ in rows if plain.kv_len(slot)])
        self._admit(rows)
        slots = [slot for slot, _, _ in rows if slot in plain.spaces]
        self._take(self.driver.register, *slots)
        if not keep:
            self._take(self.driver.release, *slots)

    @rule(slot=_slots, pick=st.integers(0, 99), tail=_tails, keep=st.booleans())
    def admit_known(self, slot: int, pick: int, tail: list[int], keep: bool) -> None:
        """A prompt whose beginning is findable."""
        plain = self.driver.plain
        if plain.known:
            space, text = sorted(plain.known)[pick % len(plain.known)]
            self.admit_register_release([(slot, [*text, *tail][:WIDTH], space)], keep)

    @rule(rows=st.lists(st.tuples(_any_ids, _texts, _spaces), min_size=1, max_size=ROWS))
    def admit_anything(self, rows: list[tuple[int, list[int], int]]) -> None:
        """Slots in use, twice, or out of range."""
        self._admit(rows)

    @rule(
        rows=st.lists(st.tuples(_slots, _new), min_size=1, max_size=ROWS, unique_by=lambda r: r[0])
    )
    def write(self, rows: list[tuple[int, list[int]]]) -> None:
        """New tokens; evicts when blocks run short."""
        self._take(self.driver.write, *rows)

    @rule(slots=_some_slots)
    def register(self, slots: list[int]) -> None:
        """What was decoded becomes findable; slots that were not admitted are refused."""
        self._take(self.driver.register, *slots)

    @rule(src=_slots, dst=_some_slots, new=_new)
    def fork_and_write(self, src: int, dst: list[int], new: list[int]) -> None:
        """One sequence copied to several slots that all write."""
        self._take(self.driver.fork, *[(src, d) for d in dst])
        self._take(self.driver.write, *[(d, new) for d in dst])

    @rule(source=_sources, new=_new)
    def reorder_and_write(self, source: list[int], new: list[int]) -> None:
        """Every slot takes another's sequence, or none; then two write."""
        self._take(self.driver.reorder, source)
        self._take(self.driver.write, (0, new), (1, new))

    @rule(slots=_some_slots, cuts=st.lists(st.integers(0, 24), min_size=ROWS, max_size=ROWS))
    def truncate(self, slots: list[int], cuts: list[int]) -> None:
        """Rolls back, often into a findable block, which is then written."""
        lengths = [
            cut % (self.driver.plain.kv_len(s) + 1) for s, cut in zip(slots, cuts, strict=False)
        ]
        self._take(self.driver.truncate, *zip(slots, lengths, strict=True))

    @rule(slot=_slots, cut=st.integers(0, 24), new=_new, learn=st.booleans())
    def cut_and_write(self, slot: int, cut: int, new: list[int], learn: bool) -> None:
        """Rolls one sequence back and writes another continuation; what was findable there must not be any more."""
        if kv_len := self.driver.plain.kv_len(slot):
            if learn and slot in self.driver.plain.spaces:
                self._take(self.driver.register, slot)
            self._take(self.driver.truncate, (slot, cut % (kv_len + 1)))
            self._take(self.driver.write, (slot, new))

    @rule(slots=_some_slots)
    def release(self, slots: list[int]) -> None:
        """Ends the named slots that hold something."""
        self._take(self.driver.release, *[s for s in slots if self.driver.plain.kv_len(s)])

    @rule(count=st.integers(-1, 4))
    def evict(self, count: int) -> None:
        """Gives cached blocks up."""
        self.driver.evict(count)

    def teardown(self) -> None:
        """Everything released is free or cached, and everything cached can go."""
        self._take(self.driver.release, *self.driver.plain.tokens)
        assert self.driver.num_free + self.driver.num_cached == CROWDED.num_blocks


# Sequences of the first machine (2,000 in CI) and of each other, and steps of each.  A step may be a request's whole life, so
# that 8 reach every failure and eviction; HYPOTHESIS_PROFILE=reuse takes longer ones.
_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "reuse"
_MANY = max(500, settings.default.max_examples)
_FEW, _STEPS = (500, 15) if _LONG else (120, 8)


class FairMachine(ReuseMachine):
    """Three tenants with quotas; the fourth namespace is another adapter of the first tenant."""

    policy: ClassVar[Fair] = fair((1, 2, 5))

    def _admit(self, rows: list[tuple[int, list[int], int]]) -> None:
        with self._nobody_wronged():
            super()._admit(rows)

    @contextlib.contextmanager
    def _nobody_wronged(self) -> Iterator[None]:
        """Beyond what puts it over its quota, a tenant loses cached blocks for its own new ones only."""
        plain = self.driver.plain
        cached, old, usage = set(plain.cached), dict(plain.log), plain.usage(3)
        yield
        new = Counter(entry.tenant for name, entry in plain.log.items() if name not in old)
        lost = Counter(old[name].tenant for name in cached if name not in plain.log)
        for tenant, weight in enumerate(self.policy.weights):
            over = usage[tenant] + new[tenant] - weight * CROWDED.num_blocks // 8
            assert lost[tenant] <= max(0, over, new[tenant])


class CostAwareMachine(ReuseMachine):
    """A policy that ages by evictions; free blocks are all zero, cached ones keep their bytes."""

    config = dataclasses.replace(CROWDED, scrub_on_free=True)
    policy = cost_aware(0.5, CROWDED.block_size)


def _settings(num_sequences: int) -> settings:
    return settings(max_examples=num_sequences, stateful_step_count=_STEPS)


def test_reuse_machine_lru_matches_plain_model() -> None:
    """Field cases C1, C3, C5, D1, G8, G10, H'1, H'2, I1, I3: nothing leaks, nothing stale is found."""
    assert len({space.tenant for space in SPACES}) == 3
    ReuseMachine.outcomes.clear()
    run_state_machine_as_test(ReuseMachine, settings=_settings(_MANY))
    bits = functools.reduce(operator.or_, ReuseMachine.outcomes)
    wanted = (
        StatusBit.OUT_OF_BLOCKS | StatusBit.SLOT_IN_USE | StatusBit.NOT_ADMITTED | StatusBit.EMPTY_SLOT
        | StatusBit.DUPLICATE_SEQ | StatusBit.INVALID_SEQ
    )  # fmt: skip
    assert bits & wanted == wanted, "some failure never happened"
    assert ReuseMachine.outcomes[StatusBit(0)] > ReuseMachine.outcomes.total() // 3
    assert min(ReuseMachine.happened["hit"], ReuseMachine.happened["evicted"]) > 5


@pytest.mark.parametrize("machine", [FairMachine, CostAwareMachine])
def test_reuse_machine_other_policies_match_plain_model(machine: type[ReuseMachine]) -> None:
    run_state_machine_as_test(machine, settings=_settings(_FEW))


def test_admit_of_a_tenant_without_weight_is_refused() -> None:
    """Three weights, so tenant 3 has none; a negative tenant is no tenant.  Shares its programs with the machine."""
    d = ReuseDriver(CROWDED, FairMachine.policy, rows=ROWS)
    d.admit((1, [1] * 9, 2))
    empty, none = np.zeros((ROWS, WIDTH), np.int32), np.zeros(ROWS, np.int32)
    k, v = token_kv(CROWDED, empty)
    for tenant in (3, -1):
        words = np.stack([SPACES[0].words()] * ROWS)
        words[0, 0] = tenant
        ids = np.array([0, *[CROWDED.no_seq] * (ROWS - 1)], np.int32)
        new, view, hits = d._run.admit(d.cache, ids, empty + 1, none + 9, words, k, v)
        assert StatusBit(int(new.status.bits)) == StatusBit.INVALID_TENANT
        assert_only_status_differs(d.cache, new)
        assert (np.asarray(view.q_lens) == 0).all()
        assert (np.asarray(hits) == 0).all()
