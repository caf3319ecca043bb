"""The Mosaic GPU interpreter of JAX 0.10.2, taught the five things the Hopper kernel needs from it.

What the stock interpreter lacks, and what stands in for it here:
  * `layout_cast` has no rule on CPU: a layout says where a value lives, not what it is, so the identity.
  * a wgmma operand seen through `transpose_ref`: read the buffer, then transpose.  (Both products of the
    kernel need one: q^T and V^T, P^T.  No formulation of attention avoids all of them.)  The read also
    takes part in race detection, which the stock rule leaves out.
  * a load or store through `transpose_ref`: load, then transpose; transpose, then store.
  * every thread of every grid point is compiled afresh: compile once for all of them.

The rest (TMA copies, barriers with their phases, grid, warpgroups, SMEM filled with NaN) is stock.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from jax.experimental import pallas as pl

try:
    from jax._src.interpreters import mlir
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic.interpret import utils as ranges
    from jax._src.pallas.mosaic_gpu import core as gpu_core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax._src.state.types import TransposeTransform
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:
    pytest.skip(f"no Mosaic GPU interpreter as jax 0.10.2 has it: {error}", allow_module_level=True)

mlir.register_lowering(gpu_core.layout_cast_p, lambda ctx, x, **_: [x], platform="cpu")


def _split_transpose(transforms: Any) -> tuple[tuple[Any, ...], bool]:
    transforms = tuple(transforms)
    if transforms and isinstance(transforms[-1], TransposeTransform):
        assert transforms[-1].permutation == (1, 0)
        return transforms[:-1], True
    return transforms, False


def _read(memory, device, thread, key, transforms, source_info=None) -> np.ndarray:
    """Reads a wgmma operand as float32 and reports the read to the race detector."""
    transforms, transposed = _split_transpose(transforms)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    where = ranges.to_range(transforms)
    value, _, clock = memory.get_buffer_content(
        key, where, memory.get_global_thread_id(device, thread)
    )
    if memory.detect_races:
        gpu_callbacks.get_races().check_read(
            device, thread, clock, key, where, source_info=source_info
        )
    value = np.asarray(value, np.float32)
    return value.T if transposed else value


def _wgmma(
    *,
    token,
    device_id,
    thread_id,
    acc_allocation_key_as_array,
    acc_transforms,
    a_allocation_key_as_array,
    a_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info=None,
    **_,
):
    assert not acc_transforms
    memory = gpu_callbacks._get_shared_memory()
    device, thread = int(device_id), int(thread_id)
    a = _read(memory, device, thread, a_allocation_key_as_array, a_transforms, source_info)
    b = _read(memory, device, thread, b_allocation_key_as_array, b_transforms, source_info)
    key = gpu_callbacks.HostAllocationKey.from_array(acc_allocation_key_as_array)
    global_thread = memory.get_global_thread_id(device, thread)
    acc, _, _ = memory.get_buffer_content(key, (), global_thread)
    with np.errstate(invalid="ignore"):  # columns and keys that nobody uses may hold anything
        memory.store_buffer_content(key, (), acc + a @ b, global_thread)
    return token


def _make_get(stock):
    def get(
        token, device_id, grid_point_coords, thread_id, allocation_key_as_array, transforms,
        *args, **kwargs,
    ):  # fmt: skip
        transforms, transposed = _split_transpose(transforms)
        token, value = stock(
            token, device_id, grid_point_coords, thread_id, allocation_key_as_array, transforms,
            *args, **kwargs,
        )  # fmt: skip
        return token, value.T if transposed else value

    return get


def _make_swap(stock):
    def swap(
        token, device_id, grid_point_coords, thread_id, allocation_key_as_array, transforms, val,
        mask, **kwargs,
    ):  # fmt: skip
        transforms, transposed = _split_transpose(transforms)
        val = val.T if transposed else val
        token, old = stock(
            token, device_id, grid_point_coords, thread_id, allocation_key_as_array, transforms,
            val, mask, **kwargs,
        )  # fmt: skip
        return token, old.T if transposed else old

    return swap


def _make_run_jaxpr():
    lock, programs = threading.Lock(), {}

    def run_jaxpr(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in programs:
                run = functools.partial(jax.core.eval_jaxpr, jaxpr)
                compiled = jax.jit(run).lower(consts, *args).compile(FAST_INTERPRET)
                programs[id(jaxpr)] = jaxpr, compiled  # the jaxpr stays alive: its id stays its own
        programs[id(jaxpr)][1](consts, *args)

    return run_jaxpr


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields a maker of interpreter parameters, with the interpreter taught for the test's duration."""
    monkeypatch.setattr(gpu_callbacks, "wgmma", _wgmma)
    monkeypatch.setattr(gpu_callbacks, "_get", _make_get(gpu_callbacks._get))
    monkeypatch.setattr(gpu_callbacks, "_swap", _make_swap(gpu_callbacks._swap))
    monkeypatch.setattr(thread_map, "_run_jaxpr", _make_run_jaxpr())
    yield InterpretGPUParams
    gpu_callbacks.reset_gpu_interpret_mode_state()


TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def _run(interpreter, body, shape, *inputs):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=(
            *(plgpu.SMEM(x.shape, x.dtype, transforms=TILED) for x in inputs),
            plgpu.SMEM(shape, jnp.float32),
            plgpu.Barrier(num_arrivals=len(inputs)),
        ),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpreter(),
    )(*inputs)


@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_wgmma_of_transposed_refs_equals_numpy(interpreter, transpose_a, transpose_b):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 128)), rng.standard_normal((128, 64))
    a, b = (a.T if transpose_a else a), (b.T if transpose_b else b)
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in (a, b))

    def body(a_gmem, b_gmem, out, a_smem, b_smem, out_smem, ready):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, ready)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, ready)
        plgpu.barrier_wait(ready)
        left = plgpu.transpose_ref(a_smem, (1, 0)) if transpose_a else a_smem
        right = plgpu.transpose_ref(b_smem, (1, 0)) if transpose_b else b_smem

        def multiply(acc):
            plgpu.wgmma(acc, left, right)
            return acc[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))
        plgpu.copy_smem_to_gmem(out_smem, out)

    got = _run(interpreter, body, (64, 64), a, b)
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    expected = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_loads_and_stores_through_transposed_refs_transpose(interpreter):
    a = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64).astype(jnp.bfloat16)

    def body(a_gmem, out, a_smem, out_smem, ready):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, ready)
        plgpu.barrier_wait(ready)
        part = plgpu.transpose_ref(a_smem.at[pl.ds(32, 32)], (1, 0))[...]  # [64, 32]
        out_smem[pl.ds(0, 32)] = a_smem[pl.ds(0, 32)].astype(jnp.float32)
        plgpu.transpose_ref(out_smem.at[pl.ds(32, 32)], (1, 0))[...] = part.astype(jnp.float32) + 1
        plgpu.copy_smem_to_gmem(out_smem, out)

    got = _run(interpreter, body, (64, 64), a)
    expected = np.asarray(a, np.float32)
    expected[32:] += 1
    np.testing.assert_array_equal(got, expected)
