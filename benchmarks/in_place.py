"""Does the compiled decode loop keep the pool in place?  What the compiler says, from shapes alone."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import harness
import jax
import jax.numpy as jnp

from jaxkv import CacheConfig, decode_loop
from jaxkv.sampling import SamplingParams, sampling_state
from pallas_kernels.layout import FORMATS

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from fake_model import fake_model

ROWS = 8
POOL_BYTES = 256 * 2**20


def config_of(format: str) -> CacheConfig:
    """Returns a cache whose pool is exactly POOL_BYTES."""
    block_bytes = 2 * 2 * 16 * 2 * 64 * jnp.dtype(format).itemsize
    return CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        num_blocks=POOL_BYTES // block_bytes,
        max_seqs=ROWS,
        max_blocks_per_seq=128,
        format=format,
    )


def abstract_state(config: CacheConfig, model: Any) -> Any:
    """Returns the shapes of a decode state; nothing is allocated."""

    def make(model: Any) -> Any:
        sampling = sampling_state([SamplingParams(temperature=0.7, top_k=20)] * ROWS, [0] * ROWS)
        budget, eos = jnp.full(ROWS, 64, jnp.int32), jnp.zeros(1, jnp.int32)
        return decode_loop.init_state(config, model, sampling, budget, eos, 64)

    return jax.eval_shape(make, model)


def measure(format: str) -> list[harness.Result]:
    """Compiles `decode_loop.decode` for one format and reads the compiler's memory analysis."""
    config = config_of(format)
    model = jax.eval_shape(lambda: fake_model(head_dim=64, hidden=64, max_len=config.max_seq_len))
    state = abstract_state(config, model)
    step = functools.partial(decode_loop.decode, config)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    program = harness.compile_program(step, model, state, steps, donate=[1])
    donated, pool = harness.tree_bytes(state), config.layout.nbytes
    alias = program.memory.alias_size_in_bytes
    assert alias >= harness.tree_bytes(state.cache), "bytes of the cache are not aliased"
    shapes = {
        "pool_bytes": pool,
        "rows": ROWS,
        "layers": config.num_layers,
        "model": "tests/fake_model",
    }
    prefix = f"in_place.cpu.{format}"
    return [
        harness.Result(f"{prefix}.alias_share", alias / donated, "share", shapes),
        harness.Result(
            f"{prefix}.temp_share",
            program.memory.temp_size_in_bytes / pool,
            "share",
            shapes,
            limit=0.02,
        ),
        harness.Result(f"{prefix}.lower", 1e3 * program.lower_s, "ms", shapes),
        harness.Result(f"{prefix}.compile", 1e3 * program.compile_s, "ms", shapes),
    ]


def run(quick: bool) -> list[harness.Result]:
    """Measures every format; there is nothing to make quicker."""
    del quick
    return [result for format in FORMATS for result in measure(format)]


if __name__ == "__main__":
    harness.main("The compiled decode loop on CPU: aliased and temporary bytes", run)
