"""The engine: every request brings what it brings alone, whatever happens around it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_driver import (
    CONFIG,
    EOS,
    MODEL,
    assert_all_blocks_are_back,
    engine_of,
    random_request,
)
from fake_model import dense_greedy, dense_logits

from jaxkv import CapacityError, check_invariants
from jaxkv.draft_model import Models
from jaxkv.engine import Engine
from jaxkv.eviction import fair, lru
from jaxkv.namespace import Namespace
from jaxkv.request import FinishReason, Request
from jaxkv.sampling import SamplingParams

ExpectAlone = Callable[[list[Any]], None]


def test_a_greedy_request_equals_the_dense_model(engine: Engine) -> None:
    """The oracle of the other tests is the generator; this one needs no cache at all."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    handle = engine.submit(Request(prompt, max_tokens=12))
    engine.run_until_idle()
    assert handle.outputs[0].tokens == dense_greedy(MODEL, prompt, 12, (EOS,))
    logits = dense_logits(MODEL, prompt)[-1]
    first = logits[handle.outputs[0].tokens[0]] - np.log(np.sum(np.exp(logits)))
    assert abs(handle.outputs[0].logprobs[0] - first) < 1e-4


def test_a_full_house_equals_each_alone(engine: Engine, expect_alone: ExpectAlone) -> None:
    rng = np.random.default_rng(1)
    handles = [engine.submit(random_request(rng)) for _ in range(12)]
    events = []
    while not engine.idle:
        events += engine.step()
        check_invariants(CONFIG, engine._programs.state.cache)
    expect_alone(handles)
    for handle in handles:  # the events are the outputs, cut into pieces
        mine = [event for event in events if event.handle is handle]
        assert sum((event.tokens for event in mine), ()) == tuple(handle.outputs[0].tokens)
        assert [event.finish_reason is not None for event in mine].count(True) == 1
        assert mine[-1].finish_reason == handle.outputs[0].finish_reason


def test_samples_of_one_prompt_share_it(engine: Engine, expect_alone: ExpectAlone) -> None:
    found = engine.stats.found_tokens
    sampling = SamplingParams(temperature=1.0, seed=11)
    prompt = list(range(17))
    handle = engine.submit(Request(prompt, max_tokens=8, num_samples=3, sampling=sampling))
    engine.run_until_idle()
    expect_alone([handle])
    assert len({tuple(output.tokens) for output in handle.outputs}) > 1
    assert engine.stats.found_tokens - found >= 2 * 16


def test_forced_preemption_every_third_step_changes_no_token(
    engine: Engine, expect_alone: ExpectAlone
) -> None:
    rng = np.random.default_rng(2)
    handles = [engine.submit(random_request(rng, max_tokens=14)) for _ in range(8)]
    before, steps = engine.stats.num_preemptions, 0
    while not engine.idle:
        engine.step()
        steps += 1
        if steps % 3 == 0 and engine.handles:
            engine.preempt(engine.handles[int(rng.integers(len(engine.handles)))])
            check_invariants(CONFIG, engine._programs.state.cache)
    expect_alone(handles)
    assert engine.stats.num_preemptions > before


def test_a_pool_that_runs_short_preempts_and_loses_nothing(
    engine: Engine, expect_alone: ExpectAlone
) -> None:
    """Four sequences of 10 blocks each in a pool of 24; every prompt is new, so nothing is found."""
    rng = np.random.default_rng(3)
    before = engine.stats.num_preemptions
    handles = [
        engine.submit(
            Request(
                tuple(rng.integers(0, 31, 8).tolist()),
                max_tokens=32,
                sampling=SamplingParams(temperature=2.0, seed=seed),
                ignore_eos=True,
            )
        )
        for seed in range(4)
    ]
    engine.run_until_idle()
    assert engine.stats.num_preemptions > before
    assert [len(handle.outputs[0].tokens) for handle in handles] == [32] * 4
    for handle in handles:
        request = dataclasses.replace(handle.request, prompt=handle.prompt)
        again = engine.submit(request)
        engine.run_until_idle()
        assert again.outputs[0].tokens == handle.outputs[0].tokens


