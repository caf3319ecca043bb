"""Paged attention for Hopper GPUs (Mosaic GPU, sm_90a): TMA ring, wgmma with tokens on the M side.

One thread block serves one (row, kv_head, query tile, split of the sequence) and has two warpgroups::

    HBM                        SMEM                                    registers
    kv[layer, table[.], head] ─TMA→ kv_smem[stage]  [token, K | V]
      producer warpgroup             │ K                                S^T = K q^T      [token, column]
      waits for `empty[stage]`       ├──────── wgmma ─────────────────→ running max and sum over tokens
                                     │          ↑ q_smem [column, head_dim]
                                     │ V                                P^T = exp2(S^T - peak)
                                     │          ┌ p_smem [column, token] ←──────┘
                                     └──────── wgmma ─────────────────→ O^T = V^T P^T    [head_dim, column]
    out, lse ←────TMA──── o_smem, lse_smem ←── O^T / sum ───────────────┘

Tokens (then head_dim) are wgmma's M side, 64 rows of real work; the queries are its N side, which is as
narrow as 8 columns: query heads of one kv head, padded to a multiple of 8, times the query positions of
the tile.  The padding columns hold the queries of other heads; nobody reads what they give.

Bytes moved: every KV block of the row once per kv head and query tile (2 * head_dim * itemsize a token),
q and out once.  Decode is bound by HBM; a tile of 64 tokens and head_dim 128 is 32 KiB in one box of TMA.

Invariants:
  * Block ids are clamped before use and table columns stay inside the span a query sees, so that unused
    entries are never dereferenced.
  * Slots no query sees may hold NaN: scores are selected, and V rows of a tile that is not wholly seen
    are overwritten with zeros in SMEM before they are multiplied.
  * head_dim that is no multiple of 64: V^T takes in the last columns of K, up to the 64 rows wgmma works on
    (`value_width`); the rows they give are cut off outside.
  * The running peak starts at a finite floor, so exp2 never sees inf - inf; a query that sees nothing
    keeps sum 0 and gives zeros and lse -inf.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.paged_attention.hopper_plan import Plan, make_plan
from pallas_kernels.paged_attention.spec import refuse_codes

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # a jaxlib without Mosaic GPU; the entry point says so
    plgpu = None

LOG2E = math.log2(math.e)
PEAK_FLOOR = -3e38  # below every score that float32 holds once it is in base 2


@dataclasses.dataclass(frozen=True)
class Refs:
    """What the kernel sees.  GMEM unless said otherwise; None where the caller did not pass it."""

    layer: Any  # i32[1]
    scale: Any  # f32[1]
    tables: Any  # i32[row, max_blocks]
    kv_lens: Any  # i32[row]
    q_lens: Any  # i32[row]
    q: Any  # [row * q_pos * q_head, head_dim]
    kv: Any  # [layer * block * kv_head, block_size, 2 * head_dim]
    out: Any  # [split, row * q_pos * q_head, value_width]
    lse: Any  # f32[1, row, kv_head, query tile, column]; with splits the shape of out
    q_smem: Any  # [column, head_dim]
    kv_smem: Any  # [stage, token, 2 * head_dim]
    p_smem: Any  # [column, token]
    o_smem: Any  # [column, value_width]
    lse_smem: Any  # f32[column]; with splits [column, value_width]
    q_ready: Any  # barrier
    full: Any  # barrier[stage]: the tile has arrived
    empty: Any  # barrier[stage]: the tile has been used
    soft_cap: Any = None  # f32[1]
    window: Any = None  # i32[1]


@dataclasses.dataclass(frozen=True)
class Work:
    """The share of one thread block; every field is a traced i32 scalar.

    Keys first <= i < last are those some query of the tile sees; tiles begin <= t < end are ours.
    """

    row: Array
    head: Array
    split: Array
    query: Array  # first query position of the tile
    position: Array  # its position in the sequence
    num_queries: Array  # real queries of the tile
    first: Array
    last: Array
    begin: Array
    end: Array


def find_work(plan: Plan, refs: Refs) -> Work:
    """Reads the lengths of the row and cuts the tiles that are seen into splits."""
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    split = lax.rem(part, jnp.int32(plan.splits))
    query = lax.div(part, jnp.int32(plan.splits)) * plan.query_tile
    kv_len, q_len = refs.kv_lens[row], refs.q_lens[row]
    num_queries = lax.clamp(0, q_len - query, plan.query_tile)
    position = kv_len - q_len + query
    last = jnp.where(num_queries > 0, jnp.maximum(position + num_queries, 0), 0)
    first = jnp.int32(0)
    if refs.window is not None:
        first = lax.clamp(0, position - refs.window[0] + 1, last)
    begin = lax.div(first, jnp.int32(plan.tile))
    end = lax.div(last + plan.tile - 1, jnp.int32(plan.tile))
    share = lax.div(end - begin + plan.splits - 1, jnp.int32(plan.splits))
    begin = begin + split * share
    end = jnp.maximum(jnp.minimum(end, begin + share), begin)
    return Work(row, head, split, query, position, num_queries, first, last, begin, end)


def fetch_tiles(plan: Plan, refs: Refs, work: Work) -> None:
    """Producer warpgroup: keeps the ring full of tiles of the row's blocks."""
    head_base = refs.layer[0] * (plan.num_blocks * plan.num_kv_heads) + work.head
    block_size = jnp.int32(plan.block_size)
    columns_seen = lax.div(work.first, block_size), lax.div(work.last - 1, block_size)

    @pl.loop(work.begin, work.end)
    def _fetch(t):
        stage = lax.rem(t - work.begin, jnp.int32(plan.stages))

        @pl.when(t - work.begin >= plan.stages)
        def _wait_for_room():
            plgpu.barrier_wait(refs.empty.at[stage])

        for start in range(0, plan.tile, plan.piece):
            token = t * plan.tile + start
            column = lax.clamp(columns_seen[0], lax.div(token, block_size), columns_seen[1])
            block = lax.clamp(0, refs.tables[work.row, column], plan.num_blocks - 1)
            offset = lax.rem(token, block_size) if plan.block_size > plan.piece else 0
            plgpu.copy_gmem_to_smem(
                refs.kv.at[head_base + block * plan.num_kv_heads, pl.ds(offset, plan.piece)],
                refs.kv_smem.at[stage, pl.ds(start, plan.piece)],
                refs.full.at[stage],
            )

    @pl.loop(jnp.maximum(work.end - plan.stages, work.begin), work.end)
    def _drain(t):
        plgpu.barrier_wait(refs.empty.at[lax.rem(t - work.begin, jnp.int32(plan.stages))])


