"""The TPU kernel's chunks of sealed blocks: codes and scales come in together, and become numbers in VMEM.

::

    codes         HBM --copy--> VMEM [block, kv_head, row, 2 * head_dim]     K: (code + 1/2) * scale, then the product
    key_affine    HBM --copy--> VMEM [block, key row, kv_head * head_dim]    q . centre, one number a query and block
    value_affine  HBM --copy--> VMEM [block, group, kv_head * block_size]    on the weights, before the product with V's codes

Invariants:
  * Only whole sealed blocks are fetched; what a chunk does not fetch is cleared where its bytes could be NaN.
  * The centre stays float32 and out of the matrix product: it may be hundreds of times what the codes spell.
  * V is never scaled: its scales multiply the weights, once per group of channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array
from pallas_kernels.paged_attention.tpu_kernel import (
    Ref,
    Softmax,
    Span,
    Tables,
    make_rows,
    product,
    run,
)
from pallas_kernels.paged_attention.tpu_plan import Plan
from pallas_kernels.sealed import SealedLayout, bfloat16_values


@dataclasses.dataclass(frozen=True)
class CodeChunks:
    """The copies of chunks of sealed blocks into two sets of VMEM buffers; same duties as `tpu_kernel.Chunks`."""

    plan: Plan
    layer: Array
    tables: Tables
    pools: tuple[Ref, Ref, Ref]  # HBM codes, key_affine, value_affine: [layer, block, ...]
    buffers: tuple[Ref, Ref, Ref]  # VMEM [2, chunk_block, ...] of each
    sems_ref: Ref  # DMA[2]

    @property
    def codes(self) -> SealedLayout:
        """The layout of the sealed blocks."""
        assert self.plan.codes is not None
        return self.plan.codes

    def start(
        self, row: Array, place: Array, first_block: Array, num_blocks: Array, slot: Array
    ) -> None:
        """Starts three copies per block."""
        block = self.tables.reader(row, place, first_block)

        @pl.loop(0, jnp.minimum(num_blocks, self.plan.chunk_blocks))
        def _(index):
            for pool, buffer in zip(self.pools, self.buffers, strict=True):
                pltpu.make_async_copy(
                    pool.at[self.layer, block(index)],
                    buffer.at[slot, index],
                    self.sems_ref.at[slot],
                ).start()

    def wait(self, num_blocks: Array, slot: Array) -> None:
        """Waits for the copies of one chunk; for a whole one by its bytes."""
        size = self.plan.chunk_blocks

        def wait_for(views):
            for view in views:
                pltpu.make_async_copy(view, view, self.sems_ref.at[slot]).wait()

        @pl.when(num_blocks >= size)
        def _whole():
            wait_for([buffer.at[slot] for buffer in self.buffers])

        @pl.when(num_blocks < size)
        def _part():
            pl.loop(0, num_blocks)(lambda _: wait_for([b.at[slot, 0] for b in self.buffers]))

    def clear_unseen(self, span: Span, key0: Array, slot: Array) -> None:
        """Zeros the codes and scales of the chunk's blocks past the span: bytes left there may spell NaN."""
        size = self.plan.chunk_blocks

        @pl.when(key0 + self.plan.chunk_len > span.end)
        def _():
            first = lax.div(jnp.maximum(span.end - key0, 0), jnp.int32(self.plan.block_size))

            @pl.loop(first, size)
            def _(index):
                for buffer in self.buffers:
                    view = buffer.at[slot, index]
                    view[...] = jnp.zeros(view.shape, view.dtype)

    def scores(self, q: Array, slot: Array, head: int) -> Array:
        """Returns f32[query, key]: q . k of one head of a chunk."""
        plan = self.plan
        codes = self._codes(slot, head, 0, plan.key_width)
        scale = self._key_rows(slot, 0, head)
        if self.codes.symmetric_keys:
            return product(plan, q, self._matrix(codes * scale), 1)
        scores = product(plan, q, self._matrix((codes + 0.5) * scale), 1)
        centre = self._key_rows(slot, 1, head)
        offset = jnp.sum(q.astype(jnp.float32)[None] * centre, axis=2, keepdims=True)
        shape = (plan.num_queries, plan.block_size)
        return scores + jnp.concatenate([jnp.broadcast_to(x, shape) for x in offset], axis=1)

    def weighted(self, weights: Array, seen: Array, slot: Array, head: int) -> Array:
        """Returns f32[query, value_width]: the V of one head of a chunk, summed by weights f32[query, key]."""
        plan, groups = self.plan, self.codes.num_value_groups
        values = self._matrix(self._codes(slot, head, plan.value_start, plan.value_width))
        scaled = [
            jnp.where(seen, weights * self._value_row(slot, group, head), 0.0)
            for group in range(groups)
        ]
        sums = product(plan, jnp.concatenate(scaled, axis=0), values, 0)
        if groups == 1:
            return sums
        lane = lax.broadcasted_iota(jnp.int32, (plan.num_queries, plan.value_width), 1)
        channel = lane - (plan.value_width - plan.head_dim)
        out = sums[: plan.num_queries]
        for group in range(1, groups):  # of each group's sums only its own channels are meant
            part = sums[group * plan.num_queries : (group + 1) * plan.num_queries]
            out = jnp.where(channel >= group * self.codes.value_group, part, out)
        return out

    def _matrix(self, x: Array) -> Array:
        """Returns [block, token, n] as the operand [key, n] of a product."""
        return x.reshape(self.plan.chunk_len, x.shape[2]).astype(self.plan.compute_dtype)

    def _codes(self, slot: Array, head: int, start: int, width: int) -> Array:
        """Returns lanes start : start + width of one head of a chunk as numbers f32[block, token, width]."""
        x = self.buffers[0][slot, :, head, :, start : start + width]
        if self.codes.format.bits == 4:
            wide = x.astype(jnp.int32)
            low, high = (wide << 28) >> 28, (wide << 24) >> 28
            return jnp.concatenate([low, high], axis=1).astype(jnp.float32)
        if x.dtype == jnp.uint8:
            x = lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
        return x.astype(jnp.float32)

    def _key_rows(self, slot: Array, row: int, head: int) -> Array:
        """Returns f32[block, 1, key_width] of K's affine row of one head of a chunk, zero past head_dim."""
        dim, width = self.plan.head_dim, self.plan.key_width
        x = self._affine(1, slot, row, self.codes.num_key_rows, head * dim, dim)
        if width == dim:
            return x
        return jnp.concatenate([x, jnp.zeros((*x.shape[:2], width - dim), jnp.float32)], axis=2)

    def _value_row(self, slot: Array, group: int, head: int) -> Array:
        """Returns f32[1, key]: V's scales of one group and head, token by token of the chunk."""
        size = self.plan.block_size
        rows = self._affine(2, slot, group, self.codes.num_value_groups, head * size, size)
        return jnp.concatenate(list(rows), axis=1)

    def _affine(
        self, index: int, slot: Array, row: int, num_rows: int, start: int, width: int
    ) -> Array:
        """Returns f32[block, 1, width]: entries start : start + width of one of the num_rows rows of buffers[index].

        A lone row lies in two pieces (see `sealed`), and an odd head in the middle then in both.
        """
        buffer, parts = self.buffers[index], []
        pieces, lanes = buffer.shape[2] // num_rows, buffer.shape[3]
        for piece in range(pieces):
            first, end = max(start - piece * lanes, 0), min(start + width - piece * lanes, lanes)
            if first < end:
                at = row * pieces + piece
                parts.append(bfloat16_values(buffer[slot, :, at : at + 1, first:end]))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)


