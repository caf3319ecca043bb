"""Drafts written in one call and rejected by `truncate` against decoding the accepted tokens one by one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import fake_model

from jaxkv import (
    CacheConfig,
    PagedKVCache,
    StatusBit,
    check_invariants,
    fork,
    init_cache,
    reserve,
    truncate,
)
from jaxkv.speculate import max_draft_lens
from pallas_kernels.sealed import SEALED_FORMATS

CONFIG = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    num_blocks=30,
    max_seqs=5,
    max_blocks_per_seq=6,
    open_format="float32",
)
MODEL = fake_model()
SLOTS = np.arange(5, dtype=np.int32)
STREAM = np.random.default_rng(0).integers(0, 31, (5, 24)).astype(np.int32)
STREAM[2] = STREAM[1]
PROMPTS = np.array([5, 6, 0, 4, 7], np.int32)  # slot 2 is a fork of slot 1
WIDTH = 7


class Run:
    """A cache of the fake model, and the programs that move it on."""

    def __init__(self, config: CacheConfig) -> None:
        def step(cache: PagedKVCache, tokens: Any, q_lens: Any) -> Any:
            cache, view = reserve(config, cache, SLOTS, q_lens, tokens.shape[1])
            hidden, store = MODEL(tokens, cache.store, view)
            return dataclasses.replace(cache, store=store), MODEL.unembed(hidden)

        quick = functools.partial(jax.jit)
        self.config, self.step = config, quick(step)
        self.cut = quick(lambda cache, lens: truncate(config, cache, SLOTS, lens))
        cache = init_cache(config)
        cache = self.feed(cache, STREAM, PROMPTS)[0]
        self.start = quick(functools.partial(fork, config))(cache, np.array([1]), np.array([2]))

    def feed(self, cache: PagedKVCache, text: np.ndarray, q_lens: np.ndarray) -> Any:
        """Writes the next q_lens tokens of each slot's text in one call; returns the cache and its logits."""
        begin = np.asarray(cache.tables.kv_lens)
        place = np.minimum(begin[:, None] + np.arange(WIDTH), text.shape[1] - 1)
        return self.step(cache, np.take_along_axis(text, place, axis=1), q_lens)

    def one_by_one(self, cache: PagedKVCache, counts: np.ndarray) -> Any:
        """Writes the next counts tokens of each slot's stream in calls of one token; returns logits of each call."""
        out = []
        for turn in range(counts.max()):
            lens = np.asarray(cache.tables.kv_lens)
            tokens = np.take_along_axis(STREAM, lens[:, None], axis=1)
            cache, logits = self.step(cache, tokens, (turn < counts).astype(np.int32))
            out.append(np.asarray(logits)[:, 0])
        return cache, np.stack(out) if out else None


def owned(cache: PagedKVCache) -> tuple[Any, ...]:
    """Returns lengths, free blocks, and the ref counts along every table: everything but the names of blocks."""
    blocks, refs = np.asarray(cache.tables.blocks), np.asarray(cache.pool.ref_counts)
    counts = [refs[row[row < len(refs)]].tolist() for row in blocks]
    return np.asarray(cache.tables.kv_lens).tolist(), int(cache.pool.num_free), counts


def sealed_bytes(cache: PagedKVCache) -> list[list[bytes]]:
    """Returns the codes and scales of every full block of every slot."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(cache.store.sealed)]
    full = np.asarray(cache.tables.kv_lens) // CONFIG.block_size
    blocks = np.asarray(cache.tables.blocks)
    return [
        [b"".join(x[:, block].tobytes() for x in arrays) for block in blocks[slot, : full[slot]]]
        for slot in SLOTS
    ]


@functools.cache
def make_run(format: str) -> Run:
    """Returns the run of a format, its prompts written."""
    return Run(dataclasses.replace(CONFIG, format=format))


every_format = pytest.mark.parametrize(
    "format",
    [
        "float32",
        "int8",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("bfloat16", "float16", "fp8_e4m3", "int4")
        ),
    ],
)


@every_format
def test_rejected_drafts_leave_what_decoding_one_by_one_gives(format: str) -> None:
    """Rows: one fills its block, two share it (both copy or keep), one begins a block, one crosses edges if it may."""
    run = make_run(format)
    lens = np.asarray(run.start.tables.kv_lens)
    room = np.asarray(max_draft_lens(run.config, jnp.asarray(lens)))
    assert room.tolist() == ([3, 2, 2, 4, 1] if format in SEALED_FORMATS else [19, 18, 18, 20, 17])
    drafts = np.minimum(room, [7, 2, 5, 4, 6]).astype(np.int32)
    atol = 2e-2 if format in ("bfloat16", "float16") else 2e-4
    for accepted in ([1, 0, 1, 0, 1], [2, 1, 0, 3, 0], [3, 2, 2, 4, 1], [0, 0, 0, 0, 0]):
        accepted = np.array(accepted, np.int32)
        wrong = np.arange(STREAM.shape[1])[None, :] >= (lens + accepted)[:, None]
        text = np.where(wrong, (STREAM + 1) % 31, STREAM)
        drafted, logits = run.feed(run.start, text, drafts)
        assert owned(drafted)[0] == (lens + drafts).tolist()
        cache = run.cut(drafted, lens + accepted)
        assert int(cache.status.bits) == 0
        check_invariants(run.config, cache)
        plain, alone = run.one_by_one(run.start, accepted)
        for row in SLOTS:
            for at in range(accepted[row]):
                np.testing.assert_allclose(logits[row, at], alone[at][row], atol=atol)
        assert owned(cache)[0] == owned(plain)[0]
        held = [len(counts) for counts in owned(cache)[2]]
        assert held == [len(counts) for counts in owned(plain)[2]]
        rest = np.full(5, 6, np.int32)
        (cache, mine), (plain, theirs) = run.one_by_one(cache, rest), run.one_by_one(plain, rest)
        np.testing.assert_allclose(mine, theirs, atol=atol)
        np.testing.assert_array_equal(mine.argmax(-1), theirs.argmax(-1))
        assert owned(cache) == owned(plain)
        if format in SEALED_FORMATS:
            assert sealed_bytes(cache) == sealed_bytes(plain)


@pytest.mark.parametrize("format", ["int8"])
def test_draft_across_an_edge_is_refused_whole_or_run_again_from_the_edge(format: str) -> None:
    """5 tokens and 5 drafts, 1 accepted: the cut to 6 would split a sealed block; to 4, and two tokens again, is exact."""
    run = make_run(format)
    lens = np.asarray(run.start.tables.kv_lens)
    drafts = np.array([5, 0, 0, 0, 0], np.int32)
    drafted, _ = run.feed(run.start, (STREAM + 1) % 31, drafts)
    cut = lens + np.array([1, 0, 0, 0, 0], np.int32)
    refused = run.cut(drafted, cut)
    assert int(refused.status.bits) == StatusBit.SEALED_BLOCK
    assert owned(refused) == owned(drafted)
    edge = run.cut(drafted, np.where(SLOTS == 0, 4, lens).astype(np.int32))
    assert int(edge.status.bits) == 0
    again, logits = run.feed(edge, STREAM, np.array([2, 0, 0, 0, 0], np.int32))
    plain, alone = run.one_by_one(run.start, np.array([1, 0, 0, 0, 0]))
    np.testing.assert_allclose(logits[0, 1], alone[0][0], atol=2e-4)
    assert owned(again) == owned(plain)
