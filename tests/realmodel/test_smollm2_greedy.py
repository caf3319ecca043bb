"""SmolLM2-135M through the paged cache: greedy text equal to transformers' own, whatever the chunk size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import Mesh

from jaxkv import CacheConfig, Engine, Request
from jaxkv.generate import Completion, Generator
from jaxkv.mesh import make_mesh, mesh_shape
from models.qwen import LoadedModel, shard

pytestmark = pytest.mark.realmodel

GOLDEN = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["cases"]
NUM_NEW = 48
TIE = 1e-3  # where two logits lie closer than this, either token is greedy


def run(
    smollm2: LoadedModel, prefill_chunk: int, kv_format: str = "float32", mesh: Mesh | None = None
) -> list[Completion]:
    """Generates for all prompts at once, end tokens included as any other."""
    config = CacheConfig(
        num_layers=smollm2.config.num_layers,
        num_kv_heads=smollm2.config.num_kv_heads,
        head_dim=smollm2.config.head_dim,
        block_size=16,
        num_blocks=8 * len(CASES),
        max_seqs=len(CASES),
        max_blocks_per_seq=8,
        format=kv_format,
    )
    model = smollm2.model.spread()
    model = model if mesh is None else shard(model, mesh)
    generator = Generator(model, config, prefill_chunk=prefill_chunk)
    prompts = [case["prompt_ids"] for case in CASES]
    return generator.generate(prompts, max_new_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def completions(smollm2: LoadedModel) -> list[Completion]:
    return run(smollm2, prefill_chunk=32)


def check_greedy(completions: list[Completion]) -> None:
    """Asserts that the tokens are transformers'; where they part, its top two logits lie within 1e-3."""
    assert len(completions) == len(CASES) == 8
    for completion, case in zip(completions, CASES, strict=True):
        theirs = case["tokens"][:NUM_NEW]
        assert len(theirs) == NUM_NEW
        for step, (mine, other) in enumerate(zip(completion.tokens, theirs, strict=True)):
            if mine != other:
                assert case["top2_gap"][step] <= TIE, (case["prompt"], step, mine, other)
                break


def test_smollm2_greedy_equals_transformers(completions: list[Completion]) -> None:
    """48 tokens on 8 prompts."""
    check_greedy(completions)


def test_smollm2_greedy_on_two_devices_equals_transformers(smollm2: LoadedModel) -> None:
    """Three K/V heads do not divide by two: both devices hold all of them and share the rows."""
    shape = mesh_shape(smollm2.config.num_kv_heads, 2)
    assert shape == (1, 2)
    check_greedy(run(smollm2, prefill_chunk=32, mesh=make_mesh(*shape)))


@pytest.mark.parametrize(
    "chunk", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (7, 64))]
)
def test_smollm2_any_prefill_chunk_gives_the_same_tokens(
    smollm2: LoadedModel, completions: list[Completion], chunk: int
) -> None:
    assert [c.tokens for c in run(smollm2, chunk)] == [c.tokens for c in completions]


def test_smollm2_in_the_engine_with_drafts_and_preemption(
    smollm2: LoadedModel, completions: list[Completion]
) -> None:
    """Eight requests on four slots, a few preempted midway: the tokens of the generator."""
    model = smollm2.config
    config = CacheConfig(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=16,
        num_blocks=40,
        max_seqs=4,
        max_blocks_per_seq=8,
    )
    engine = Engine(smollm2.model.spread(), config, draft_len=3, prefill_shapes=[(2, 24)])
    handles = [engine.submit(Request(case["prompt_ids"], max_tokens=NUM_NEW)) for case in CASES]
    engine.step()
    engine.preempt(handles[0])
    while not engine.idle:
        engine.step()
    assert [handle.outputs[0].tokens for handle in handles] == [c.tokens for c in completions]
    assert engine.stats.num_accepted > 0
    assert engine.stats.num_preemptions > 0


def test_smollm2_bfloat16_cache_begins_alike(
    smollm2: LoadedModel, completions: list[Completion]
) -> None:
    """Rounding K and V to 8 bits of mantissa moves logits by about 1e-2: most first tokens stay."""
    narrow = run(smollm2, 32, "bfloat16")
    same = sum(a.tokens[:8] == b.tokens[:8] for a, b in zip(narrow, completions, strict=True))
    assert same >= len(CASES) - 2
