"""Greedy output with a prefix hit equals output without one, token for token and code for code, in every kind of format.

One compiled program admits, prefills what is left, decodes, registers and releases; the only thing that differs between
two runs is what the cache held before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import FakeModel, dense_greedy, fake_model

from jaxkv import CacheConfig, PagedKVCache, check_invariants, init_cache, release, reserve
from jaxkv.namespace import Namespace
from jaxkv.sharing import admit, evict, register, with_prefix_reuse

ROWS, WIDTH, NEW = 4, 20, 6
BASE = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    num_blocks=40,
    max_seqs=ROWS,
    max_blocks_per_seq=8,
    open_format="float32",
)
MODEL = fake_model()
FORMATS = [
    "float32", "int8", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fp8_e4m3", "int4")),
]  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]  # three blocks


@functools.cache
def serve_program(format: str) -> tuple[CacheConfig, Callable[..., Any]]:
    """Returns a config and the jitted life of up to ROWS requests."""
    config = dataclasses.replace(BASE, format=format, symmetric_keys=None, value_group=None)
    rows = jnp.arange(ROWS, dtype=jnp.int32)

    def serve(model: FakeModel, cache: PagedKVCache, prompts: Any, lens: Any, words: Any) -> Any:
        ids = jnp.where(lens > 0, rows, config.no_seq)
        cache, view, hits = admit(config, cache, ids, prompts, lens, words)
        rest = jnp.take_along_axis(
            prompts, jnp.minimum(hits[:, None] + jnp.arange(WIDTH)[None, :], WIDTH - 1), axis=1
        )
        hidden, store = model(rest, cache.store, view)
        cache = dataclasses.replace(cache, store=store)
        last = hidden[rows, jnp.maximum(view.q_lens - 1, 0)]
        texts = jnp.pad(prompts, ((0, 0), (0, NEW)))

        def step(i: Any, carry: Any) -> Any:
            cache, last, texts = carry
            token = jnp.argmax(model.unembed(last), axis=-1).astype(jnp.int32)
            texts = texts.at[rows, lens + i].set(token)
            one = jnp.where(lens > 0, 1, 0).astype(jnp.int32)
            cache, view = reserve(config, cache, ids, one, 1)
            hidden, store = model(token[:, None], cache.store, view)
            return dataclasses.replace(cache, store=store), hidden[:, 0], texts

        cache, _, texts = jax.lax.fori_loop(0, NEW, step, (cache, last, texts))
        stored = getattr(cache.store, "sealed", cache.store)
        tables = jnp.minimum(cache.tables.blocks, config.num_blocks - 1)
        bytes_ = [leaf[:, tables] for leaf in jax.tree.leaves(stored)]
        cache, _ = register(config, cache, ids, texts)
        return release(config, cache, lens > 0), hits, view.q_lens, texts, bytes_

    return config, jax.jit(serve)


@functools.cache
def evict_program(format: str) -> Callable[..., Any]:
    """Returns the jitted `evict`."""
    config, _ = serve_program(format)
    return jax.jit(functools.partial(evict, config))


class Server:
    """A cache with prefix reuse that serves batches with the fake model."""

    def __init__(self, format: str) -> None:
        self.config, self._serve = serve_program(format)
        self.cache = with_prefix_reuse(self.config, init_cache(self.config))

    def serve(self, *prompts: list[int], **space: Any) -> tuple[list[int], list[list[int]], Any]:
        """Returns, for each prompt, tokens found, the answer, and the bytes of its full blocks, layer by layer."""
        tokens = np.full((ROWS, WIDTH), 7, np.int32)
        lens = np.zeros(ROWS, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lens[row] = len(prompt)
        words = np.stack([Namespace(format=self.config.format, **space).words()] * ROWS)
        self.cache, hits, computed, texts, leaves = self._serve(
            MODEL, self.cache, tokens, lens, words
        )
        check_invariants(self.config, self.cache)
        assert int(self.cache.status.bits) == 0
        np.testing.assert_array_equal(computed, lens - hits)
        answers = [np.asarray(texts)[row, n : n + NEW].tolist() for row, n in enumerate(lens)]
        stored = [
            [np.asarray(leaf)[:, row, : (n + NEW) // self.config.block_size] for leaf in leaves]
            for row, n in enumerate(lens)
        ]
        return hits.tolist()[: len(prompts)], answers[: len(prompts)], stored[: len(prompts)]


@pytest.mark.parametrize("format", FORMATS)
def test_greedy_with_a_prefix_hit_equals_greedy_without(format: str) -> None:
    """Field cases B1, B2, N1: prompts that end within, at, and past what is cached, and a second turn after an answer."""
    warm = Server(format)
    hits, (first,), _ = warm.serve(PROMPT)
    assert hits == [0]
    assert warm.cache.reuse.num_cached == 4  # three of the prompt, and one that decoding filled
    turn = PROMPT + first[:4]
    batches: list[tuple[list[list[int]], list[int]]] = [
        ([PROMPT, PROMPT[:8], PROMPT[:9], [*PROMPT, 7, 7, 9]], [8, 4, 8, 12]),
        ([turn, [*turn, 2], [*PROMPT[:6], 0, 0, 4], [*turn[:15], 30]], [12, 16, 4, 12]),
    ]
    for prompts, want_hits in batches:
        hits, answers, codes = warm.serve(*prompts)
        assert hits == want_hits
        for prompt, answer, mine in zip(prompts, answers, codes, strict=True):
            _, (cold,), (theirs,) = Server(format).serve(prompt)
            assert answer == cold
            if format == "float32":
                assert answer == dense_greedy(MODEL, prompt, NEW)
            for a, b in zip(mine, theirs, strict=True):
                if format != "float32":  # float32 K and V may differ by a rounding of another order
                    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_evicted_prefix_is_computed_again_and_gives_the_same_answer(format: str) -> None:
    """Blocks that were cached hold something else now; another namespace never sees them."""
    warm = Server(format)
    _, (first,), _ = warm.serve(PROMPT)
    assert warm.serve(PROMPT, tenant=1)[:2] == ([0], [first])
    warm.cache, gone = evict_program(format)(warm.cache, np.int32(99))
    assert gone == 8
    others = [[i] * 13 for i in (2, 11, 12, 13)]
    assert warm.serve(*others)[0] == [0] * 4
    hits, (again,), _ = warm.serve(PROMPT)
    assert (hits, again) == ([0], first)
    assert warm.serve([*PROMPT, 1])[0] == [12]
