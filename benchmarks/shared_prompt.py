"""Requests that share a long prompt, served with and without prefix reuse by a real model.

All requests arrive at once.  Without reuse every row computes its whole prompt, all rows chunk by chunk in one batch.  With
it the first request computes the shared part and registers it, and all others are admitted with it in place.  Both sides
run the same code, a chunk has the same width everywhere, and both must choose the same first tokens.  Needs SmolLM2-135M's
GGUF file (see `cpu_decode.model_path`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import jax.numpy as jnp
import numpy as np
from cpu_decode import model_path

from jaxkv import CacheConfig, PagedKVCache, init_cache, raise_for_status
from jaxkv.namespace import Namespace
from jaxkv.sharing import admit, register, with_prefix_reuse
from models.qwen import load
from pallas_kernels.layout import BatchView

REQUESTS, SHARED, CHUNK, BLOCK = 32, 512, 32, 16
SUFFIXES = tuple(9 + 7 * i % (CHUNK - 8) for i in range(REQUESTS))  # 9 to 32 tokens
ROUNDS = 2


def prompts(vocab: int) -> list[list[int]]:
    """Returns the requests: one beginning, and an end of their own each."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, vocab, SHARED).tolist()
    return [
        [*shared, 3 + i, *rng.integers(3, vocab, n - 1).tolist()] for i, n in enumerate(SUFFIXES)
    ]


class Server:
    """The model, the requests and the compiled programs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.requests = prompts(model.config.vocab_size)
        blocks = -(-(SHARED + CHUNK) // BLOCK)
        self.config = CacheConfig(
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            block_size=BLOCK,
            num_blocks=REQUESTS * blocks,
            max_seqs=REQUESTS,
            max_blocks_per_seq=blocks,
        )
        self.words = np.stack([Namespace().words()] * REQUESTS)
        self.lens = np.array([len(p) for p in self.requests], np.int32)
        self.tokens = np.zeros((REQUESTS, blocks * BLOCK), np.int32)
        for row, prompt in enumerate(self.requests):
            self.tokens[row, : len(prompt)] = prompt
        self._forward = jax.jit(_forward, donate_argnums=1)
        self._admit = jax.jit(functools.partial(admit, self.config), donate_argnums=0)
        self._register = jax.jit(functools.partial(register, self.config), donate_argnums=0)
        self.computed = 0

    def prefill(
        self, cache: PagedKVCache, rows: np.ndarray, most: int = SHARED + CHUNK
    ) -> tuple[PagedKVCache, np.ndarray]:
        """Admits the first `most` tokens of the requests named, max_seqs for none, and computes what is left of them.

        Returns:
          The cache, and i32[row], the first token of each.
        """
        safe = np.minimum(rows, REQUESTS - 1)
        lens = np.where(rows < REQUESTS, np.minimum(self.lens[safe], most), 0).astype(np.int32)
        tokens = self.tokens[safe]
        cache, view, hits = self._admit(
            cache, rows.astype(np.int32), tokens, lens, self.words[safe]
        )
        hits, q_lens = np.asarray(hits), np.asarray(view.q_lens)
        chosen = np.zeros(len(rows), np.int32)
        for begin in range(0, int(q_lens.max()), CHUNK):
            place = np.minimum(hits[:, None] + begin + np.arange(CHUNK), tokens.shape[1] - 1)
            piece = np.take_along_axis(tokens, place, axis=1)
            store, first = self._forward(self.model, cache.store, view, piece, np.int32(begin))
            cache = dataclasses.replace(cache, store=store)
            last = (q_lens > begin) & (q_lens <= begin + CHUNK)
            chosen = np.where(last, first, chosen)
        self.computed += int(q_lens.sum())
        return cache, chosen

    def compile(self) -> None:
        """Runs every program once, on one token of each request."""
        for count in (1, REQUESTS):
            cache, _ = self.prefill(self._empty(), np.arange(count), most=1)
        self._register(cache, np.arange(1, dtype=np.int32), self.tokens[:1])

    def without(self) -> np.ndarray:
        """Returns the first token of every request, all of them computed whole."""
        cache, chosen = self.prefill(self._empty(), np.arange(REQUESTS))
        raise_for_status(cache)
        return chosen

    def with_reuse(self) -> np.ndarray:
        """Returns the same; what the requests share is computed once."""
        cache, first = self.prefill(self._empty(), np.arange(1))
        cache, _ = self._register(cache, np.arange(1, dtype=np.int32), self.tokens[:1])
        others = np.append(np.arange(1, REQUESTS), REQUESTS)
        cache, chosen = self.prefill(cache, others)
        raise_for_status(cache)
        return np.append(first, chosen[:-1])

    def _empty(self) -> PagedKVCache:
        cache = with_prefix_reuse(self.config, init_cache(self.config))
        return jax.block_until_ready(cache)


def _forward(
    model: Any, store: Any, view: BatchView, tokens: jax.Array, begin: jax.Array
) -> tuple[Any, jax.Array]:
    """Runs the chunk that begins `begin` tokens into what each row has to compute; returns what the model chooses."""
    q_lens = jnp.clip(view.q_lens - begin, 0, CHUNK)
    offset = jnp.arange(CHUNK, dtype=jnp.int32)[None, :]
    start = view.kv_lens - view.q_lens + begin
    chunk = dataclasses.replace(
        view,
        q_lens=q_lens,
        kv_lens=jnp.where(q_lens > 0, start + q_lens, 0),
        positions=jnp.where(offset < q_lens[:, None], start[:, None] + offset, 0),
    )
    hidden, store = model(tokens, store, chunk)
    last = hidden[jnp.arange(len(tokens)), jnp.maximum(q_lens - 1, 0)]
    return store, jnp.argmax(model.unembed(last), axis=-1).astype(jnp.int32)


def run(quick: bool) -> list[harness.Result]:
    """Serves the requests both ways in turn and compares tokens computed and the time to the last first token."""
    server = Server(load(model_path()).model.spread())
    server.compile()
    answers: dict[str, np.ndarray] = {}
    computed: dict[str, int] = {}

    def serve(side: str) -> None:
        server.computed = 0
        answers[side] = server.with_reuse() if side == "on" else server.without()
        computed[side] = server.computed

    reuse, plain = harness.alternate(
        1 if quick else ROUNDS, lambda: serve("on"), lambda: serve("off")
    )
    np.testing.assert_array_equal(answers["on"], answers["off"])
    assert computed == {
        "on": SHARED + sum(SUFFIXES),
        "off": REQUESTS * SHARED + sum(SUFFIXES),
    }
    shapes = {
        "model": "SmolLM2-135M",
        "requests": REQUESTS,
        "shared_tokens": SHARED,
        "suffix_tokens": sum(SUFFIXES),
        "chunk": CHUNK,
    }
    names = "prefix.shared_prompt"
    speedups = [b / a for a, b in zip(reuse, plain, strict=True)]
    return [
        harness.Result(
            f"{names}.tokens_computed", computed["on"], "tokens", shapes, "reuse off", computed["off"],
            computed["on"] / computed["off"], limit=SHARED + sum(SUFFIXES),
        ),
        harness.Result(
            f"{names}.last_first_token", statistics.median(reuse), "s", shapes, "reuse off",
            statistics.median(plain),
            statistics.median(a / b for a, b in zip(reuse, plain, strict=True)),
            spread=(min(reuse), max(reuse)),
        ),
        harness.Result(f"{names}.speedup", statistics.median(speedups), "times", shapes),
    ]  # fmt: skip


if __name__ == "__main__":
    harness.main(
        "32 requests that share a prompt of 512 tokens, with and without prefix reuse", run
    )