def test_the_same_prompt_again_is_found_and_brings_the_same(
    engine: Engine, expect_alone: ExpectAlone
) -> None:
    prompt = tuple(
        (7 * i + 2) % 31 for i in range(16)
    )  # four whole blocks: one token must be computed
    first = engine.submit(Request(prompt, max_tokens=6))
    engine.run_until_idle()
    second = engine.submit(Request(prompt, max_tokens=6))
    other = engine.submit(Request(prompt, max_tokens=6, namespace=Namespace(salt="other")))
    engine.run_until_idle()
    expect_alone([first, second, other])
    assert second.num_found == 12
    assert other.num_found == 0


def test_aborts_leave_the_neighbours_alone(engine: Engine, expect_alone: ExpectAlone) -> None:
    rng = np.random.default_rng(4)
    handles = [engine.submit(random_request(rng, max_tokens=15)) for _ in range(9)]
    gone = [handles[0], handles[2], handles[8]]  # two that run, one that waits
    engine.step()
    for handle in gone:
        for event in engine.abort(handle):
            assert event.finish_reason is FinishReason.ABORT
        assert engine.abort(handle) == []
        check_invariants(CONFIG, engine._programs.state.cache)
    engine.run_until_idle()
    expect_alone([handle for handle in handles if handle not in gone])


def test_logits_that_are_not_finite_end_their_request_only(
    engine: Engine, expect_alone: ExpectAlone
) -> None:
    """Field case J: the row stops with an error, and what it computed is never found by another."""
    programs = engine._programs
    programs.models = Models(dataclasses.replace(MODEL, embed=MODEL.embed.at[30].set(np.nan)))
    try:
        rng = np.random.default_rng(5)
        good = [
            engine.submit(Request(tuple(rng.integers(0, 20, 9).tolist()), max_tokens=1 + i))
            for i in range(3)
        ]
        bad = engine.submit(Request([30] * 9, max_tokens=4))
        engine.run_until_idle()
        assert bad.outputs[0].finish_reason is FinishReason.ERROR
        assert isinstance(bad.outputs[0].error, FloatingPointError)
    finally:
        programs.models = Models(MODEL)
    again = engine.submit(Request([30] * 9, max_tokens=4))
    engine.run_until_idle()
    assert again.num_found == 0
    expect_alone([again])
    for handle in good:
        if 30 not in handle.outputs[0].tokens:
            expect_alone([handle])


def test_stop_strings_and_stop_ids_end_a_request(engine: Engine) -> None:
    prompt = tuple((3 * i + 1) % 31 for i in range(7))
    free = engine.submit(Request(prompt, max_tokens=12, ignore_eos=True))
    engine.run_until_idle()
    tokens, text = free.outputs[0].tokens, free.outputs[0].text
    assert len(text) == 12
    by_text = engine.submit(
        Request(prompt, max_tokens=12, ignore_eos=True, stop=("zzzz", text[4:6]))
    )
    by_id = engine.submit(Request(prompt, max_tokens=12, ignore_eos=True, stop_ids=(tokens[3],)))
    engine.run_until_idle()
    assert by_text.outputs[0].text == text[: text.index(text[4:6])]
    assert by_id.outputs[0].tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert by_id.outputs[0].text == text[: tokens.index(tokens[3])]
    for handle in (by_text, by_id):
        assert handle.outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request([1, 31]), ValueError, r"ids in \[0, 31\), got 31"),
        (Request([1], stop_ids=(-1,)), ValueError, "got -1"),
        (Request([1] * 40, max_tokens=9), ValueError, r"within the 48 tokens .* got 40 \+ 9"),
        (Request([1], stop_ids=tuple(range(9))), ValueError, "at most 8 end tokens"),
    ],
)
def test_bad_requests_are_refused_at_once(request_: Request, error: type, words: str) -> None:
    engine = engine_of(0)
    with pytest.raises(error, match=words):
        engine.submit(request_)
    assert engine.idle