def code_kernel(
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
    codes_ref,  # HBM codes[layer, block, kv_head, row, 2 * head_dim]
    key_affine_ref,  # HBM bf16[layer, block, key row, kv_head * head_dim], a lone row in two
    value_affine_ref,  # HBM bf16[layer, block, group, kv_head * block_size], a lone row in two
    # out
    out_ref,  # VMEM [kv_head, query, head_dim]
    lse_ref,  # VMEM f32[kv_head, 1, lse_width]
    # scratch
    codes_buffer_ref,  # VMEM codes[2, chunk_block, kv_head, row, 2 * head_dim]
    key_buffer_ref,  # VMEM bf16[2, chunk_block, ...] of key_affine_ref
    value_buffer_ref,  # VMEM bf16[2, chunk_block, ...] of value_affine_ref
    peak_ref,  # VMEM f32[kv_head, query, 128]
    total_ref,  # VMEM f32[kv_head, query, 128]
    acc_ref,  # VMEM f32[kv_head, query, value_width]
    turn_ref,  # SMEM i32[3]: chunks so far, place of the row's table, that row
    sems_ref,  # DMA[2]
    table_rows_ref,  # SMEM i32[2, 1, table_width]
    table_sem_ref,  # DMA[1]
):
    """`tpu_kernel.kernel` over sealed blocks."""
    tables = Tables(plan, tables_ref, table_rows_ref, table_sem_ref)
    pools: Any = (codes_ref, key_affine_ref, value_affine_ref)
    buffers: Any = (codes_buffer_ref, key_buffer_ref, value_buffer_ref)
    run(
        make_rows(plan, kv_lens_ref, q_lens_ref, layer_ref[1] if has_window else None),
        CodeChunks(plan, layer_ref[0], tables, pools, buffers, sems_ref),
        Softmax(plan, floats_ref, q_ref, peak_ref, total_ref, acc_ref, has_soft_cap),
        turn_ref,
        out_ref,
        lse_ref,
    )
