"""A draft model: it changes how many tokens a step brings, never which; and what it guesses shows what its store holds."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine_driver import CONFIG, EOS, MODEL, assert_all_blocks_are_back, random_request
from fake_model import FakeModel, dense_greedy, fake_model

from jaxkv import check_invariants, ledger, memory_profile
from jaxkv.draft_model import DraftModel, Models
from jaxkv.engine import Engine
from jaxkv.engine_state import init_engine_state
from jaxkv.request import Handle, Request
from jaxkv.sampling import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # greedy, and compared with the dense model


def enlarged(model: FakeModel) -> FakeModel:
    """Returns the same function with a third layer and twice the heads, of which nothing arrives."""
    parts = {name: getattr(model, name) for name in ("wq", "wk", "wv", "wo", "up", "down")}
    for name in ("wq", "wk", "wv"):
        parts[name] = jnp.concatenate([parts[name], parts[name][..., ::-1]], axis=2)
    parts["wo"] = jnp.concatenate([parts["wo"], 0 * parts["wo"]], axis=1)
    for name, x in parts.items():
        parts[name] = jnp.concatenate([x, 0 * x[:1] if name in ("wo", "down") else x[:1]])
    return dataclasses.replace(model, **parts, num_q_heads=8, num_kv_heads=4)


@functools.cache
def drafted() -> Engine:
    """Returns the engine whose drafts come from a model; its weights are arguments of the programs."""
    return Engine(
        MODEL,
        CONFIG,
        eos_token_ids=[EOS],
        max_steps=3,
        draft_len=3,
        draft=DraftModel(enlarged(MODEL), num_layers=3, num_kv_heads=4, head_dim=8),
        prefill_shapes=[(3, 6)],
    )


def serve(draft: FakeModel) -> tuple[Engine, list[Handle]]:
    """Serves the same requests with this draft model from an empty cache: preemptions, hits, samples, one abort."""
    engine = drafted()
    engine._programs.models = Models(MODEL, draft)
    engine._programs.state = init_engine_state(
        CONFIG, engine.policy, engine.shapes.max_stop_ids, engine.draft
    )
    rng = np.random.default_rng(8)
    handles = [engine.submit(Request(PROMPT, max_tokens=12))]
    handles += [engine.submit(random_request(rng)) for _ in range(8)]
    sampling = SamplingParams(temperature=0.8, seed=5)
    for prompt in (range(16), range(17), range(9, 30)):
        prompt = tuple(prompt)
        for settings in (SamplingParams(), sampling):
            request = Request(prompt, 20, settings, num_samples=2, ignore_eos=True)
            handles.append(engine.submit(request))
    gone, steps = handles.pop(3), 0
    while not engine.idle:
        engine.step()
        steps += 1
        if steps == 2:
            engine.abort(gone)
        elif steps % 3 == 0 and engine.handles:
            engine.preempt(engine.handles[int(rng.integers(len(engine.handles)))])
        check_invariants(CONFIG, engine._programs.state.cache)
    assert_all_blocks_are_back(engine)
    return engine, handles


def tokens_of(handles: list[Handle]) -> list[list[int]]:
    """Returns what every sample brought."""
    return [output.tokens for handle in handles for output in handle.outputs]


def test_a_draft_model_changes_no_token_and_a_twin_is_always_right() -> None:
    """Each draft of a model that computes what the target does is right, so its store lacks no token anywhere.

    Chunks, hits, preemption, rollback, and steps whose drafts were all accepted: had one of them left a gap, the drafts
    behind it would be wrong.  A stranger's are nearly all wrong and rolled back; the tokens are the same.
    """
    engine, handles = serve(enlarged(MODEL))
    stats = engine.stats
    assert (stats.acceptance, stats.num_accepted) == (1.0, stats.num_drafted)
    assert stats.num_drafted > 200
    assert stats.found_tokens > 0 < stats.resumed_tokens
    assert stats.num_preemptions >= 5
    assert handles[0].outputs[0].tokens == dense_greedy(MODEL, PROMPT, 12, (EOS,))
    expected = tokens_of(handles)
    assert len({tuple(tokens) for tokens in expected[-4:]}) > 1

    engine, handles = serve(enlarged(fake_model(max_len=64, seed=1)))
    assert tokens_of(handles) == expected
    assert 0 < engine.stats.acceptance < 0.5
    assert engine.stats.num_compiles == engine.shapes.num_programs == 4


def test_the_draft_store_is_counted() -> None:
    engine = drafted()
    assert engine.draft is not None
    cache = engine._programs.state.cache
    mine = engine.draft.cache_config(CONFIG).layout.nbytes
    num_slots = CONFIG.num_blocks * CONFIG.block_size
    assert mine == num_slots * ledger.bytes_per_token(3, 4, 8, "float32")
    profile = memory_profile(cache)
    assert profile.kv_total_bytes == CONFIG.layout.nbytes + mine
    assert cache.nbytes == profile.kv_total_bytes + profile.bookkeeping_bytes


@pytest.mark.parametrize(
    ("fields", "changes", "draft_len", "words"),
    [
        ({}, {}, 0, "draft_len: expected at least 1 with a draft model, got 0"),
        ({"vocab": 29}, {}, 2, "draft: expected the target's vocabulary of 31 ids, got 29"),
        ({}, {"num_layers": 0}, 2, "draft: .* num_layers: expected an integer in .*, got 0"),
        ({}, {"head_dim": 12}, 2, "value_group: expected a divisor of head_dim 12, got 8"),
        ({}, {}, 2, "num_wide_layers: expected 0 or more, and less than half of 2 layers, got 1"),
    ],
)
def test_draft_models_that_do_not_fit_are_refused(
    fields: dict[str, Any], changes: dict[str, Any], draft_len: int, words: str
) -> None:
    config = CONFIG
    if "value_group" in words or "wide" in words:
        group = {"value_group": 8} if "value_group" in words else {"num_wide_layers": 1}
        sizes = {"head_dim": 16, "num_layers": 3}
        config = dataclasses.replace(config, format="int8", **sizes, **group)
    target = fake_model(head_dim=config.head_dim, num_layers=config.num_layers)
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8} | changes
    draft = DraftModel(fake_model(**fields), **sizes)
    with pytest.raises(ValueError, match=words):
        Engine(target, config, draft_len=draft_len, draft=draft)
