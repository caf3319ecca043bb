"""Cost of reserve and release: it must follow the blocks named, not the pool."""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import jax.numpy as jnp

from jaxkv import CacheConfig, PagedKVCache, check_invariants, init_cache, release, reserve

ROWS = 64
QUERY_LEN = 4
SMALL_POOL, LARGE_POOL = 4_096, 1_000_000


def config_of(num_blocks: int) -> CacheConfig:
    """Returns a cache with blocks of 16 bytes, so that a million of them fit anywhere."""
    return CacheConfig(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=4,
        num_blocks=num_blocks,
        max_seqs=ROWS,
        max_blocks_per_seq=64,
        format="bfloat16",
    )


def reserve_and_release(config: CacheConfig, cache: PagedKVCache) -> PagedKVCache:
    """Gives every slot one block and takes it back."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    cache, _ = reserve(config, cache, rows, jnp.full(ROWS, QUERY_LEN, jnp.int32), QUERY_LEN)
    return release(config, cache, jnp.ones(ROWS, jnp.bool_))


class Subject:
    """One pool size: the compiled pair of transitions and the cache it is applied to over and over."""

    def __init__(self, num_blocks: int) -> None:
        self.config = config_of(num_blocks)
        self.cache = init_cache(self.config)
        step = functools.partial(reserve_and_release, self.config)
        self.program = harness.compile_program(step, self.cache, donate=[0])
        self.first_s = harness.seconds(self.step)
        check_invariants(self.config, self.cache)
        assert int(self.cache.pool.num_free) == num_blocks
        assert int(self.cache.status.bits) == 0

    def step(self) -> Any:
        """Runs the pair once; donates the cache and keeps the new one."""
        self.cache = self.program.call(self.cache)
        return self.cache

    def steps(self, repeat: int) -> Callable[[], Any]:
        """Returns a function that runs the pair `repeat` times."""

        def many() -> Any:
            for _ in range(repeat):
                jax.block_until_ready(self.step())

        return many


def run(quick: bool) -> list[harness.Result]:
    """Measures both pools in turn."""
    small, large = Subject(SMALL_POOL), Subject(LARGE_POOL)
    rounds, repeat = (31, 20) if quick else (101, 50)
    times = harness.alternate(rounds, small.steps(repeat), large.steps(repeat))
    small_us, large_us = ([1e6 * t / repeat for t in side] for side in times)
    ratios = [large / small for small, large in zip(small_us, large_us, strict=True)]
    shapes = {"rows": ROWS, "q_len": QUERY_LEN, "block_bytes": 16}
    results = [
        harness.Result(
            "state_ops.reserve_release_1m_over_4k",
            statistics.median(ratios),
            "ratio",
            shapes,
            spread=harness.middle_half(ratios),
            limit=1.5,
        )
    ]
    for name, subject, us in (("4k", small, small_us), ("1m", large, large_us)):
        sized = shapes | {"num_blocks": subject.config.num_blocks}
        results.append(
            harness.Result(
                f"state_ops.reserve_release_{name}",
                statistics.median(us),
                "us",
                sized,
                spread=harness.middle_half(us),
            )
        )
        for part, value in (
            ("lower", subject.program.lower_s),
            ("compile", subject.program.compile_s),
            ("first", subject.first_s),
        ):
            metric = f"state_ops.reserve_release_{name}.{part}"
            results.append(harness.Result(metric, 1e3 * value, "ms", sized))
    return results


if __name__ == "__main__":
    harness.main("Reserve and release of 64 rows, pool of 1,000,000 blocks over 4,096", run)
