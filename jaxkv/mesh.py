"""Several devices run one program: each holds its part of the bytes, all of them keep the same books.

A mesh has two axes.  Devices along "heads" hold different K/V heads.  Devices along "rows" hold the same heads, where there
are fewer of them than devices or they do not divide; these share the reading: each attends for part of the rows (see
`pallas_kernels.cached_attention`).

    3 K/V heads, 2 devices      heads 1 x rows 2     both hold all heads, each reads for half of the tokens
    8 K/V heads, 4 devices      heads 4 x rows 1     2 heads each
    2 K/V heads, 4 devices      heads 2 x rows 2     1 head each, twice

Tables, ref-counts, the prefix index and what was sampled are computed by every device from the same numbers, so nothing
about blocks is ever sent: a program is the one-device program under `jax.shard_map`, and only the model adds up.  What
decides, the logits, is gathered from all devices, so all of them decide alike.

Invariants:
  * Computation follows the weights: a model whose arrays lie on such a mesh runs on it, any other as JAX places it.
  * Static descriptions (`CacheConfig`, layouts) inside a program, and those of a state that lies on a mesh, are those of one
    device; the arrays of the state span the mesh.

Reference: Shoeybi et al. 2019, "Megatron-LM" (a layer divided over devices with two sums).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.config import CacheConfig
from pallas_kernels.layout import KVStore
from pallas_kernels.sealed import SealedStore

HEADS, ROWS = "heads", "rows"
State = TypeVar("State")


def make_mesh(
    num_head_shards: int, num_row_shards: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh with the axes "heads" and "rows".

    Args:
      num_head_shards: parts the K/V heads are divided into; must divide the model's.
      num_row_shards: devices that hold the same heads.
      devices: as many as the product, or more (the first are taken); None: `jax.devices()`.

    Raises:
      ValueError: a size below 1, or too few devices.
    """
    devices = jax.devices() if devices is None else devices
    for name, size in (("num_head_shards", num_head_shards), ("num_row_shards", num_row_shards)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    count = num_head_shards * num_row_shards
    if len(devices) < count:
        raise ValueError(
            f"devices: expected at least {num_head_shards} * {num_row_shards}, got {len(devices)}"
        )
    grid = np.array(devices[:count]).reshape(num_head_shards, num_row_shards)
    return Mesh(grid, (HEADS, ROWS))


def mesh_shape(num_kv_heads: int, num_devices: int) -> tuple[int, int]:
    """Returns (num_head_shards, num_row_shards) for so many devices: heads are divided as far as they go."""
    heads = math.gcd(num_kv_heads, num_devices)
    return heads, num_devices // heads


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh with the axes "heads" and "rows" that a pytree's arrays lie on; None if they lie on none.

    Raises:
      ValueError: some lie on it and some do not, or on two.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    meshes = [
        s.mesh
        for s in shardings
        if isinstance(s, NamedSharding) and s.mesh.axis_names == (HEADS, ROWS)
    ]
    if not meshes:
        return None
    if len(meshes) < len(shardings) or len(set(meshes)) > 1:
        raise ValueError(
            f"weights: expected all {len(shardings)} arrays on one mesh, got {len(meshes)} on {len(set(meshes))}"
        )
    mesh = meshes[0]
    assert isinstance(mesh, Mesh)
    return mesh


def num_row_shards(mesh: Mesh | None) -> int:
    """Returns the devices that hold the same heads, so the copies of the pool; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[ROWS]


def device_heads(num_kv_heads: int, mesh: Mesh | None) -> int:
    """Returns how many of so many K/V heads one device holds; all of them without a mesh.

    Raises:
      ValueError: they do not divide.
    """
    shards = 1 if mesh is None else mesh.shape[HEADS]
    if num_kv_heads % shards:
        raise ValueError(
            f"num_kv_heads: expected a multiple of the mesh's {shards} head shards, got {num_kv_heads}"
        )
    return num_kv_heads // shards


def device_config(config: CacheConfig, mesh: Mesh | None) -> CacheConfig:
    """Returns the cache that one device holds: its share of the K/V heads, everything else whole.

    Raises:
      ValueError: the heads do not divide.
    """
    return dataclasses.replace(config, num_kv_heads=device_heads(config.num_kv_heads, mesh))


def specs_of(tree: Any) -> Any:
    """Returns how each array of a pytree lies on its mesh; arrays that lie on none count as repeated."""

    def spec(leaf: Any) -> PartitionSpec:
        sharding = getattr(leaf, "sharding", None)
        return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()

    return jax.tree.map(spec, tree)


def state_specs(state: Any) -> Any:
    """Returns how a state that keeps stores is to lie on a mesh: bytes by heads, everything else repeated."""
    by_head = PartitionSpec(None, None, HEADS)
    affine = PartitionSpec(None, None, None, HEADS)
    plain: dict[str, Any] = {"kv": by_head}
    sealed: dict[str, Any] = {"codes": by_head, "key_affine": affine, "value_affine": affine}

    def specs(node: Any) -> Any:
        if isinstance(node, KVStore):
            return dataclasses.replace(node, **plain)
        if isinstance(node, SealedStore):
            return dataclasses.replace(node, **sealed)
        return PartitionSpec()

    return jax.tree.map(specs, state, is_leaf=lambda x: isinstance(x, KVStore | SealedStore))


def spmd(
    function: Callable[..., Any], mesh: Mesh | None, args: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """Returns a function that runs `function` on every device of a mesh with its part of the arguments.

    Args:
      function: of one device; its collectives name the axes "heads" and "rows".
      mesh: None returns the function itself.
      args: the arguments, whose arrays lie where they will lie in every call.
      out_specs: a pytree of `PartitionSpec`, or a prefix of one.
    """
    if mesh is None:
        return function
    in_specs = tuple(specs_of(arg) for arg in args)
    # Not checked by JAX: that what counts as repeated is the same on every device follows from the module's first lines.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def init_on(mesh: Mesh | None, init: Callable[..., State], *args: Any) -> State:
    """Returns init(*args), a state that keeps stores, made on the devices themselves: no device holds it whole first."""
    if mesh is None:
        return init(*args)
    shape = jax.eval_shape(spmd(init, mesh, args, PartitionSpec()), *args)
    state: State = jax.jit(spmd(init, mesh, args, state_specs(shape)))(*args)
    return state
