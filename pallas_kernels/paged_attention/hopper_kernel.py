"""The Hopper kernel's body (Mosaic GPU, sm_90a): TMA ring, wgmma with tokens on the M side.

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
  * What differs over sealed blocks is in `Tiles` alone; `hopper_codes.CodeTiles` takes its place there.
  * The running peak starts at a finite floor, so exp2 never sees inf - inf; a query that sees nothing
    keeps sum 0 and gives zeros and lse -inf.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import Array
from pallas_kernels.paged_attention.hopper_plan import Plan

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
    kv: Any  # [layer * block * kv_head, block_size, 2 * head_dim]; of sealed blocks the codes
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
    # of sealed blocks only; sizes in `hopper_codes`
    key_affine: Any = None  # bf16[layer * block, key row, kv_head * head_dim, or more]
    value_affine: Any = None  # bf16[layer * block * group * kv_head * block_size, or more a block]
    key_smem: Any = None  # bf16[stage, run, key row, head_dim]
    value_smem: Any = None  # bf16[stage, run * group * 64]
    tile_smem: Any = None  # [token, 2 * head_dim], codes as numbers
    scaled_smem: Any = None  # [run * column, head_dim], q times K's scales


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
    last = plan.keys_before(jnp.maximum(position + num_queries - 1, 0))
    last = jnp.where(num_queries > 0, last, 0)
    first = jnp.int32(0)
    if refs.window is not None:
        first = lax.clamp(0, position - refs.window[0] + 1, last)
    begin, end = plan.tiles_of(first, last)
    share = lax.div(end - begin + plan.splits - 1, jnp.int32(plan.splits))
    begin = begin + split * share
    end = jnp.maximum(jnp.minimum(end, begin + share), begin)
    return Work(row, head, split, query, position, num_queries, first, last, begin, end)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a tile of keys comes in and what it is multiplied with: everything that depends on how the pool stores K and V."""

    plan: Plan
    refs: Refs
    work: Work

    def block_of(self, token: Array) -> Array:
        """Returns the block id of a token; tokens outside the span that is seen stand for its edges."""
        plan, work, size = self.plan, self.work, jnp.int32(self.plan.block_size)
        first, last = lax.div(work.first, size), lax.div(work.last - 1, size)
        column = lax.clamp(first, lax.div(token, size), last)
        return lax.clamp(0, self.refs.tables[work.row, column], plan.num_blocks - 1)

    def fetch(self, t: Array, stage: Array) -> None:
        """Starts the copies of tile t into a stage of the ring."""
        plan, refs = self.plan, self.refs
        head_base = refs.layer[0] * (plan.num_blocks * plan.num_kv_heads) + self.work.head
        for start in range(0, plan.tile, plan.piece):
            token = t * plan.tile + start
            block = self.block_of(token)
            offset = lax.rem(token, plan.block_size) if plan.block_size > plan.piece else 0
            plgpu.copy_gmem_to_smem(
                refs.kv.at[head_base + block * plan.num_kv_heads, pl.ds(offset, plan.piece)],
                refs.kv_smem.at[stage, pl.ds(start, plan.piece)],
                refs.full.at[stage],
            )

    def tokens(self, t: Array) -> Array:
        """Returns i32[token, column]: where in the sequence each row of tile t lies."""
        return iota((self.plan.tile, self.plan.columns), 0) + t * self.plan.tile

    def scores(self, t: Array, stage: Array) -> Array:
        """Returns f32[token, column]: k . q of a tile that has arrived."""
        plan, refs = self.plan, self.refs
        keys = refs.kv_smem.at[stage, :, pl.ds(0, plan.head_dim)]
        return multiply(keys, transposed(refs.q_smem), (plan.tile, plan.columns))

    def weighted(self, weights: Array, t: Array, stage: Array) -> Array:
        """Returns f32[value_width, column]: V summed by weights f32[token, column]; gives the stage back to the ring."""
        plan, refs, width = self.plan, self.refs, self.plan.value_width
        values = refs.kv_smem.at[stage, :, pl.ds(2 * plan.head_dim - width, width)]
        store_transposed(refs.p_smem, weights)
        self.clear_unseen(values, t)
        plgpu.commit_smem()
        out = multiply(transposed(values), transposed(refs.p_smem), (width, plan.columns))
        plgpu.barrier_arrive(refs.empty.at[stage])
        return out

    def clear_unseen(self, values: Any, t: Array) -> None:
        """Zeros the rows [token, value_width] of tile t that no query sees: they may hold NaN."""
        work, tile = self.work, self.plan.tile

        @pl.when((t * tile < work.first) | ((t + 1) * tile > work.last))
        def _clear():
            token = iota((tile, self.plan.value_width), 0) + t * tile
            loaded = values[...]
            seen = (token >= work.first) & (token < work.last)
            values[...] = jnp.where(seen, loaded, jnp.zeros_like(loaded))


