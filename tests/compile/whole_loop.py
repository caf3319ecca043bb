"""The decode loop of jaxkv around the real Flax model, as shapes: what whole-program tests compile.

Invariants:
  * No weight and no block exists; every array is a `jax.ShapeDtypeStruct`.
  * The architectures are those of the published checkpoints.  Only the vocabulary may be cut (sorting it for top-k
    is most of the compile time); heads, widths and the number of layers never are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compile import cuda_target, tpu_target

from jaxkv import CacheConfig, decode_loop
from jaxkv.decode_loop import DecodeState
from jaxkv.sampling import SamplingParams, sampling_state
from models.qwen import Qwen, QwenConfig, abstract_model

TARGETS = (*tpu_target.CHIPS, *cuda_target.TARGETS)
FULL_VOCAB = 151_936
SMALL_VOCAB = 1024
ROWS, MAX_BLOCKS_PER_SEQ, MAX_NEW = 16, 256, 64
COMMON = {"vocab_size": FULL_VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2.5_0.5b": COMMON
    | {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
    "qwen3_8b": COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """One decode loop as shapes.

    Attributes:
      config: the cache: bfloat16, blocks of 16, a pool of at least the bytes asked for.
      model: weights in bfloat16.
      state: donated.
      steps: i32[], how many tokens each row decodes.
    """

    config: CacheConfig
    model: Qwen
    state: DecodeState
    steps: jax.ShapeDtypeStruct

    @property
    def function(self) -> Callable[..., DecodeState]:
        """The program: (model, state, steps) -> state."""
        return functools.partial(decode_loop.decode, self.config)

    @property
    def logits_bytes(self) -> int:
        """Bytes of one step's logits, float32."""
        return 4 * ROWS * self.model.config.vocab_size


def make_loop(name: str, vocab_size: int, pool_bytes: int) -> Loop:
    """Returns the loop of the architecture called `name`, its pool the fewest blocks that hold `pool_bytes`."""
    qwen = QwenConfig.from_hf(ARCHITECTURES[name] | {"vocab_size": vocab_size})
    block_bytes = qwen.num_layers * qwen.num_kv_heads * 16 * 2 * qwen.head_dim * 2
    config = CacheConfig(
        num_layers=qwen.num_layers,
        num_kv_heads=qwen.num_kv_heads,
        head_dim=qwen.head_dim,
        block_size=16,
        num_blocks=-(-pool_bytes // block_bytes),
        max_seqs=ROWS,
        max_blocks_per_seq=MAX_BLOCKS_PER_SEQ,
        format="bfloat16",
        as_bits=False,
    )
    model = abstract_model(qwen, jnp.bfloat16)

    state = jax.eval_shape(functools.partial(decode_state, config), model)
    return Loop(config, model, state, jax.ShapeDtypeStruct((), jnp.int32))


def decode_state(config: CacheConfig, model: Qwen) -> DecodeState:
    """Returns the loop's state before its first token."""
    sampling = sampling_state([SamplingParams(temperature=0.7, top_k=20)] * ROWS, [0] * ROWS)
    max_tokens, eos = jnp.full(ROWS, MAX_NEW, jnp.int32), jnp.zeros(1, jnp.int32)
    return decode_loop.init_state(config, model, sampling, max_tokens, eos, MAX_NEW)


def skip_without(target: str) -> None:
    """Skips the test where the target's compiler is not installed."""
    is_tpu = target in tpu_target.CHIPS
    reason = tpu_target.available() if is_tpu else cuda_target.skip_reason()
    if reason is not None:
        pytest.skip(reason)


def memory_of(target: str, function: Any, args: tuple[Any, ...]) -> Any:
    """Compiles for a target, with the second argument donated, and returns what the compiler counts in bytes."""
    if target in tpu_target.CHIPS:
        chip = tpu_target.CHIPS[target]
        return tpu_target.compile_for(chip, function, *args, donate=(1,)).memory_analysis()
    return cuda_target.compile_for(cuda_target.TARGETS[target], function, args, (1,)).memory


def touch_all(model: Any, state: Any, *others: Any) -> Any:
    """Returns the state, and one number of every other argument, so that none is dropped as unused."""
    return state, [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves((model, others))]
