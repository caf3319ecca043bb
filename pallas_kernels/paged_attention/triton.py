"""Paged attention for CUDA devices of compute capability 8.0 and later (Pallas, Triton backend).

Two launches.  The first splits the keys of every (row, kv head, tile of queries) over `num_splits` programs, each with
its own running softmax; the second joins the parts.  With one split the first writes the result and there is no second::

    row 3, kv_head 1                 tile: query_rows x head_dim, packed as q_pos * group + head in group
      keys  0 ......... kv_len       |q0 h0|q0 h1|q0 h2|q0 h3|q1 h0| ...                (16 rows at least)
           |  split 0  |  split 1  |  split 2  |
             64 keys a step: ids = table[key // block_size]  ->  kv[layer, ids, kv_head, key % block_size, :]
                |                                                     K half -> scores, V half -> out
                +-- part[split, row, q_pos, q_head, :], part_lse[split, row, q_pos, q_head]
                                          |
                                     _combine: out, lse

Invariants:
  * Loop bounds come from kv_len, q_len and window; keys outside them are never loaded, so their slots may hold NaN
    and their table entries anything.  Entries that are used are clamped into the pool.
  * Which keys a split gets depends on lengths alone, never on block ids: permuted pools give the same bits.
  * Every (row, q_pos, q_head) of the output is written by exactly one program, padding included.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layout import Array, BatchView, KVLayout, KVStore
from pallas_kernels.paged_attention.triton_codes import (
    CodePlan,
    attend_codes,
    check_codes,
    choose_code_tiling,
    code_operands,
)
from pallas_kernels.paged_attention.triton_ops import KNOBS, LN2, LOG2E, dot, read_knob, spread
from pallas_kernels.paged_attention.triton_plan import (
    Plan,
    Tiling,
    choose_tiling,
    power_of_two,
    terms_of,
)
from pallas_kernels.sealed import SealedStore

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_HEAD_DIM = 256


def paged_attention_triton(
    q: Array,
    store: KVStore | SealedStore,
    layer: Array,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None,
    window: Array | int | None,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Array, Array]:
    """Returns (out q.dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]); see spec.py.

    Args:
      q, store, layer, view, scale, soft_cap, window: see `paged_attention`.
      interpret: run the kernels in the Pallas interpreter (any platform, slow).
      tiling: overrides `choose_tiling`.

    Raises:
      NotImplementedError: a dtype or head_dim the kernels do not support; the message says what they do.
    """
    _check_supported(q, store)
    layout = store.layout
    rows, query_len, num_q_heads, _ = q.shape
    max_keys = view.block_tables.shape[1] * layout.block_size
    body, operands, plan = _prepare(q, store, max_keys, tiling, window is not None)
    tiling = plan.tiling
    # Python numbers become constants of the kernel; traced ones are operands, read where they are used.
    knobs = {"scale": scale, "soft_cap": soft_cap, "window": window}
    constants: dict[str, Any] = {name: None for name, x in knobs.items() if x is None}
    constants |= {
        name: KNOBS[name][0](x) for name, x in knobs.items() if isinstance(x, numbers.Number)
    }
    traced = {
        name: jnp.asarray(x).reshape(()) for name, x in knobs.items() if name not in constants
    }

    split = tiling.num_splits > 1
    prefix = (tiling.num_splits,) if split else ()
    call = functools.partial(pl.pallas_call, interpret=interpret)
    out, lse = call(
        functools.partial(body, plan=plan, constants=constants, names=tuple(traced)),
        grid=(plan.num_tiles * layout.num_kv_heads, tiling.num_splits, rows),
        out_shape=(
            jax.ShapeDtypeStruct(prefix + q.shape, jnp.float32 if split else q.dtype),
            jax.ShapeDtypeStruct(prefix + q.shape[:-1], jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        name="paged_attention",
    )(q, *operands, jnp.asarray(layer, jnp.int32).reshape(()), view.block_tables, view.kv_lens, view.q_lens,
      *traced.values())  # fmt: skip
    if not split:
        return out, lse

    items = plan.combine_items
    return call(
        functools.partial(_combine, plan=plan, constants=constants),
        grid=(pl.cdiv(query_len * num_q_heads, items), rows),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if plan.combine_elements > 8192 else 4, num_stages=1
        ),
        name="paged_attention_combine",
    )(out, lse, view.kv_lens, view.q_lens, *([traced["window"]] if "window" in traced else []))


def _prepare(
    q: Array, store: KVStore | SealedStore, max_keys: int, tiling: Tiling | None, windowed: bool
) -> tuple[Callable[..., None], tuple[Array, ...], Plan]:
    """Returns the body of the first launch, its operands between q and layer, and the plan."""
    layout = store.layout
    group = q.shape[2] // layout.num_kv_heads
    sizes = (group, layout.num_kv_heads, q.shape[1], q.shape[3], max_keys, windowed)
    if isinstance(store, SealedStore):
        tiling = tiling or choose_code_tiling(q.shape, q.dtype, store.layout, max_keys)
        return attend_codes, code_operands(store), CodePlan(tiling, *sizes, store.layout)
    tiling = tiling or choose_tiling(q.shape, q.dtype, store.layout, max_keys)
    return functools.partial(_attend, layout=store.layout), (store.kv,), Plan(tiling, *sizes)


def _check_supported(q: Array, store: KVStore | SealedStore) -> None:
    """Raises NotImplementedError for what the kernels cannot do."""
    dtypes = [("q", q.dtype)]
    if isinstance(store, SealedStore):
        check_codes(store.layout)
    else:
        dtypes.append(("store", store.layout.format.dtype))
    for name, dtype in dtypes:
        if dtype not in _FLOATS:
            raise NotImplementedError(
                f"triton paged attention supports float32, bfloat16 and float16, got {name} of {dtype}"
            )
    if q.shape[-1] > _MAX_HEAD_DIM:
        raise NotImplementedError(
            f"triton paged attention supports head_dim up to {_MAX_HEAD_DIM}, got {q.shape[-1]}"
        )


def _attend(
    # in
    q_ref: Any,  # q_dtype[row, q_pos, q_head, head_dim]
    kv_ref: Any,  # layout.dtype[layer, block, kv_head, slot, 2 * head_dim]
    layer_ref: Any,  # i32[]
    tables_ref: Any,  # i32[row, column]
    kv_lens_ref: Any,  # i32[row]
    q_lens_ref: Any,  # i32[row]
    # in: traced knobs, then out
    *refs: Any,  # names of [], out [(split,) row, q_pos, q_head, head_dim], lse [(split,) row, q_pos, q_head]
    plan: Plan,
    layout: KVLayout,
    constants: dict[str, Any],
    names: tuple[str, ...],
) -> None:
    """One split of one tile of queries of one kv head of one row."""
    *knob_refs, out_ref, lse_ref = refs
    knobs = constants | {name: read_knob(name, r) for name, r in zip(names, knob_refs, strict=True)}
    scale, soft_cap, window = (knobs[name] for name in KNOBS)
    tiling, head_dim, width = plan.tiling, plan.head_dim, plan.width
    kv_head, tile = pl.program_id(0) // plan.num_tiles, pl.program_id(0) % plan.num_tiles
    split, row = pl.program_id(1), pl.program_id(2)

    layer = layer_ref[...]
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]
    first, end = plan.key_range(tile, kv_len, q_len, window)
    first_step, end_step, steps = plan.steps(first, end)
    low = first_step + split * steps
    high = jnp.minimum(low + steps, end_step)

    packed = tile * tiling.query_rows + jnp.arange(tiling.query_rows, dtype=jnp.int32)
    query = packed // plan.group  # [query_rows]
    head = kv_head * plan.group + packed % plan.group  # [query_rows]
    inside = query < plan.query_len
    # Padding queries sit at -1, where they see nothing.
    query_pos = jnp.where(query < q_len, kv_len - q_len + query, -1)[:, None]
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    real = columns < head_dim
    query_index = (row, *spread((query[:, None], head[:, None], columns)))
    q = plgpu.load(q_ref.at[query_index], mask=(query_pos >= 0) & real, other=0.0)
    terms = terms_of(q.dtype, layout.format.dtype)
    q = q if terms == 1 else q.astype(jnp.float32)

    def half(position: Array, block: Array, live: Array, offset: int) -> Array:
        """K (offset 0) or V (offset head_dim) of the keys, zeros where not live: [keys, width]."""
        index = spread((block[:, None], (position % layout.block_size)[:, None], columns + offset))
        x = plgpu.load(
            kv_ref.at[layer, index[0], kv_head, index[1], index[2]],
            mask=live[:, None] & real,
            other=0,
        )
        if layout.dtype != layout.format.dtype:
            x = lax.bitcast_convert_type(x, layout.format.dtype)
        return x

    def step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, acc = (
            carry  # base-2 logarithm of the largest weight, sum of weights, weighted V
        )
        position = index * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
        live = (position >= first) & (position < end)
        block = plgpu.load(tables_ref.at[row, position // layout.block_size], mask=live, other=0)
        block = jnp.clip(block, 0, layout.num_blocks - 1)
        k = half(position, block, live, 0)
        s = dot(q, k, 1, terms) * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        seen = live[None, :] & (position[None, :] <= query_pos)
        if window is not None:
            seen &= position[None, :] > query_pos - window
        s = jnp.where(seen, s * LOG2E, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(s, axis=1))
        safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp2(s - safe[:, None])
        shrink = jnp.exp2(peak - safe)
        v = half(position, block, live, head_dim)
        acc = acc * shrink[:, None] + dot(weights, v, 0, terms)
        return new_peak, total * shrink + jnp.sum(weights, axis=1), acc

    peak = jnp.full((tiling.query_rows,), -jnp.inf, jnp.float32)
    total = jnp.zeros((tiling.query_rows,), jnp.float32)
    acc = jnp.zeros((tiling.query_rows, width), jnp.float32)
    peak, total, acc = lax.fori_loop(low, high, step, (peak, total, acc))

    some = total > 0
    safe_total = jnp.where(some, total, 1.0)
    out = acc / safe_total[:, None]
    lse = jnp.where(some, (peak + jnp.log2(safe_total)) * LN2, -jnp.inf)
    # An idle split writes nothing (the combine does not read it); a lone one writes its zeros.
    written = inside & ((low < high) | (tiling.num_splits == 1))
    at = (split,) if tiling.num_splits > 1 else ()
    plgpu.store(
        out_ref.at[(*at, *query_index)], out.astype(out_ref.dtype), mask=written[:, None] & real
    )
    plgpu.store(lse_ref.at[(*at, row, query, head)], lse, mask=written)


def _combine(
    # in
    part_ref: Any,  # f32[split, row, q_pos, q_head, head_dim]
    part_lse_ref: Any,  # f32[split, row, q_pos, q_head]
    kv_lens_ref: Any,  # i32[row]
    q_lens_ref: Any,  # i32[row]
    # in: window [] if traced, then out
    *refs: Any,  # out q_dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]
    plan: Plan,
    constants: dict[str, Any],
) -> None:
    """Joins the parts of `combine_items` pairs (q_pos, q_head) of one row."""
    *window_ref, out_ref, lse_ref = refs
    window = read_knob("window", window_ref[0]) if window_ref else constants["window"]
    items, row = plan.combine_items, pl.program_id(1)
    num_q_heads = plan.group * plan.num_kv_heads
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]

    item = pl.program_id(0) * items + jnp.arange(items, dtype=jnp.int32)
    inside = item < plan.query_len * num_q_heads
    query, head = item // num_q_heads, item % num_q_heads
    tile = (query * plan.group + head % plan.group) // plan.tiling.query_rows
    first_step, end_step, steps = plan.steps(*plan.key_range(tile, kv_len, q_len, window))

    split = jnp.arange(power_of_two(plan.tiling.num_splits), dtype=jnp.int32)[:, None]
    used = split * steps[None, :] < (end_step - first_step)[None, :]
    used &= (split < plan.tiling.num_splits) & inside[None, :]
    index = spread((split, query[None, :], head[None, :]))
    lse = plgpu.load(
        part_lse_ref.at[index[0], row, index[1], index[2]], mask=used, other=-jnp.inf
    )  # [split, item]
    peak = jnp.max(lse, axis=0)
    safe = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp2((lse - safe[None, :]) * LOG2E)
    total = jnp.sum(weights, axis=0)
    some = total > 0
    safe_total = jnp.where(some, total, 1.0)

    columns = jnp.arange(plan.width, dtype=jnp.int32)
    real = columns < plan.head_dim
    index = spread(
        (split[:, :, None], query[None, :, None], head[None, :, None], columns[None, None, :])
    )
    part = plgpu.load(
        part_ref.at[index[0], row, index[1], index[2], index[3]],
        mask=used[:, :, None] & real[None, None, :],
        other=0.0,
    )
    out = jnp.sum(part * (weights / safe_total[None, :])[:, :, None], axis=0)  # [item, width]
    index = spread((query[:, None], head[:, None], columns[None, :]))
    plgpu.store(
        out_ref.at[(row, *index)], out.astype(out_ref.dtype), mask=inside[:, None] & real[None, :]
    )
    lse = jnp.where(some, safe + jnp.log2(safe_total) * LN2, -jnp.inf)
    plgpu.store(lse_ref.at[row, query, head], lse, mask=inside)
