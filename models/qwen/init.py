"""Weights that do not come from a file: random ones, and shapes only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models.qwen.config import QwenConfig
from models.qwen.modeling import Qwen, layer_shapes, top_shapes

INIT_STD = 0.02


def random_model(
    config: QwenConfig, key: jax.Array, dtype: DTypeLike = jnp.float32, implementation: str = "auto"
) -> Qwen:
    """Returns a model with fresh weights of `dtype`.

    Matrices are normal with standard deviation 0.02, those that end in the residual stream (o, down) smaller by
    sqrt(2 * num_layers); norms are 1, biases 0.

    References:
      Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3 (the scaled output).
    """
    names = [*top_shapes(config), *(f"layers.{name}" for name in layer_shapes(config))]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    weights: dict = {
        name: _init(name, shape, keys[name], config, dtype)
        for name, shape in top_shapes(config).items()
    }
    weights["layers"] = {
        name: _init(name, (config.num_layers, *shape), keys[f"layers.{name}"], config, dtype)
        for name, shape in layer_shapes(config).items()
    }
    return Qwen(config, weights, implementation)


def abstract_model(
    config: QwenConfig, dtype: DTypeLike = jnp.float32, implementation: str = "auto"
) -> Qwen:
    """Returns the model with `jax.ShapeDtypeStruct` for weights: enough to lower and compile, holds no bytes."""
    return jax.eval_shape(lambda: random_model(config, jax.random.key(0), dtype, implementation))


def _init(
    name: str, shape: tuple[int, ...], key: jax.Array, config: QwenConfig, dtype: DTypeLike
) -> jax.Array:
    if name.endswith("norm"):
        return jnp.ones(shape, dtype)
    if name.endswith("bias"):
        return jnp.zeros(shape, dtype)
    std = INIT_STD / (2 * config.num_layers) ** 0.5 if name in ("o_proj", "down_proj") else INIT_STD
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)
