"""The pool is never copied: what the compiler says of the compiled programs, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fake_model import fake_model
from fast_compile import SHIPPED

from jaxkv import (
    CacheConfig,
    beam_loop,
    decode_loop,
    fork,
    init_cache,
    release,
    reorder,
    reserve,
    truncate,
)
from jaxkv.sampling import SamplingParams, sampling_state
from pallas_kernels.layout import FORMATS
from pallas_kernels.sealed import SEALED_FORMATS

MIB = 2**20
ROWS = 8


def big_config(format: str) -> CacheConfig:
    """Returns a cache whose pool is 256 MiB, or 512 MiB of codes (a prefill's activations are 7 MB)."""
    if format in SEALED_FORMATS:
        bits = SEALED_FORMATS[format].bits
        blocks = 512 * MIB * 8 // (2 * 2 * 64 * 2 * 64 * bits)
        sizes = {"block_size": 64, "num_blocks": blocks, "max_blocks_per_seq": 32}
        return dataclasses.replace(big_config("float32"), format=format, **sizes)
    itemsize = jnp.dtype(format).itemsize
    return CacheConfig(
        num_layers=2,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        num_blocks=256 * MIB // (2 * 2 * 16 * 2 * 64 * itemsize),
        max_seqs=ROWS,
        max_blocks_per_seq=128,
        format=format,
    )


def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """Returns an abstract array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves of an abstract tree; a key counts with its two words."""
    sizes = (
        leaf.size
        * (8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(tree)
    )
    return sum(sizes)


def check_in_place(compiled: Any, donated: Any, config: CacheConfig) -> None:
    """Asserts that all donated bytes are aliased and that what is temporary is at most 2 % of the pool."""
    memory = compiled.memory_analysis()
    assert config.layout.nbytes >= 256 * 10**6
    assert memory.alias_size_in_bytes == tree_bytes(donated)
    assert memory.temp_size_in_bytes <= 0.02 * config.layout.nbytes


PROGRAMS: list[Any] = [("decode", format) for format in FORMATS]
PROGRAMS += [("start", "float32"), ("prefill", "bfloat16"), ("prefill", "int8"), ("decode", "int4")]
PROGRAMS += [("beams", "bfloat16"), ("scrubbing decode", "int8")]
PROGRAMS += [
    pytest.param(program, format, marks=pytest.mark.exhaustive)
    for program, formats in {
        "decode": ("int8", "fp8_e4m3"),
        "start": ("bfloat16", "float16"),
        "prefill": ("float32", "float16"),
    }.items()
    for format in formats
]


@pytest.mark.parametrize(("program", "format"), PROGRAMS)
def test_generation_program_updates_the_cache_in_place(program: str, format: str) -> None:
    config = dataclasses.replace(big_config(format), scrub_on_free=program == "scrubbing decode")
    model = jax.eval_shape(lambda: fake_model(head_dim=64, hidden=64, max_len=config.max_seq_len))
    state = jax.eval_shape(
        lambda model: decode_loop.init_state(
            config,
            model,
            sampling_state([SamplingParams(temperature=0.7, top_k=20)] * ROWS, [0] * ROWS),
            jnp.full(ROWS, 32, jnp.int32),
            jnp.zeros(1, jnp.int32),
            32,
        ),
        model,
    )
    if program == "beams":
        state = jax.eval_shape(lambda run: beam_loop.init_beams(run, 2, 4, 1.0, False), state)
    functions = {
        "prefill": (decode_loop.prefill, shape(ROWS, 64), shape(ROWS)),
        "start": (decode_loop.start, shape(ROWS)),
        "decode": (decode_loop.decode, shape()),
        "scrubbing decode": (decode_loop.decode, shape()),
        "beams": (beam_loop.steps, shape()),
    }
    function, *arguments = functions[program]
    step = functools.partial(function, config)
    compiled = jax.jit(step, donate_argnums=1).lower(model, state, *arguments).compile(SHIPPED)
    check_in_place(compiled, state, config)


def compile_transition(transition: Any, config: CacheConfig) -> tuple[Any, Any]:
    """Returns the compiled transition and the abstract cache it donates."""
    cache = jax.eval_shape(functools.partial(init_cache, config))
    rows = {
        release: (shape(ROWS, dtype=bool),),
        reorder: (shape(ROWS),),
    }.get(transition, (shape(ROWS), shape(ROWS)))
    options = {"query_len": 64} if transition is reserve else {}
    step = functools.partial(transition, config, **options)
    return jax.jit(step, donate_argnums=0).lower(cache, *rows).compile(SHIPPED), cache


@pytest.mark.parametrize("transition", [reserve, fork, truncate, release], ids=lambda f: f.__name__)
def test_transition_updates_the_cache_in_place(transition: Any) -> None:
    """Copy-on-write included: `reserve` holds the only loop that moves blocks."""
    config = big_config("bfloat16")
    compiled, cache = compile_transition(transition, config)
    check_in_place(compiled, cache, config)


@pytest.mark.parametrize(
    "transition", [reserve, reorder, truncate, release], ids=lambda f: f.__name__
)
def test_transition_copies_no_array_of_a_million_blocks(transition: Any) -> None:
    """Nothing temporary is as large as one int32 per block: counts and free stack stay in place too."""
    tiny = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "num_blocks": 1_000_000}
    config = dataclasses.replace(
        big_config("bfloat16"), **tiny, scrub_on_free=transition is release
    )
    compiled, cache = compile_transition(transition, config)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == tree_bytes(cache)
    assert memory.temp_size_in_bytes < 4 * config.num_blocks // 8
