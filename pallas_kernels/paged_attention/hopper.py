"""Paged attention for Hopper GPUs: the entry point, its launch, and the merge of splits.

The body of the kernel is in hopper_kernel.py, its sizes in hopper_plan.py, the reading of sealed blocks in hopper_codes.py.

Invariants:
  * One launch, and with splits one elementwise kernel of XLA's that merges them; no pool is copied.
  * What the kernel cannot do raises before anything is traced.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.paged_attention.hopper_codes import CodeTiles, code_operands, code_scratch
from pallas_kernels.paged_attention.hopper_kernel import (
    Refs,
    Tiles,
    attend,
    fetch_tiles,
    find_work,
    plgpu,
)
from pallas_kernels.paged_attention.hopper_plan import CodePlan, make_code_plan, make_plan
from pallas_kernels.sealed import SealedStore


def combine(out: Array, lse: Array) -> tuple[Array, Array]:
    """Merges partial attention over the leading split axis, elementwise and split by split.

    Args:
      out, lse: f32[split, ...], of one shape.
    """
    parts = range(lse.shape[0])
    peak = lse[0]
    for s in parts:
        peak = jnp.maximum(peak, lse[s])
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = [jnp.exp(lse[s] - peak) for s in parts]
    total = sum(weights[1:], weights[0])
    safe = jnp.where(total > 0, total, 1.0)
    merged = sum(weights[s] * out[s] for s in parts) / safe
    return merged, jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)


def paged_attention_hopper(
    q: Array,
    store: KVStore | SealedStore,
    layer: Array | int,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None,
    window: Array | int | None,
    interpret: Any = False,
    splits: int | None = None,
) -> tuple[Array, Array]:
    """Returns (out q.dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]); see spec.py.

    Args:
      q, store, layer, view, scale, soft_cap, window: as in `paged_attention`.
      interpret: parameters of the Mosaic GPU interpreter; False compiles.
      splits: parts the sequence is cut into; None chooses.

    Raises:
      NotImplementedError: what this kernel does not do; the message names what is supported.
    """
    if plgpu is None:
        raise NotImplementedError("hopper: needs a jaxlib with jax.experimental.pallas.mosaic_gpu")
    max_blocks = view.block_tables.shape[1]
    if isinstance(store, SealedStore):
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"hopper: q: supported are bfloat16, float16; got {q.dtype}")
        plan = make_code_plan(store.layout, q.shape, max_blocks, splits)
        pool = code_operands(store)
    else:
        dtype = store.layout.format.dtype
        if q.dtype != dtype:
            raise NotImplementedError(f"hopper: q: supported is {dtype}, got {q.dtype}")
        plan = make_plan(store.layout, q.shape, max_blocks, splits)
        kv = store.kv if store.kv.dtype == dtype else lax.bitcast_convert_type(store.kv, dtype)
        pool = {"kv": kv.reshape(-1, plan.block_size, 2 * plan.head_dim)}
    rows, query_len, num_q_heads, head_dim = q.shape
    flat_q = q.reshape(-1, head_dim)
    flat_q = jnp.pad(flat_q, ((0, max(0, plan.head_columns - flat_q.shape[0])), (0, 0)))
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "scale": jnp.asarray(scale, jnp.float32).reshape(1),
        "tables": view.block_tables,
        "kv_lens": view.kv_lens,
        "q_lens": view.q_lens,
        "q": flat_q,
        **pool,
    }
    if soft_cap is not None:
        inputs["soft_cap"] = jnp.asarray(soft_cap, jnp.float32).reshape(1)
    if window is not None:
        inputs["window"] = jnp.asarray(window, jnp.int32).reshape(1)
    out_shape = (plan.splits, rows * query_len * num_q_heads, plan.value_width)
    if plan.splits == 1:
        out_dtype, lse_tile = q.dtype, (plan.columns,)
        lse_shape = (1, rows, plan.num_kv_heads, plan.query_tiles, plan.columns)
    else:
        out_dtype, lse_tile, lse_shape = jnp.float32, (plan.columns, plan.value_width), out_shape
    outputs = {
        "out": jax.ShapeDtypeStruct(out_shape, out_dtype),
        "lse": jax.ShapeDtypeStruct(lse_shape, jnp.float32),
    }
    tiled = (plgpu.TilingTransform((8, plan.swizzle // 2)), plgpu.SwizzleTransform(plan.swizzle))
    is_codes = isinstance(plan, CodePlan)
    groups = plan.codes.num_value_groups if is_codes else 1
    ring = (plan.stages, plan.tile, 2 * head_dim)
    scratch = {
        "q_smem": plgpu.SMEM((plan.columns, head_dim), q.dtype, transforms=tiled),
        **(
            code_scratch(plan, tiled)
            if is_codes
            else {"kv_smem": plgpu.SMEM(ring, plan.dtype, transforms=tiled)}
        ),
        "p_smem": plgpu.SMEM((groups * plan.columns, plan.tile), plan.dtype, transforms=tiled),
        "o_smem": plgpu.SMEM((plan.columns, plan.value_width), out_dtype),
        "lse_smem": plgpu.SMEM(lse_tile, jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=plan.query_tile),
        "full": plgpu.Barrier(num_arrivals=plan.copies, num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
    }

    def paged_attention_hopper_kernel(*args):
        refs = Refs(**dict(zip((*inputs, *outputs, *scratch), args, strict=True)))
        work = find_work(plan, refs)
        tiles = (CodeTiles if is_codes else Tiles)(plan, refs, work)
        pl.when(lax.axis_index("warpgroup") == 0)(lambda: attend(plan, refs, work, tiles))
        pl.when(lax.axis_index("warpgroup") == 1)(lambda: fetch_tiles(plan, refs, work, tiles))

    out, lse = plgpu.kernel(
        paged_attention_hopper_kernel,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(scratch.values()),
        # Lane semantics, the default of jax 0.10: 0.11.2 infers layouts instead, and finds none for these casts.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        grid=(plan.num_kv_heads, plan.query_tiles * plan.splits, rows),
        grid_names=("head", "part", "row"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret or None,
    )(*inputs.values())
    out = out[..., plan.value_width - head_dim :]
    if plan.splits > 1:
        out, lse = combine(out, lse[..., plan.value_width - head_dim :])
        return out.astype(q.dtype).reshape(q.shape), lse[:, 0].reshape(q.shape[:3])
    lse = lse.reshape(rows, plan.num_kv_heads, -1, plan.head_columns)
    lse = lse[:, :, :query_len, : plan.group].transpose(0, 2, 1, 3)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