def fetch_tiles(plan: Plan, refs: Refs, work: Work, tiles: Tiles) -> None:
    """Producer warpgroup: keeps the ring full of tiles of the row's blocks."""

    @pl.loop(work.begin, work.end)
    def _fetch(t):
        stage = lax.rem(t - work.begin, jnp.int32(plan.stages))

        @pl.when(t - work.begin >= plan.stages)
        def _wait_for_room():
            plgpu.barrier_wait(refs.empty.at[stage])

        tiles.fetch(t, stage)

    @pl.loop(jnp.maximum(work.end - plan.stages, work.begin), work.end)
    def _drain(t):
        plgpu.barrier_wait(refs.empty.at[lax.rem(t - work.begin, jnp.int32(plan.stages))])


def attend(plan: Plan, refs: Refs, work: Work, tiles: Tiles) -> None:
    """Consumer warpgroup: the running softmax over the tiles, then the results."""
    wgmma_layout = plgpu.Layout.WGMMA
    tile, columns, width = plan.tile, plan.columns, plan.value_width
    first_row = (work.row * plan.query_len + work.query) * plan.num_q_heads + work.head * plan.group

    def spread(x, height):  # f32[column] -> f32[height, column]
        return lax.broadcast_in_dim(x, (height, columns), [1])

    for j in range(plan.query_tile):
        # Rows past this head's group are other heads' queries; past the array TMA fills in zeros.
        plgpu.copy_gmem_to_smem(
            refs.q.at[pl.ds(first_row + j * plan.num_q_heads, plan.head_columns)],
            refs.q_smem.at[pl.ds(j * plan.head_columns, plan.head_columns)],
            refs.q_ready,
        )
    plgpu.barrier_wait(refs.q_ready)
    if plan.query_tile == 1:
        is_query, position = work.num_queries > 0, work.position
    else:
        query_index = lax.div(iota((tile, columns), 1), jnp.int32(plan.head_columns))
        is_query, position = query_index < work.num_queries, query_index + work.position
    seen_before = jnp.where(is_query, plan.keys_before(position), 0)

    def base2_scores(raw, t):  # f32[token, column] -> the same, -inf where not seen
        if refs.soft_cap is None:
            scores = raw * (refs.scale[0] * LOG2E)
        else:  # cap * tanh(x / cap), tanh y = 1 - 2 / (exp 2y + 1)
            cap = refs.soft_cap[0]
            doubled = jnp.exp2(raw * (refs.scale[0] * (2 * LOG2E) / cap))
            scores = (cap * LOG2E) * (1.0 - 2.0 / (doubled + 1.0))
        token = tiles.tokens(t)
        seen = token < seen_before
        if refs.window is not None:
            seen &= token > position - refs.window[0]
        return jnp.where(seen, scores, -jnp.inf)

    def step(t, carry):
        acc, peak, total = carry  # f32[value_width, column], f32[column], f32[token, column]
        stage = lax.rem(t - work.begin, jnp.int32(plan.stages))
        plgpu.barrier_wait(refs.full.at[stage])
        scores = base2_scores(tiles.scores(t, stage), t)
        new_peak = jnp.maximum(peak, scores.max(axis=0))
        fade = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - spread(new_peak, tile))
        total = total * spread(fade, tile) + weights
        update = tiles.weighted(weights, t, stage)
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


def store_transposed(ref, x) -> None:
    """Stores x f32[m, n] in wgmma's layout as SMEM [n, m], in the ref's dtype."""
    transposed(ref)[...] = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)


def iota(shape, dimension):
    """Returns i32[shape] in wgmma's layout."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def multiply(a, b, shape):
    """Returns f32[shape] a @ b of two SMEM refs, waiting for the tensor core."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
