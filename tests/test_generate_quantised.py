"""Generation through a quantised cache: the same tokens and the same codes, however they are computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from fake_model import dense_logits, fake_model

from jaxkv import CacheConfig, PagedKVCache, check_invariants
from jaxkv.generate import Generator
from jaxkv.sampling import SamplingParams

CONFIG = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    num_blocks=40,
    max_seqs=4,
    max_blocks_per_seq=10,
    format="int8",
    open_format="float32",
)
MODEL = fake_model()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [2, 6, 4, 3]]


_programs: dict[
    Any, dict[Any, Any]
] = {}  # compiled programs by config; everything else is an argument


def generator(config: CacheConfig, chunk: int, steps: int, **options: Any) -> Generator:
    """Returns a generator that shares its compiled programs with all tests of this module."""
    made = Generator(MODEL, config, prefill_chunk=chunk, steps_per_dispatch=steps, **options)
    made._programs = _programs.setdefault(config, {})
    return made


def run(config: CacheConfig, chunk: int, steps: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Returns the completions, and what every look of the host saw of the cache."""
    seen: list[PagedKVCache] = []

    def observe(cache: PagedKVCache) -> None:
        check_invariants(config, cache)
        seen.append(jax.tree.map(np.asarray, cache))

    made = generator(config, chunk, steps, observe=observe)
    done = made.generate(PROMPTS, max_new_tokens=12, **options)
    return [tuple(c.tokens) for c in done], seen


def first_blocks(config: CacheConfig, seen: list[Any]) -> list[bytes]:
    """Returns the bytes of each prompt's first sealed block, at the last look at which it was held."""
    out = []
    for slot, prompt in enumerate(PROMPTS):
        if len(prompt) < config.block_size:
            continue
        held = [c for c in seen if c.tables.kv_lens[slot] >= config.block_size]
        block = int(held[-1].tables.blocks[slot, 0])
        out.append(b"".join(x[:, block].tobytes() for x in jax.tree.leaves(held[-1].store.sealed)))
    return out


@pytest.mark.parametrize(
    "format",
    [
        "int8",
        pytest.param("fp8_e4m3", marks=pytest.mark.exhaustive),
        pytest.param("int4", marks=pytest.mark.exhaustive),
    ],
)
def test_generate_quantised_chunks_and_dispatches_give_the_same_tokens(format: str) -> None:
    """Chunks across block edges, one token at a time, any K: equal tokens, and codes of the first layer bit for bit."""
    config = dataclasses.replace(CONFIG, format=format, symmetric_keys=None, value_group=None)
    tokens, seen = run(config, 1, 3)
    other, others = run(config, 7, 5)
    assert tokens == other
    assert all(c.pool.num_free == config.num_blocks for c in (seen[-1], others[-1]))
    for a, b in zip(first_blocks(config, seen), first_blocks(config, others), strict=True):
        assert len(a) == len(b)
        assert a == b
    sampled = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    assert run(config, 7, 5, sampling=sampled)[0] != tokens


def test_generate_int8_stays_near_the_dense_twin() -> None:
    """int8 chooses what the float64 twin without a cache chooses, or something within its error of it."""
    tokens, _ = run(CONFIG, 7, 5)
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        for n in range(len(new)):
            logits = dense_logits(MODEL, prompt + list(new[:n]))[-1]
            assert logits[new[n]] > logits.max() - 0.5


def test_generate_quantised_samples_share_open_blocks() -> None:
    """Samples of one prompt fork its sealed and open blocks; equal greedy samples stay equal."""
    done = generator(CONFIG, 7, 5).generate(PROMPTS[:1], max_new_tokens=12, num_samples=4)
    assert len({tuple(c.tokens) for c in done}) == 1
    alone = generator(CONFIG, 7, 5)
    assert alone.generate(PROMPTS[:1], max_new_tokens=12)[0].tokens == done[0].tokens
