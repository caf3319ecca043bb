"""The engine's programs, model and prefix reuse included, compiled by the real compilers: are both pools kept in place?

As in test_generation_loop, a second program with the same arguments but the pools says what all the others take.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compile import tpu_target
from compile.whole_loop import (
    ARCHITECTURES,
    SMALL_VOCAB,
    TARGETS,
    make_loop,
    memory_of,
    skip_without,
    touch_all,
)

from jaxkv import DraftModel, engine_loop, lru
from jaxkv.draft_model import Models
from jaxkv.engine_state import init_engine_state
from models.qwen import QwenConfig, abstract_model

pytestmark = [
    pytest.mark.compile,
    # JAX 0.11 says at every lowering that its Triton backend will go; see test_cuda_triton.py.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
STEPS, CHUNK, DRAFT_LEN, STOPS = 16, 64, 4, 4
ROWS = {"decode": 16, "decode_drafted": 16, "feed": 4}


def draft_of() -> DraftModel:
    """Returns Qwen2.5-0.5B as shapes: another number of layers, heads and channels than the target's."""
    qwen = QwenConfig.from_hf(ARCHITECTURES["qwen2.5_0.5b"] | {"vocab_size": SMALL_VOCAB})
    model = abstract_model(qwen, jnp.bfloat16)
    return DraftModel(model, qwen.num_layers, qwen.num_kv_heads, qwen.head_dim)


DEFAULT = [("decode", "sm_90")]
ALL = [(kind, target) for kind in ROWS for target in TARGETS]


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        case if case in DEFAULT else pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in ALL
    ],
)
def test_engine_program_keeps_the_pools_in_place(kind: str, target: str) -> None:
    """Real architectures, the vocabulary cut: admit, register, release and the policy's bookkeeping in one program with the model."""
    skip_without(target)
    if target in tpu_target.CHIPS:  # the 8B model leaves too little of 16 GB
        pool = 2**32 if kind == "decode_drafted" else 2**33  # the draft model has a pool of its own
        loop = make_loop("qwen2.5_0.5b", SMALL_VOCAB, pool)
    else:
        loop = make_loop("qwen3_8b", SMALL_VOCAB, 2**34)
    config = loop.config
    draft = draft_of() if kind == "decode_drafted" else None
    models = Models(loop.model, None if draft is None else draft.model)
    state = jax.eval_shape(lambda: init_engine_state(config, lru, STOPS, draft))
    ids = jax.ShapeDtypeStruct((ROWS[kind],), jnp.int32)
    rest: tuple[Any, ...] = (ids, loop.steps)
    length = 0 if draft is None else DRAFT_LEN
    step = functools.partial(engine_loop.decode, config, STEPS, length)
    if kind == "feed":
        step, rest = functools.partial(engine_loop.feed, config, CHUNK), (ids,)
    memory = memory_of(target, step, (models, state, *rest))
    cache = dataclasses.replace(state.cache, store=None, draft_store=None)
    small = dataclasses.replace(state, cache=cache)
    others = memory_of(target, touch_all, (models, small, *rest))
    pools = memory.argument_size_in_bytes - others.argument_size_in_bytes
    assert pools >= config.layout.nbytes
    assert memory.alias_size_in_bytes == others.alias_size_in_bytes + pools
    print(f"\n{kind} {target} pools {pools:,} temp {memory.temp_size_in_bytes:,}")
    assert memory.temp_size_in_bytes <= 0.01 * pools
