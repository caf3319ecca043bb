"""Paged attention on TPU (Mosaic)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.paged_attention.tpu_codes import code_kernel
from pallas_kernels.paged_attention.tpu_kernel import kernel
from pallas_kernels.paged_attention.tpu_plan import LANES, VMEM_LIMIT_BYTES, Plan, Tuning, make_plan
from pallas_kernels.sealed import SealedStore


def paged_attention_tpu(
    q: Array,
    store: KVStore | SealedStore,
    layer: Array,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None,
    window: Array | int | None,
    interpret: bool | pltpu.InterpretParams = False,
    tuning: Tuning = Tuning(),  # noqa: B008  (frozen)
) -> tuple[Array, Array]:
    """Returns (out q.dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]); see spec.py.

    Args:
      q, store, layer, view, scale, soft_cap, window: as in `paged_attention`.
      interpret: False, or how to interpret the kernel on another platform.
      tuning: limits on tiles and chunks.

    Raises:
      NotImplementedError: the target cannot do this; the message says what it can.
    """
    rows, query_len, num_q_heads, _ = q.shape
    plan = make_plan(q.shape, q.dtype, store.layout, view.block_tables.shape[1], tuning)
    most = plan.max_blocks * plan.block_size
    window_now = 1 if window is None else jnp.clip(window, 1, most)
    soft_cap_now = 1.0 if soft_cap is None else soft_cap
    call = _call(plan, q.dtype, store, soft_cap is not None, window is not None, interpret)
    out, lse = call(
        jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, window_now)]),
        view.kv_lens,
        view.q_lens,
        _table_operand(plan, view.block_tables),
        jnp.stack([jnp.asarray(x, jnp.float32) for x in (scale, soft_cap_now)]),
        _to_tiles(plan, q),
        *_pools(store),
    )
    out = _from_tiles(plan, out)[:, :query_len].reshape(q.shape).astype(q.dtype)
    lse = _from_tiles(plan, lse[..., 0, : plan.num_queries, None])[:, :query_len]
    return out, lse.reshape(rows, query_len, num_q_heads)


def _pools(store: KVStore | SealedStore) -> tuple[Array, ...]:
    """Returns the arrays in HBM that a chunk's copies read."""
    if isinstance(store, SealedStore):
        return store.codes, store.key_affine, store.value_affine
    return (store.kv,)


def _table_operand(plan: Plan, tables: Array) -> Array:
    """Returns the table flat, for SMEM, or as i32[row, 1, table_width], for copies of one row.

    Entries past the pool (NO_BLOCK and any other sentinel) become its last block here, once, and not per copy.
    """
    tables = jnp.clip(tables, 0, plan.num_blocks - 1)
    if plan.table_in_smem:
        return tables.reshape(-1)
    return jnp.pad(tables, ((0, 0), (0, plan.table_width - plan.max_blocks)))[:, None]


def _to_tiles(plan: Plan, q: Array) -> Array:
    """Returns q as compute_dtype[row, tile, kv_head, query, key_width], zero past q_pos and head_dim."""
    rows, query_len, _, head_dim = q.shape
    pad_queries = plan.num_tiles * plan.tile_len - query_len
    q = jnp.pad(
        q.astype(plan.compute_dtype),
        ((0, 0), (0, pad_queries), (0, 0), (0, plan.key_width - head_dim)),
    )
    q = q.reshape(
        rows, plan.num_tiles, plan.tile_len, plan.num_kv_heads, plan.group, plan.key_width
    ).transpose(0, 1, 3, 2, 4, 5)
    return q.reshape(rows, plan.num_tiles, plan.num_kv_heads, plan.num_queries, plan.key_width)


def _from_tiles(plan: Plan, x: Array) -> Array:
    """Returns [row, tile, kv_head, query, n] as [row, q_pos, kv_head, group, n], padding included."""
    rows, width = x.shape[0], x.shape[-1]
    x = x.reshape(rows, plan.num_tiles, plan.num_kv_heads, plan.tile_len, plan.group, width)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(rows, -1, plan.num_kv_heads, plan.group, width)


def _call(
    plan: Plan,
    q_dtype,
    store: KVStore | SealedStore,
    has_soft_cap: bool,
    has_window: bool,
    interpret,
):
    """Returns the pallas_call of one plan."""
    rows = plan.num_cores * plan.rows_per_core
    heads, queries = plan.num_kv_heads, plan.num_queries
    pools = _pools(store)
    body = kernel if plan.codes is None else code_kernel
    out_dtype = jnp.float32 if q_dtype == jnp.float16 else q_dtype

    def tile_spec(*shape: int) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec(
            (None, None, *shape),
            lambda core, row, tile, *_: (core * plan.rows_per_core + row, tile, *zeros),
        )

    def per_query(width: int):
        return pltpu.VMEM((heads, queries, width), jnp.float32)

    table_spec = [] if plan.table_in_smem else [pl.BlockSpec(memory_space=pl.ANY)]
    return pl.pallas_call(
        functools.partial(body, plan, has_soft_cap, has_window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 if plan.table_in_smem else 3,
            grid=(plan.num_cores, plan.rows_per_core, plan.num_tiles),
            in_specs=[
                *table_spec,
                pl.BlockSpec(memory_space=pltpu.SMEM),
                tile_spec(heads, queries, plan.key_width),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in pools],
            ],
            out_specs=[
                tile_spec(heads, queries, plan.head_dim),
                tile_spec(heads, 1, plan.lse_width),
            ],
            scratch_shapes=[
                *[pltpu.VMEM((2, plan.chunk_blocks, *x.shape[2:]), x.dtype) for x in pools],
                per_query(LANES),
                per_query(LANES),
                per_query(plan.value_width),
                pltpu.SMEM((3,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((2, 1, plan.table_width), jnp.int32),
                pltpu.SemaphoreType.DMA((1,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, plan.num_tiles, heads, queries, plan.head_dim), out_dtype),
            jax.ShapeDtypeStruct((rows, plan.num_tiles, heads, 1, plan.lse_width), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT_BYTES,
            disable_bounds_checks=True,  # block ids are clamped, lengths bounded by the table
        ),
        interpret=interpret,
        name="paged_attention",
    )
