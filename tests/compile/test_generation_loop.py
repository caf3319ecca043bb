"""The whole generation loop, model included, compiled by the real compilers: is the pool kept in place?

What a program takes beside its pool is measured, not assumed: a second program with the same arguments except the
pool says how many bytes the compiler counts for all the others.

Pools are 1 GiB on TPU and 16 GiB on CUDA.  XLA:GPU, which may not autotune here, copies a layer's largest matrix out
of its stack before it multiplies (101 MB for Qwen3-8B, whatever the pool); XLA:TPU reads it where it lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from compile import tpu_target
from compile.whole_loop import (
    FULL_VOCAB,
    SMALL_VOCAB,
    TARGETS,
    Loop,
    make_loop,
    memory_of,
    skip_without,
    touch_all,
)

from jaxkv.device_bytes import tpu_pool_bytes

pytestmark = [
    pytest.mark.compile,
    # JAX 0.11 says at every lowering that its Triton backend will go; see test_cuda_triton.py.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def without_pool(loop: Loop) -> tuple[Any, ...]:
    """Returns the loop's arguments, the pool left out."""
    cache = dataclasses.replace(loop.state.cache, store=None)
    return loop.model, dataclasses.replace(loop.state, cache=cache), loop.steps


def check(target: str, name: str, vocab_size: int) -> None:
    """Compiles a loop and checks the bytes of its pool: all aliased, none copied, hardly any padded."""
    is_tpu = target in tpu_target.CHIPS
    loop = make_loop(name, vocab_size, 2**30 if is_tpu else 2**34)
    skip_without(target)
    layout = loop.config.layout
    pool_bytes = tpu_pool_bytes(layout.shape, 16) if is_tpu else layout.nbytes
    assert pool_bytes <= 1.05 * layout.nbytes

    memory = memory_of(target, loop.function, (loop.model, loop.state, loop.steps))
    others = memory_of(target, touch_all, without_pool(loop))
    print(f"\n{target} pool {pool_bytes:,} temp {memory.temp_size_in_bytes:,}")
    assert memory.argument_size_in_bytes == others.argument_size_in_bytes + pool_bytes
    assert memory.alias_size_in_bytes == others.alias_size_in_bytes + pool_bytes
    assert memory.temp_size_in_bytes <= 0.01 * layout.nbytes + loop.logits_bytes


DEFAULT = [("qwen3_8b", "v5e"), ("qwen3_8b", "sm_90")]
ALL = [(model, target) for model in ("qwen3_8b", "qwen2.5_0.5b") for target in TARGETS]


@pytest.mark.parametrize(
    ("model", "target"),
    [
        case if case in DEFAULT else pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in ALL
    ],
)
def test_decode_loop_of_the_real_model_keeps_the_pool_in_place(model: str, target: str) -> None:
    """All layers and all heads; the vocabulary is cut to 1,024 (see `whole_loop`)."""
    check(target, model, SMALL_VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v6e", "sm_90"])
def test_decode_loop_with_the_whole_vocabulary_keeps_the_pool_in_place(target: str) -> None:
    """Nothing cut.  Not v5e: 16.4 GB of weights and a pool do not fit its 16 GB."""
    check(target, "qwen3_8b", FULL_VOCAB)
