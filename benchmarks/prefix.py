"""Cost of lookup and of admit, which must follow the blocks of the prompts, not the pool.

What reuse saves a real model is measured by shared_prompt.py.

With more than one thread XLA:CPU splits every kernel that has a large operand between them, however little of it the kernel
reads, and each split costs some 10 us; PJRT_NPROC=1 measures without that.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import CacheConfig, PagedKVCache, check_invariants, init_cache, release
from jaxkv.eviction import Policy, cost_aware, fair, lru
from jaxkv.namespace import Namespace
from jaxkv.prefix import match
from jaxkv.sharing import admit, register, with_prefix_reuse

ROWS = 16
BLOCK = 4
PROMPT_BLOCKS = 8
SMALL_POOL, LARGE_POOL = 4_096, 1_000_000
POLICIES: dict[str, Policy] = {
    "lru": lru,
    "cost_aware": cost_aware(0.5, BLOCK),
    "fair": fair((1, 2, 5)),
}


def config_of(num_blocks: int) -> CacheConfig:
    """Returns a cache with blocks of 16 bytes, so that a million of them fit anywhere."""
    return CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_seqs=ROWS,
        max_blocks_per_seq=PROMPT_BLOCKS,
        format="bfloat16",
    )


def serve(config: CacheConfig, cache: PagedKVCache, tokens: Any, words: Any) -> PagedKVCache:
    """Admits, registers and releases one batch of prompts."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    lens = jnp.full(ROWS, PROMPT_BLOCKS * BLOCK, jnp.int32)
    cache, _, _ = admit(config, cache, rows, tokens, lens, words)
    cache, _ = register(config, cache, rows, tokens)
    return release(config, cache, jnp.ones(ROWS, jnp.bool_))


def prompts(batch: Any) -> jax.Array:
    """Returns prompts i32[ROWS, tokens] of a batch; all rows of all batches differ."""
    tokens = jnp.arange(PROMPT_BLOCKS * BLOCK, dtype=jnp.int32)[None, :]
    row = jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    return tokens * 7 + row * 1000 + batch * 1_009


class Subject:
    """One pool size: a full pool and the compiled programs."""

    def __init__(self, num_blocks: int, policy: Policy) -> None:
        self.config = config_of(num_blocks)
        spaces = [Namespace(tenant=row % policy.num_lanes).words() for row in range(ROWS)]
        self.words = jnp.asarray(np.stack(spaces))
        cache = with_prefix_reuse(self.config, init_cache(self.config), policy)
        step = functools.partial(serve, self.config)
        self.program = harness.compile_program(step, cache, prompts(0), self.words, donate=[0])
        self.cache, self.batch = cache, 0
        while int(self.cache.pool.num_free) >= ROWS * PROMPT_BLOCKS:
            self.step(fresh=True)  # until the pool is full of cached blocks, and every batch evicts
        assert int(self.cache.status.bits) == 0
        self.find = jax.jit(functools.partial(match, self.config))
        if num_blocks == SMALL_POOL:
            check_invariants(self.config, self.cache)

    def step(self, fresh: bool) -> Any:
        """Serves a batch: new prompts that evict, or the last ones again, which hit."""
        self.batch += fresh
        self.cache = self.program.call(self.cache, prompts(self.batch), self.words)
        return self.cache

    def steps(self, repeat: int, fresh: bool) -> Callable[[], Any]:
        """Returns a function that serves `repeat` batches."""

        def many() -> Any:
            for _ in range(repeat):
                jax.block_until_ready(self.step(fresh))

        return many

    def lookups(self, repeat: int) -> Callable[[], Any]:
        """Returns a function that looks the last batch up `repeat` times."""
        assert self.cache.reuse is not None
        lens = jnp.full(ROWS, PROMPT_BLOCKS * BLOCK, jnp.int32)
        tokens, index = prompts(self.batch), self.cache.reuse.index
        _, hits = self.find(index, tokens, lens, self.words)
        # A full set may have refused a block of a row; more than one such row would be a fault.
        assert sorted(hits.tolist())[1:] == [PROMPT_BLOCKS - 1] * (ROWS - 1)

        def many() -> Any:
            for _ in range(repeat):
                out = self.find(self.cache.reuse.index, tokens, lens, self.words)
                jax.block_until_ready(out)

        return many


def run(quick: bool) -> list[harness.Result]:
    """Measures both pools in turn, for hits, for misses that evict, and for lookup alone."""
    rounds, repeat = (15, 5) if quick else (25, 20)
    results = []
    for name, policy in list(POLICIES.items())[: 1 if quick else None]:
        small, large = Subject(SMALL_POOL, policy), Subject(LARGE_POOL, policy)
        cases: dict[str, Callable[[Subject], Callable[[], Any]]] = {
            "admit": lambda s: s.steps(repeat, fresh=True),
            "admit_hit": lambda s: s.steps(repeat, fresh=False),
            "lookup": lambda s: s.lookups(repeat),
        }
        for case, work in cases.items():
            times = harness.alternate(rounds, work(small), work(large))
            results += compared(f"prefix.{case}", name, times, repeat)
    return results


def compared(
    metric: str, policy: str, times: list[list[float]], repeat: int
) -> list[harness.Result]:
    """Returns the ratio of the two pools and both times."""
    small, large = ([1e6 * t / repeat for t in side] for side in times)
    ratios = [b / a for a, b in zip(small, large, strict=True)]
    shapes = {"rows": ROWS, "prompt_blocks": PROMPT_BLOCKS, "policy": policy}
    ratio = harness.Result(
        f"{metric}_1m_over_4k",
        statistics.median(ratios),
        "ratio",
        shapes,
        spread=harness.middle_half(ratios),
        limit=1.5,
    )
    sides = [
        dataclasses.replace(
            ratio,
            metric=f"{metric}_{size}",
            value=statistics.median(side),
            unit="us",
            spread=harness.middle_half(side),
            limit=None,
        )
        for size, side in (("4k", small), ("1m", large))
    ]
    return [ratio, *sides]


if __name__ == "__main__":
    harness.main("Lookup and admit of 16 prompts, full pool of 1,000,000 blocks over 4,096", run)
