"""A Qwen divided over the devices of a mesh (`jaxkv.mesh`): tensor parallelism.

What each of n devices holds of a layer, and what is sent::

    q_proj, k_proj, v_proj, biases   1/n of the columns; "heads" divides them head by head   [rows > 1: gather q, k, v]
    attention                        the heads of its place on "heads", its part of the rows [rows > 1: sum, scatter]
    o_proj                           the rows (inputs) that go with its q columns            sum
    gate_proj, up_proj, down_proj    1/n of the columns; the same 1/n of the rows            sum
    embed, lm_head                   1/n of the vocabulary, filled up with zeros             sum; gather the logits
    norms, o_bias                    everything
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.mesh import HEADS, ROWS
from models.qwen.config import QwenConfig
from models.qwen.modeling import SUMMED, Array, Qwen

ALL = (HEADS, ROWS)
BY_OUTPUT = "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "gate_proj", "up_proj"
BY_VOCABULARY = ("embed", "lm_head")


def shard(model: Qwen, mesh: Mesh) -> Qwen:
    """Returns the model with its weights on the devices of a mesh; it then runs inside `jax.shard_map` alone.

    Args:
      model: on one device, stacked or `spread`.
      mesh: of `jaxkv.mesh.make_mesh`.

    Raises:
      ValueError: another mesh, sizes that do not divide, or a model that is on a mesh already.
    """
    model = divide(model, mesh)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), weight_specs(model))
    sharded: Qwen = jax.device_put(model, places)
    return sharded


def divide(model: Qwen, mesh: Mesh) -> Qwen:
    """Returns the model as `shard` does, its weights still where they are; see there."""
    if mesh.axis_names != ALL:
        raise ValueError(f"mesh: expected the axes {ALL}, got {mesh.axis_names}")
    if model.mesh_axes:
        raise ValueError(f"model: expected one on a single device, got one on {model.mesh_axes}")
    _check_sizes(model.config, mesh)
    model = nnx.clone(model)
    model.mesh_axes = ALL
    for name in BY_VOCABULARY:
        if hasattr(model, name):
            rows = getattr(model, name)[...]
            padding = (0, -len(rows) % mesh.size)
            setattr(model, name, nnx.Param(jnp.pad(rows, (padding, (0, 0)))))
    return model


def weight_specs(model: Qwen) -> Any:
    """Returns how the weights lie on a mesh: a pytree like the model's, of `PartitionSpec`."""

    def spec(path: tuple[Any, ...], leaf: Array) -> PartitionSpec:
        name = _name(path)
        is_spread = model.matrices is not None and name in model.matrices
        return _spec(name, leaf.ndim, is_spread)

    return jax.tree_util.tree_map_with_path(spec, model)


def _check_sizes(config: QwenConfig, mesh: Mesh) -> None:
    heads = mesh.shape[HEADS]
    for name, size, parts in (
        ("num_kv_heads", config.num_kv_heads, heads),
        ("num_q_heads", config.num_q_heads, heads),
        ("num_kv_heads * head_dim", config.num_kv_heads * config.head_dim, mesh.size),
        ("intermediate_size", config.intermediate_size, mesh.size),
    ):
        if size % parts:
            raise ValueError(f"{name}: expected a multiple of {parts} for this mesh, got {size}")


def _spec(name: str, ndim: int, is_spread: bool) -> PartitionSpec:
    """Returns how a weight is divided: [layer, in, out] stacked, [out, in] spread, [layer, out] a bias."""
    if name in BY_VOCABULARY:
        return PartitionSpec(ALL)
    if name in BY_OUTPUT:
        axis = 0 if is_spread else ndim - 1
    elif name in SUMMED:
        axis = 1 if is_spread else ndim - 2
    else:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, ALL)


def _name(path: tuple[Any, ...]) -> str:
    """Returns the name of the weight that a path of the module's tree leads to."""
    keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return next(key for key in keys if key not in ("layers", "matrices"))