def test_requests_and_engines_out_of_range_are_refused() -> None:
    for fields, words in (
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens: .* got 0"),
        ({"prompt": [1], "num_samples": True}, "num_samples"),
        ({"prompt": [1], "stop": ("",)}, "stop"),
    ):
        with pytest.raises(ValueError, match=words):
            Request(**fields)
    for options, words in (
        ({"max_steps": 0}, "max_steps: expected at least 1, got 0"),
        ({"eos_token_ids": range(9)}, "max_stop_ids: expected at least 9, got 8"),
        ({"prefill_shapes": [(5, 4)]}, "prefill_shapes: expected 1 to 4 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(MODEL, CONFIG, **options)
    small = Engine(MODEL, dataclasses.replace(CONFIG, num_blocks=4))
    with pytest.raises(ValueError, match="tokenizer: expected one"):
        small.submit(Request("text"))
    with pytest.raises(CapacityError, match="need 5 blocks of 4 tokens, the pool has 4") as caught:
        small.submit(Request([1] * 10, max_tokens=8))
    assert (caught.value.need, caught.value.free) == (5, 4)
    assert small.submit(Request([1] * 10, max_tokens=7))


def test_priority_goes_first_and_is_preempted_last() -> None:
    engine = engine_of(0)
    low = [engine.submit(Request([i, 2, 3], max_tokens=8)) for i in range(4)]
    high = engine.submit(Request([9, 2, 3], max_tokens=8, priority=1))
    engine.step()
    assert high.outputs[0].tokens
    assert not low[3].outputs[0].tokens
    engine.run_until_idle()


@pytest.mark.parametrize(("policy", "victim"), [(lru, 3), (fair([1, 4]), 2)])
def test_the_victim_is_the_last_or_of_the_tenant_over_its_share(policy: Any, victim: int) -> None:
    """Tenant 0 holds three blocks for weight 1, tenant 1 four for weight 4."""
    engine = Engine(MODEL, CONFIG, policy=policy)
    for slot, (tenant, kv_len) in enumerate([(0, 3), (1, 11), (0, 7), (1, 3)]):
        engine.submit(Request([1] * 12, namespace=Namespace(tenant=tenant)))
        seq = engine._waiting.pop(0)
        seq.slot, seq.kv_len = slot, kv_len
        engine._running[slot] = seq
    assert engine._victim().slot == victim


def test_warm_up_compiles_what_there_will_be() -> None:
    for draft_len in (0, 3):
        engine = engine_of(draft_len)
        assert engine.warm_up() == engine.shapes.num_programs == 4


def test_a_step_is_as_wide_as_what_was_foretold() -> None:
    """Every step takes one token, or the drafts too: together they make up what was generated behind the first token."""
    widths: list[int] = []

    class Watched:
        """MODEL, which tells how many tokens a row each call really computes."""

        def __call__(self, tokens: Any, store: Any, view: Any) -> Any:
            jax.debug.callback(lambda: widths.append(tokens.shape[1]))
            return MODEL(tokens, store, view)

        unembed = staticmethod(MODEL.unembed)

    jax.tree_util.register_static(Watched)
    engine = Engine(Watched(), CONFIG, prefill_shapes=[(1, 16)], max_steps=3, draft_len=3)
    handle = engine.submit(Request([7, 8, 9, 20, 7, 8, 9], max_tokens=24, ignore_eos=True))
    engine.run_until_idle()
    jax.effects_barrier()
    plain, drafted = widths.count(1), widths.count(4)
    assert plain > 0
    assert 0 < drafted <= engine.stats.num_drafted  # no drafted step without a draft
    assert len(widths) == 1 + plain + drafted
    assert len(handle.outputs[0].tokens) == 1 + plain + drafted + engine.stats.num_accepted


def _serve_random(engine: Engine, total: int, rng: np.random.Generator) -> list[Any]:
    """Submits, steps and aborts at random until `total` requests have ended; returns why they did."""
    handles: list[Any] = []
    while len(handles) < total or not engine.idle:
        for _ in range(int(rng.integers(4))):
            if len(handles) < total:
                handles.append(engine.submit(random_request(rng)))
        engine.step()
        if rng.random() < 0.1 and engine.handles:
            engine.abort(engine.handles[int(rng.integers(len(engine.handles)))])
    return [output.finish_reason for handle in handles for output in handle.outputs]


@pytest.mark.parametrize("total", [250, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_many_random_requests_leave_nothing_behind(engine: Engine, total: int) -> None:
    """Field case P: aborts, a tiny pool, mixed lengths; all end for a stated reason, blocks and memory are flat."""
    rng = np.random.default_rng(6)
    engine.warm_up()
    _serve_random(engine, 50, rng)
    assert_all_blocks_are_back(engine)
    arrays, compiles = len(jax.live_arrays()), engine.stats.num_compiles
    pages = resident_bytes()
    reasons = _serve_random(engine, total, rng)
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert_all_blocks_are_back(engine)
    assert engine.stats.num_compiles == compiles
    assert len(jax.live_arrays()) == arrays
    assert resident_bytes() - pages < 8 * 2**20
    if engine.shapes.draft_len:
        assert 0 < engine.stats.num_accepted <= engine.stats.num_drafted


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
