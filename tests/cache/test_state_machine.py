"""Random sequences of transitions, failures among them, against `PlainCache` after every step."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from driver import SMALL, Driver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from jaxkv import StatusBit
from pallas_kernels.sealed import SEALED_FORMATS

ROWS = 4
QUERY_LEN = 6
# What only `jaxkv.sharing` reports; tests/reuse has a machine of its own for that.
OF_REUSE = StatusBit.SLOT_IN_USE | StatusBit.NOT_ADMITTED | StatusBit.INVALID_TENANT

_slots = st.integers(0, SMALL.max_seqs - 1)
_any_ids = st.integers(-2, SMALL.max_seqs + 2)
_some_slots = st.lists(_slots, min_size=1, max_size=ROWS, unique=True)
_slots_or_none = st.lists(
    st.integers(0, SMALL.no_seq), min_size=SMALL.max_seqs, max_size=SMALL.max_seqs
)
_q_lens = st.integers(0, QUERY_LEN)
_ROW = st.tuples(_slots, _q_lens)


class CacheMachine(RuleBasedStateMachine):
    """Takes every step in a real and a plain cache; `Driver` compares them after each."""

    format = "float32"
    num_wide_layers = 0
    scrub_on_free = False
    outcomes: ClassVar[Counter[StatusBit]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        config = dataclasses.replace(
            SMALL,
            format=self.format,
            num_layers=SMALL.num_layers + 2 * self.num_wide_layers,
            num_wide_layers=self.num_wide_layers,
            scrub_on_free=self.scrub_on_free,
        )
        self.driver = Driver(config, query_len=QUERY_LEN, rows=ROWS)

    def _take(self, transition: Callable[..., StatusBit], *args: Any) -> None:
        self.outcomes[transition(*args)] += 1

    @rule(rows=st.lists(_ROW, min_size=1, max_size=ROWS, unique_by=lambda row: row[0]))
    def append(self, rows: list[tuple[int, int]]) -> None:
        """New tokens for distinct slots; runs out of blocks or of table width often."""
        self._take(self.driver.append, *rows)

    @rule(slot=_slots, q_len=st.integers(1, QUERY_LEN), others=_some_slots)
    def fork_and_append(self, slot: int, q_len: int, others: list[int]) -> None:
        """One sequence copied to several slots, which then all write: the case copy-on-write is for."""
        if not self.driver.plain.kv_len(slot):
            self._take(self.driver.append, (slot, q_len))
        self._take(self.driver.fork, *[(slot, dst) for dst in others])
        self._take(self.driver.append, *[(dst, q_len) for dst in others])

    @rule(sources=st.lists(_slots, min_size=ROWS, max_size=ROWS), dst=_some_slots)
    def fork(self, sources: list[int], dst: list[int]) -> None:
        """Any pairs, slots in use and chains such as a -> b, b -> a included."""
        self._take(self.driver.fork, *zip(sources, dst, strict=False))

    @rule(
        source=st.permutations(range(SMALL.max_seqs)) | _slots_or_none,
        outside=st.sampled_from([None, None, None, -1, SMALL.no_seq + 1]),
        q_len=st.integers(0, QUERY_LEN),
    )
    def reorder_and_append(self, source: list[int], outside: int | None, q_len: int) -> None:
        """Every slot takes another's sequence, or none; then the first ones write."""
        source = [*source[:-1], source[-1] if outside is None else outside]
        self._take(self.driver.reorder, source)
        self._take(self.driver.append, *[(slot, q_len) for slot in range(ROWS)])

    @rule(slots=_some_slots, cuts=st.lists(st.integers(0, 16), min_size=ROWS, max_size=ROWS))
    def truncate(self, slots: list[int], cuts: list[int]) -> None:
        """Rolls back by a valid amount."""
        lengths = [
            cut % (self.driver.plain.kv_len(s) + 1) for s, cut in zip(slots, cuts, strict=False)
        ]
        self._take(self.driver.truncate, *zip(slots, lengths, strict=True))

    @rule(slots=_some_slots)
    def release(self, slots: list[int]) -> None:
        """Ends the named slots that hold something."""
        self._take(self.driver.release, *[slot for slot in slots if self.driver.plain.kv_len(slot)])

    @rule(rows=st.lists(st.tuples(_any_ids, st.integers(-2, 9)), min_size=1, max_size=ROWS))
    def append_anything(self, rows: list[tuple[int, int]]) -> None:
        """Ids out of range or twice, lengths out of range."""
        self._take(self.driver.append, *rows)

    @rule(pairs=st.lists(st.tuples(_any_ids, _any_ids), min_size=1, max_size=ROWS))
    def fork_anything(self, pairs: list[tuple[int, int]]) -> None:
        """Empty sources, ids out of range or twice."""
        self._take(self.driver.fork, *pairs)

    @rule(rows=st.lists(st.tuples(_any_ids, st.integers(-2, 18)), min_size=1, max_size=ROWS))
    def truncate_anything(self, rows: list[tuple[int, int]]) -> None:
        """Lengths above the present one or below 0, ids out of range or twice."""
        self._take(self.driver.truncate, *rows)

    @rule(slots=_some_slots)
    def release_anything(self, slots: list[int]) -> None:
        """Empty slots among the named ones: a double release."""
        self._take(self.driver.release, *slots)

    def teardown(self) -> None:
        """Everything released gives every block back."""
        self._take(self.driver.release, *self.driver.plain.tokens)
        assert self.driver.num_free == SMALL.num_blocks


class Bfloat16Machine(CacheMachine):
    """The same with bfloat16, stored as bits."""

    format = "bfloat16"


class Float16Machine(CacheMachine):
    """The same with float16, stored as bits."""

    format = "float16"


class Int8Machine(CacheMachine):
    """The same with blocks sealed to int8, whose codes must never change."""

    format = "int8"


class Fp8Machine(CacheMachine):
    """The same with blocks sealed to float8."""

    format = "fp8_e4m3"


class Int4Machine(CacheMachine):
    """The same with blocks sealed to int4, first and last layer in full precision; free blocks are all zero."""

    format = "int4"
    num_wide_layers = 1
    scrub_on_free = True


def test_state_machine_random_transitions_match_plain_model() -> None:
    """Field cases C1, C5, E9, I1, I2: nothing leaks, nothing stale is seen, counts are exact."""
    CacheMachine.outcomes.clear()
    run_state_machine_as_test(CacheMachine)
    happened = functools.reduce(operator.or_, CacheMachine.outcomes)
    every = functools.reduce(operator.or_, StatusBit) & ~(OF_REUSE | StatusBit.SEALED_BLOCK)
    assert happened == every, "some failure never happened"
    assert CacheMachine.outcomes[StatusBit(0)] > CacheMachine.outcomes.total() // 3


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Bfloat16Machine, marks=pytest.mark.exhaustive),
        Int8Machine,
        Int4Machine,
        pytest.param(Float16Machine, marks=pytest.mark.exhaustive),
        pytest.param(Fp8Machine, marks=pytest.mark.exhaustive),
    ],
)
def test_state_machine_narrow_formats_match_plain_model(machine: type[CacheMachine]) -> None:
    """Field case O7: the pool keeps its dtype through every transition; L8: scales go where their blocks go."""
    few = settings(max_examples=max(25, settings().max_examples // 20))
    CacheMachine.outcomes.clear()
    run_state_machine_as_test(machine, settings=few)
    refused = any(bits & StatusBit.SEALED_BLOCK for bits in CacheMachine.outcomes)
    if few.max_examples >= 100:  # fewer may miss it by chance
        assert refused == (machine.format in SEALED_FORMATS)
