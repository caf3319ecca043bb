"""A Qwen divided over the devices of a mesh (`jaxkv.mesh`): tensor parallelism.

What each device holds of a layer, on a mesh of `heads` x `rows` devices::

    q_proj, k_proj, v_proj (biases)   the columns of its heads        |  o_proj      the rows of its heads     -> sum
    gate_proj, up_proj                an equal part of the columns    |  down_proj   the same part of the rows -> sum
    embed, lm_head                    an equal part of the vocabulary (filled up with zeros)                   -> sum, gather
    norms, o_bias                     everything

Devices along "rows" hold the same heads; the MLP and the vocabulary are divided by all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.mesh import HEADS, ROWS
from models.qwen.config import QwenConfig
from models.qwen.modeling import Array, Qwen

ALL = (HEADS, ROWS)
# Along which axes the outputs of a matrix are divided, or its inputs.
BY_OUTPUT: dict[str, Any] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), HEADS)
BY_OUTPUT |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), HEADS)
BY_OUTPUT |= dict.fromkeys(("gate_proj", "up_proj"), ALL)
BY_INPUT: dict[str, Any] = {"o_proj": HEADS, "down_proj": ALL}
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
        ("intermediate_size", config.intermediate_size, mesh.size),
    ):
        if size % parts:
            raise ValueError(f"{name}: expected a multiple of {parts} for this mesh, got {size}")


def _spec(name: str, ndim: int, is_spread: bool) -> PartitionSpec:
    """Returns how a weight is divided: [layer, in, out] stacked, [out, in] spread, [layer, out] a bias."""
    if name in BY_VOCABULARY:
        return PartitionSpec(ALL)
    if name in BY_OUTPUT:
        axis, parts = (0 if is_spread else ndim - 1), BY_OUTPUT[name]
    elif name in BY_INPUT:
        axis, parts = (1 if is_spread else ndim - 2), BY_INPUT[name]
    else:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, parts)


def _name(path: tuple[Any, ...]) -> str:
    """Returns the name of the weight that a path of the module's tree leads to."""
    keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return next(key for key in keys if key not in ("layers", "matrices"))
