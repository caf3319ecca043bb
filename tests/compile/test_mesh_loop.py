"""The generation loop divided over four devices, compiled by the real compilers: what is sent, and what is copied.

Each device must keep its part of the pool in place, run the platform's own kernels on it, and send what `jaxkv.mesh` says:
activations and logits, nothing that grows with the pool or with a sequence.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import pytest
from compile import cuda_target, tpu_target
from compile.whole_loop import SMALL_VOCAB, Loop, decode_state, make_loop, skip_without
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv import decode_loop
from jaxkv.device_bytes import tpu_pool_bytes
from jaxkv.mesh import device_config, make_mesh, spmd, state_specs
from models.qwen.sharding import divide, weight_specs

pytestmark = [
    pytest.mark.compile,
    # JAX 0.11 says at every lowering that its Triton backend will go; see test_cuda_triton.py.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

POOL_BYTES = {"v5e": 2**30, "sm_90": 2**34}
# XLA:GPU copies a layer's largest matrices out of their stacks (see test_generation_loop.py): 50 MB of a quarter of Qwen3-8B.
MOST_TEMP = {"v5e": 0.01, "sm_90": 0.02}
KERNELS = {"v5e": "tpu_custom_call", "sm_90": "__gpu$xla.gpu.triton"}


def devices_of(target: str) -> Any:
    """Returns four devices of a target that is not there."""
    if target in tpu_target.CHIPS:
        return tpu_target.devices(tpu_target.CHIPS[target])
    return cuda_target.topology(cuda_target.TARGETS[target], 4).devices


def on_mesh(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Returns the shapes of a pytree, placed on the mesh."""

    def place(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree, specs)


def compile_on(mesh: Mesh, loop: Loop) -> Any:
    """Returns the loop's program for the devices of a mesh."""
    model = jax.eval_shape(lambda model: divide(model, mesh), loop.model)
    model = on_mesh(mesh, model, weight_specs(model))
    local = device_config(loop.config, mesh)
    init = functools.partial(decode_state, local)
    specs = state_specs(jax.eval_shape(spmd(init, mesh, (model,), PartitionSpec()), model))
    state = on_mesh(mesh, jax.eval_shape(spmd(init, mesh, (model,), specs), model), specs)
    steps = on_mesh(mesh, loop.steps, PartitionSpec())
    args = model, state, steps
    step = spmd(functools.partial(decode_loop.decode, local), mesh, args, specs)
    lowered = jax.jit(step, donate_argnums=1).lower(*args)
    return lowered.compile({"xla_backend_optimization_level": 3})


@pytest.mark.parametrize("target", ["v5e", "sm_90"])
@pytest.mark.parametrize(("name", "heads", "rows"), [("qwen3_8b", 4, 1), ("qwen2.5_0.5b", 2, 2)])
def test_loop_on_four_devices_is_in_place_and_sends_no_kv(
    name: str, heads: int, rows: int, target: str
) -> None:
    skip_without(target)
    loop = make_loop(name, SMALL_VOCAB, POOL_BYTES[target])
    mesh = make_mesh(heads, rows, devices_of(target))
    layout = device_config(loop.config, mesh).layout
    compiled = compile_on(mesh, loop)
    pool = tpu_pool_bytes(layout.shape, 16) if target == "v5e" else layout.nbytes
    assert pool <= 1.05 * loop.config.layout.nbytes / heads
    memory = compiled.memory_analysis()
    assert pool <= memory.alias_size_in_bytes <= pool + 2**20
    assert memory.temp_size_in_bytes <= MOST_TEMP[target] * layout.nbytes + loop.logits_bytes
    text = compiled.as_text()
    sent = re.findall(r" (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", text)
    sums = [
        name for name in sent if "reduce" in name
    ]  # XLA:TPU sums and slices where CUDA has a reduce-scatter
    assert (len(sums), sorted(set(sent) - set(sums))) == (2 + rows, ["all-gather"])
    assert sent.count("all-gather") == rows
    assert KERNELS[target] in text
