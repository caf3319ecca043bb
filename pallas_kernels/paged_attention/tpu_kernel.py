"""The body of the TPU paged attention kernel: one grid step answers one tile of one row.

Invariants:
  * Copies run one chunk ahead of the arithmetic, across chunks, tiles and rows: whoever works on a chunk has
    started the next one first, and waits only for its own.
  * `turn` counts the chunks of a core over the whole call; its parity names the buffer of a chunk.
  * Only the blocks a tile can see are fetched.  In a chunk that is not all seen, K needs no care (its scores
    are selected away) and V is cleared in VMEM, because 0 * NaN is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array
from pallas_kernels.paged_attention.tpu_plan import LANES, Plan

NEG_INF = float("-inf")
Ref = Any


@dataclasses.dataclass(frozen=True)
class Span:
    """What one tile sees (scalars): keys `begin <= key < end`, and the blocks that hold them."""

    base: Array  # position of the tile's first query
    begin: Array
    end: Array
    first_block: Array
    num_blocks: Array


@dataclasses.dataclass(frozen=True)
class Rows:
    """The lengths of the rows, read with the bounds that keep a broken length from leaving the table."""

    plan: Plan
    kv_lens_ref: Ref
    q_lens_ref: Ref
    window: Array | None
    end: Array  # one past the last row of this core

    def kv_len(self, row: Array) -> Array:
        """Returns the tokens row `row` holds."""
        return jnp.minimum(self.kv_lens_ref[row], self.plan.max_blocks * self.plan.block_size)

    def q_len(self, row: Array) -> Array:
        """Returns the queries of row `row`; its tiles past them hold none."""
        most = self.plan.num_tiles * self.plan.tile_len
        return jnp.minimum(jnp.minimum(self.q_lens_ref[row], most), self.kv_len(row))

    def span(self, row: Array, tile: Array) -> Span:
        """Returns the span of a tile; it has no blocks where the tile holds no query."""
        plan, kv_len, q_len = self.plan, self.kv_len(row), self.q_len(row)
        base = kv_len - q_len + tile * plan.tile_len
        end = jnp.minimum(kv_len, base + plan.tile_len)
        if plan.codes is not None:  # the blocks before that of the last query
            end = lax.div(jnp.maximum(end - 1, 0), jnp.int32(plan.block_size)) * plan.block_size
        begin = jnp.int32(0) if self.window is None else jnp.maximum(base - self.window + 1, 0)
        first = lax.div(begin, jnp.int32(plan.block_size))
        last = lax.div(end + (plan.block_size - 1), jnp.int32(plan.block_size))
        has_query = tile * plan.tile_len < q_len
        num_blocks = jnp.maximum(last - first, 0)
        return Span(base, begin, end, first, jnp.where(has_query, num_blocks, 0))

    def next_work(self, row: Array, tile: Array) -> tuple[Array, Array]:
        """Returns (row, tile) of the next tile of this core that sees a block; row `end` when there is none."""
        tiles = jnp.int32(self.plan.num_tiles)
        end = self.end * tiles

        def is_idle(place: Array) -> Array:
            safe = jnp.minimum(place, end - 1)
            span = self.span(lax.div(safe, tiles), lax.rem(safe, tiles))
            return (place < end) & (span.num_blocks <= 0)

        place = lax.while_loop(is_idle, lambda place: place + 1, row * tiles + tile + 1)
        return lax.div(place, tiles), lax.rem(place, tiles)


@dataclasses.dataclass(frozen=True)
class Tables:
    """Block ids, all of them inside the pool.  A small table is prefetched; a large one visits SMEM row by row.

    Row by row there are two places: `place` holds the row at work, `1 - place` the row after it.
    """

    plan: Plan
    tables_ref: Ref  # SMEM i32[row * max_blocks], or HBM i32[row, 1, table_width]
    rows_ref: Ref  # SMEM i32[2, 1, table_width]
    sem_ref: Ref  # DMA[1]

    def _copy(self, row: Array, place: Array) -> Any:
        return pltpu.make_async_copy(
            self.tables_ref.at[row], self.rows_ref.at[place], self.sem_ref.at[0]
        )

    def start(self, row: Array, place: Array) -> None:
        """Starts to bring in the table of `row`."""
        if not self.plan.table_in_smem:
            self._copy(row, place).start()

    def wait(self, place: Array) -> None:
        """Waits until the table that was started for `place` is there."""
        if not self.plan.table_in_smem:
            self._copy(jnp.int32(0), place).wait()

    def reader(self, row: Array, place: Array, first: Array) -> Callable[[Array | int], Array]:
        """Returns a function from i to the block in column `first + i` of `row`."""
        if self.plan.table_in_smem:
            start = row * self.plan.max_blocks + first
            return lambda i: self.tables_ref[start + i]
        return lambda i: self.rows_ref[place, 0, first + i]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The copies of chunks from the pool into the two VMEM buffers."""

    plan: Plan
    layer: Array
    tables: Tables
    kv_ref: Ref  # HBM dtype[layer, block, kv_head, block_size, 2 * head_dim]
    buffers_ref: Ref  # VMEM dtype[2, chunk_block, kv_head, block_size, 2 * head_dim]
    sems_ref: Ref  # DMA[2]

    def start(
        self, row: Array, place: Array, first_block: Array, num_blocks: Array, slot: Array
    ) -> None:
        """Starts one copy per block; a whole chunk without a loop."""
        size = self.plan.chunk_blocks

        block = self.tables.reader(row, place, first_block)

        def start_one(index):
            pltpu.make_async_copy(
                self.kv_ref.at[self.layer, block(index)],
                self.buffers_ref.at[slot, index],
                self.sems_ref.at[slot],
            ).start()

        @pl.when(num_blocks >= size)
        def _whole():
            for index in range(size):
                start_one(index)

        @pl.when(num_blocks < size)
        def _part():
            pl.loop(0, num_blocks)(start_one)

    def wait(self, num_blocks: Array, slot: Array) -> None:
        """Waits for the copies of one chunk; for a whole one at once, by its bytes."""
        size = self.plan.chunk_blocks

        def wait_for(view):  # a wait counts bytes; which copy brought them does not matter
            pltpu.make_async_copy(view, view, self.sems_ref.at[slot]).wait()

        @pl.when(num_blocks >= size)
        def _whole():
            wait_for(self.buffers_ref.at[slot])

        @pl.when(num_blocks < size)
        def _part():
            pl.loop(0, num_blocks)(lambda _: wait_for(self.buffers_ref.at[slot, 0]))

    def clear_unseen(self, span: Span, key0: Array, slot: Array) -> None:
        """Zeros the V of keys outside the span in a chunk whose first key is `key0`."""
        plan, bs = self.plan, self.plan.block_size
        lanes = pl.ds(plan.value_start, plan.value_width)

        def clear(index):
            key = key0 + index * bs + lax.broadcasted_iota(jnp.int32, (bs, plan.value_width), 0)
            seen = (key >= span.begin) & (key < span.end)

            @pl.loop(0, plan.num_kv_heads)
            def _(head):
                view = self.buffers_ref.at[slot, index, head, :, lanes]
                view[...] = jnp.where(seen, view[...], jnp.zeros((), view.dtype))

        @pl.when(key0 < span.begin)
        def _first():
            clear(0)

        @pl.when(key0 + plan.chunk_len > span.end)
        def _last():
            first = lax.div(jnp.maximum(span.end - key0, 0), jnp.int32(bs))
            pl.loop(first, plan.chunk_blocks)(clear)

    def scores(self, q: Array, slot: Array, head: Array | int) -> Array:
        """Returns f32[query, key]: q . k of one head of a chunk."""
        return product(self.plan, q, self._operand(slot, head, 0, self.plan.key_width), 1)

    def weighted(self, weights: Array, seen: Array, slot: Array, head: Array | int) -> Array:
        """Returns f32[query, value_width]: the V of one head of a chunk, summed by weights f32[query, key]."""
        values = self._operand(slot, head, self.plan.value_start, self.plan.value_width)
        return product(self.plan, weights, values, 0)

    def _operand(self, slot: Array, head: Array | int, start: int, width: int) -> Array:
        """Returns lanes `start : start + width` of one head of a chunk as a matrix [key, width]."""
        x = self.buffers_ref[slot, :, head, :, start : start + width]
        x = x.reshape(self.plan.chunk_len, width)
        if x.dtype != self.plan.dtype:
            x = lax.bitcast_convert_type(x, self.plan.dtype)
        return x.astype(self.plan.compute_dtype)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The running softmax of one tile.  Per-query numbers are repeated over 128 lanes."""

    plan: Plan
    floats_ref: Ref  # SMEM f32[2]: scale, soft cap
    q_ref: Ref  # VMEM compute_dtype[kv_head, query, key_width]
    peak_ref: Ref  # VMEM f32[kv_head, query, 128]
    total_ref: Ref  # VMEM f32[kv_head, query, 128]
    acc_ref: Ref  # VMEM f32[kv_head, query, value_width]
    has_soft_cap: bool

    def clear(self) -> None:
        """Begins a tile: nothing seen yet."""
        self.peak_ref[...] = jnp.full(self.peak_ref.shape, NEG_INF, jnp.float32)
        self.total_ref[...] = jnp.zeros(self.total_ref.shape, jnp.float32)
        self.acc_ref[...] = jnp.zeros(self.acc_ref.shape, jnp.float32)

    def add(self, chunks: Chunks, slot: Array, head: Array | int, seen: Array) -> None:
        """Folds one chunk of one kv head into the running softmax."""
        plan = self.plan
        scores = chunks.scores(self.q_ref[head], slot, head) * self.floats_ref[0]
        if self.has_soft_cap:
            scores = self.floats_ref[1] * jnp.tanh(scores / self.floats_ref[1])
        scores = jnp.where(seen, scores, NEG_INF)

        old_peak = self.peak_ref[head]
        peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
        safe_peak = jnp.where(peak == NEG_INF, 0.0, peak)
        fade = jnp.exp(old_peak - safe_peak)
        weights = jnp.exp(scores - widen(safe_peak, plan.chunk_len))
        new = chunks.weighted(weights, seen, slot, head)
        self.peak_ref[head] = peak
        self.total_ref[head] = self.total_ref[head] * fade + jnp.sum(weights, axis=1, keepdims=True)
        self.acc_ref[head] = self.acc_ref[head] * widen(fade, plan.value_width) + new

    def finish(self, head: Array | int, out_ref: Ref, lse_ref: Ref) -> None:
        """Writes the output and the log-sum-exp of one kv head; zeros and -inf where nothing was seen."""
        plan = self.plan
        is_empty = self.total_ref[head] == 0.0
        total = jnp.where(is_empty, 1.0, self.total_ref[head])
        lse = jnp.where(is_empty, NEG_INF, self.peak_ref[head] + jnp.log(total))
        for start in range(0, plan.num_queries, LANES):
            part = lse[start : start + LANES]  # [query, 128]: its diagonal is the row wanted
            query, lane = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
            row = jnp.sum(jnp.where(query == lane, part, 0.0), axis=0, keepdims=True)
            lse_ref[head, :, start : start + LANES] = row
        out = self.acc_ref[head] / widen(total, plan.value_width)
        out_ref[head] = out[:, plan.value_width - plan.head_dim :].astype(out_ref.dtype)


def product(plan: Plan, a: Array, b: Array, contract_b: int) -> Array:
    """Returns f32: a[m, n] times b, contracted over axis 1 of a and axis `contract_b` of b."""
    is_float32 = plan.compute_dtype == jnp.float32
    return lax.dot_general(
        a.astype(plan.compute_dtype),
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_float32 else None,
        preferred_element_type=jnp.float32,
    )


def widen(x: Array, num_lanes: int) -> Array:
    """Returns [query, 128], equal in all lanes, as [query, num_lanes]."""
    return jnp.concatenate([x] * -(-num_lanes // LANES), axis=1)[:, :num_lanes]


def seen_mask(plan: Plan, span: Span, key0: Array, num_valid: Array, window: Array | None) -> Array:
    """Returns bool[query, key]: which keys of a chunk each query of a tile sees.

    Query m has position base + m // group; multiplying the key side by `group` avoids the division.
    """
    query = lax.broadcasted_iota(jnp.int32, (plan.num_queries, plan.chunk_len), 0)
    key = lax.broadcasted_iota(jnp.int32, query.shape, 1) + (key0 - span.base)
    last = key
    if plan.codes is not None:  # a block is seen by the queries after it
        slot = lax.rem(lax.broadcasted_iota(jnp.int32, query.shape, 1), jnp.int32(plan.block_size))
        last = key + (plan.block_size - slot)
    seen = (query >= last * plan.group) & (query < num_valid * plan.group)
    if window is not None:
        seen &= query < (key + window) * plan.group
    return seen


def for_heads(plan: Plan, body) -> None:
    """Runs `body(head)` for every kv head."""
    if plan.unroll_heads:
        for head in range(plan.num_kv_heads):
            body(head)
    else:
        pl.loop(0, plan.num_kv_heads)(body)


def kernel(
    plan: Plan,
    has_soft_cap: bool,
    has_window: bool,
    # prefetch
    layer_ref,  # i32[2]: layer, window
    kv_lens_ref,  # i32[row]
    q_lens_ref,  # i32[row]
    # prefetch or in
    tables_ref,  # SMEM i32[row * max_blocks], or HBM i32[row, 1, table_width]
    # in
    floats_ref,  # SMEM f32[2]: scale, soft cap
    q_ref,  # VMEM compute_dtype[kv_head, query, key_width]
    kv_ref,  # HBM dtype[layer, block, kv_head, block_size, 2 * head_dim]
    # out
    out_ref,  # VMEM [kv_head, query, head_dim]
    lse_ref,  # VMEM f32[kv_head, 1, lse_width]
    # scratch
    buffers_ref,  # VMEM dtype[2, chunk_block, kv_head, block_size, 2 * head_dim]
    peak_ref,  # VMEM f32[kv_head, query, 128]
    total_ref,  # VMEM f32[kv_head, query, 128]
    acc_ref,  # VMEM f32[kv_head, query, value_width]
    turn_ref,  # SMEM i32[3]: chunks so far, place of the row's table, that row
    sems_ref,  # DMA[2]
    table_rows_ref,  # SMEM i32[2, 1, table_width]
    table_sem_ref,  # DMA[1]
):
    """Answers the queries of tile program_id(2) of row program_id(1) of core program_id(0)."""
    tables = Tables(plan, tables_ref, table_rows_ref, table_sem_ref)
    run(
        make_rows(plan, kv_lens_ref, q_lens_ref, layer_ref[1] if has_window else None),
        Chunks(plan, layer_ref[0], tables, kv_ref, buffers_ref, sems_ref),
        Softmax(plan, floats_ref, q_ref, peak_ref, total_ref, acc_ref, has_soft_cap),
        turn_ref,
        out_ref,
        lse_ref,
    )


def make_rows(plan: Plan, kv_lens_ref: Ref, q_lens_ref: Ref, window: Array | None) -> Rows:
    """Returns the rows of this core."""
    end = (pl.program_id(0) + 1) * plan.rows_per_core
    return Rows(plan, kv_lens_ref, q_lens_ref, window, end)


def run(
    rows: Rows, chunks: Chunks, softmax: Softmax, turn_ref: Ref, out_ref: Ref, lse_ref: Ref
) -> None:
    """Answers one tile of one row; the first grid step of a core starts its first chunk as well."""
    plan, tables = rows.plan, chunks.tables
    begin = pl.program_id(0) * plan.rows_per_core
    row, tile = begin + pl.program_id(1), pl.program_id(2)
    span = rows.span(row, tile)

    last_tile = jnp.int32(plan.num_tiles - 1)

    @pl.when((row == begin) & (tile == 0))
    def _first_of_core():
        turn_ref[0], turn_ref[1], turn_ref[2] = 0, 1, -1
        first_row, first_tile = rows.next_work(begin - 1, last_tile)

        @pl.when(first_row < rows.end)
        def _():
            tables.start(first_row, jnp.int32(0))
            tables.wait(jnp.int32(0))
            first = rows.span(first_row, first_tile)
            chunks.start(first_row, jnp.int32(0), first.first_block, first.num_blocks, jnp.int32(0))

    softmax.clear()

    @pl.when(span.num_blocks > 0)
    def _work():
        after_row, _ = rows.next_work(row, last_tile)

        @pl.when(turn_ref[2] != row)
        def _first_of_row():
            turn_ref[1], turn_ref[2] = 1 - turn_ref[1], row

            @pl.when(after_row < rows.end)
            def _():
                tables.start(after_row, 1 - turn_ref[1])

        answer_tile(plan, rows, chunks, softmax, turn_ref, row, tile, span)

    for_heads(plan, lambda head: softmax.finish(head, out_ref, lse_ref))


def answer_tile(
    plan: Plan,
    rows: Rows,
    chunks: Chunks,
    softmax: Softmax,
    turn_ref: Ref,
    row: Array,
    tile: Array,
    span: Span,
) -> None:
    """Attends to every chunk of a tile, starting the copies of the chunk after each."""
    size = plan.chunk_blocks
    num_chunks = lax.div(span.num_blocks + (size - 1), jnp.int32(size))
    turn, place = turn_ref[0], turn_ref[1]

    next_row, next_tile = rows.next_work(row, tile)
    has_next, stays = next_row < rows.end, next_row == row
    next_row = jnp.minimum(next_row, rows.end - 1)
    next_span = rows.span(next_row, next_tile)
    next_blocks = jnp.where(has_next, next_span.num_blocks, 0)
    next_place = jnp.where(stays, place, 1 - place)

    @pl.loop(0, num_chunks)
    def _(chunk):
        slot = lax.bitwise_and(turn + chunk, 1)
        done = chunk * size
        is_last = chunk + 1 == num_chunks

        @pl.when(is_last & ~stays & (next_blocks > 0))
        def _():
            chunks.tables.wait(next_place)

        chunks.start(
            jnp.where(is_last, next_row, row),
            jnp.where(is_last, next_place, place),
            jnp.where(is_last, next_span.first_block, span.first_block + done + size),
            jnp.where(is_last, next_blocks, span.num_blocks - done - size),
            1 - slot,
        )
        chunks.wait(span.num_blocks - done, slot)
        key0 = (span.first_block + done) * plan.block_size
        chunks.clear_unseen(span, key0, slot)
        num_valid = rows.q_len(row) - tile * plan.tile_len
        seen = seen_mask(plan, span, key0, num_valid, rows.window)
        for_heads(plan, lambda head: softmax.add(chunks, slot, head, seen))

    turn_ref[0] = turn + num_chunks