def attend(plan: Plan, refs: Refs, work: Work) -> None:
    """Consumer warpgroup: the running softmax over the tiles, then the results."""
    wgmma_layout = plgpu.Layout.WGMMA
    tile, columns, head_dim, width = plan.tile, plan.columns, plan.head_dim, plan.value_width
    first_row = (work.row * plan.query_len + work.query) * plan.num_q_heads + work.head * plan.group

    def spread(x, height):  # f32[column] -> f32[height, column]
        return lax.broadcast_in_dim(x, (height, columns), [1])

    def iota(shape, dimension):
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=wgmma_layout)

    for j in range(plan.query_tile):
        # Rows past this head's group are other heads' queries; past the array TMA fills in zeros.
        plgpu.copy_gmem_to_smem(
            refs.q.at[pl.ds(first_row + j * plan.num_q_heads, plan.head_columns)],
            refs.q_smem.at[pl.ds(j * plan.head_columns, plan.head_columns)],
            refs.q_ready,
        )
    plgpu.barrier_wait(refs.q_ready)
    if plan.query_tile == 1:
        query_position = jnp.where(work.num_queries > 0, work.position, -1)
    else:
        query_index = lax.div(iota((tile, columns), 1), jnp.int32(plan.head_columns))
        query_position = jnp.where(query_index < work.num_queries, query_index + work.position, -1)

    def base2_scores(raw, t):  # f32[token, column] -> the same, -inf where not seen
        if refs.soft_cap is None:
            scores = raw * (refs.scale[0] * LOG2E)
        else:  # cap * tanh(x / cap), tanh y = 1 - 2 / (exp 2y + 1)
            cap = refs.soft_cap[0]
            doubled = jnp.exp2(raw * (refs.scale[0] * (2 * LOG2E) / cap))
            scores = (cap * LOG2E) * (1.0 - 2.0 / (doubled + 1.0))
        token = iota((tile, columns), 0) + t * tile
        seen = token <= query_position
        if refs.window is not None:
            seen &= token > query_position - refs.window[0]
        return jnp.where(seen, scores, -jnp.inf)

    def clear_unseen(values, t):  # SMEM [token, value_width]
        @pl.when((t * tile < work.first) | ((t + 1) * tile > work.last))
        def _clear():
            token = iota((tile, width), 0) + t * tile
            loaded = values[...]
            seen = (token >= work.first) & (token < work.last)
            values[...] = jnp.where(seen, loaded, jnp.zeros_like(loaded))

    def step(t, carry):
        acc, peak, total = carry  # f32[value_width, column], f32[column], f32[token, column]
        stage = lax.rem(t - work.begin, jnp.int32(plan.stages))
        plgpu.barrier_wait(refs.full.at[stage])
        keys = refs.kv_smem.at[stage, :, pl.ds(0, head_dim)]
        values = refs.kv_smem.at[stage, :, pl.ds(2 * head_dim - width, width)]
        raw = multiply(keys, transposed(refs.q_smem), (tile, columns))
        scores = base2_scores(raw, t)
        new_peak = jnp.maximum(peak, scores.max(axis=0))
        fade = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - spread(new_peak, tile))
        total = total * spread(fade, tile) + weights
        transposed(refs.p_smem)[...] = plgpu.layout_cast(
            weights.astype(plan.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        clear_unseen(values, t)
        plgpu.commit_smem()
        update = multiply(transposed(values), transposed(refs.p_smem), (width, columns))
        plgpu.barrier_arrive(refs.empty.at[stage])
        return acc * spread(fade, width) + update, new_peak, total

    start = (
        plgpu.layout_cast(jnp.zeros((width, columns), jnp.float32), wgmma_layout),
        plgpu.layout_cast(jnp.full((columns,), PEAK_FLOOR, jnp.float32), wgmma_layout.reduce(0)),
        plgpu.layout_cast(jnp.zeros((tile, columns), jnp.float32), wgmma_layout),
    )
    acc, peak, total = lax.fori_loop(work.begin, work.end, step, start)
    store_results(plan, refs, work, first_row, acc, peak, total.sum(axis=0))


def store_results(plan: Plan, refs: Refs, work: Work, first_row, acc, peak, total) -> None:
    """Normalises and writes what one thread block found.

    With splits, lse is written once per head_dim: then everything `combine` touches has one shape, and
    XLA makes a single elementwise kernel of it.
    """

    def spread(x):  # f32[column] -> f32[value_width, column]
        x = lax.broadcast_in_dim(x, (plan.value_width, plan.columns), [1])
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA)

    def store_transposed(ref, x):  # [value_width, column] -> SMEM [column, value_width]
        x = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        transposed(ref)[...] = x

    seen_any = total > 0
    total = jnp.where(seen_any, total, 1.0)
    lse = jnp.where(seen_any, (peak + jnp.log2(total)) / LOG2E, -jnp.inf)
    store_transposed(refs.o_smem, acc / spread(total))
    if plan.splits == 1:
        refs.lse_smem[...] = lse
    else:
        store_transposed(refs.lse_smem, spread(lse))
    plgpu.commit_smem()
    for j in range(plan.query_tile):

        @pl.when(work.query + j < plan.query_len)
        def _store(j=j):
            columns = pl.ds(j * plan.head_columns, plan.group)
            there = work.split, pl.ds(first_row + j * plan.num_q_heads, plan.group)
            plgpu.copy_smem_to_gmem(refs.o_smem.at[columns], refs.out.at[there])
            if plan.splits > 1:
                plgpu.copy_smem_to_gmem(refs.lse_smem.at[columns], refs.lse.at[there])

    if plan.splits == 1:
        there = 0, work.row, work.head, lax.div(work.query, jnp.int32(plan.query_tile))
        plgpu.copy_smem_to_gmem(refs.lse_smem, refs.lse.at[there])
    plgpu.wait_smem_to_gmem(0)


def transposed(ref):
    """Returns a view of a 2-D ref (not `plgpu.transpose_ref`: jax 0.11.2's refuses refs without transforms)."""
    return ref.transpose((1, 0))


def multiply(a, b, shape):
    """Returns f32[shape] a @ b of two SMEM refs, waiting for the tensor core."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


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
    store: KVStore,
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
    refuse_codes(store, "hopper")
    layout = store.layout
    if plgpu is None:
        raise NotImplementedError("hopper: needs a jaxlib with jax.experimental.pallas.mosaic_gpu")
    if q.dtype != layout.format.dtype:
        raise NotImplementedError(f"hopper: q: supported is {layout.format.dtype}, got {q.dtype}")
    plan = make_plan(layout, q.shape, view.block_tables.shape[1], splits)
    rows, query_len, num_q_heads, head_dim = q.shape
    kv = store.kv if store.kv.dtype == q.dtype else lax.bitcast_convert_type(store.kv, q.dtype)
    flat_q = q.reshape(-1, head_dim)
    flat_q = jnp.pad(flat_q, ((0, max(0, plan.head_columns - flat_q.shape[0])), (0, 0)))
    inputs = {
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "scale": jnp.asarray(scale, jnp.float32).reshape(1),
        "tables": view.block_tables,
        "kv_lens": view.kv_lens,
        "q_lens": view.q_lens,
        "q": flat_q,
        "kv": kv.reshape(-1, layout.block_size, 2 * head_dim),
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
    scratch = {
        "q_smem": plgpu.SMEM((plan.columns, head_dim), plan.dtype, transforms=tiled),
        "kv_smem": plgpu.SMEM((plan.stages, plan.tile, 2 * head_dim), plan.dtype, transforms=tiled),
        "p_smem": plgpu.SMEM((plan.columns, plan.tile), plan.dtype, transforms=tiled),
        "o_smem": plgpu.SMEM((plan.columns, plan.value_width), out_dtype),
        "lse_smem": plgpu.SMEM(lse_tile, jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=plan.query_tile),
        "full": plgpu.Barrier(num_arrivals=plan.tile // plan.piece, num_barriers=plan.stages),
        "empty": plgpu.Barrier(num_arrivals=1, num_barriers=plan.stages),
    }

    def paged_attention_hopper_kernel(*args):
        refs = Refs(**dict(zip((*inputs, *outputs, *scratch), args, strict=True)))
        work = find_work(plan, refs)
        pl.when(lax.axis_index("warpgroup") == 0)(lambda: attend(plan, refs, work))
        pl.when(lax.axis_index("warpgroup") == 1)(lambda: fetch_tiles(plan, refs, work))

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
