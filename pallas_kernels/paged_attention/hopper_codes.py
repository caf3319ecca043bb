"""The Hopper kernel's tiles of sealed blocks: codes become bfloat16 numbers in SMEM, scales go to the other operand.

::

    HBM                        SMEM                                        registers
    codes          ─TMA→ kv_smem[stage]     [row, K | V] ────────────────→ numbers, exact
                         tile_smem          [token, K | V]  ←─────────────────┘    what both wgmma read
    key_affine     ─TMA→ key_smem[stage]    [run, scale | centre, head_dim] ─→ q^T * scale        q . (centre + scale / 2)
                         scaled_smem        [run * column, head_dim] ←────────────┘                  added to the scores
    value_affine   ─TMA→ value_smem[stage]  [run, group, 64] ─────────────→ P^T * scale, a copy for each group of V's channels
                         p_smem             [group * column, token] ←─────────┘

A tile is 64 tokens.  Of 8 bits they are 64 tokens of one block, or several whole blocks, each with scores of its own from which
its rows are taken.  Of 4 bits they are 32 rows of codes: the low nibbles, then the high ones, half a block further on.

Invariants:
  * Only sealed blocks before a query's own are read.  No code of theirs spells NaN, so V is not cleared: a weight of zero is
    zero after its scale too, NaN or not, and zero times a code is zero.
  * The codes are exact; q * scale and weights * scale are rounded to bfloat16 once.  The centre never meets a tensor core.
  * High nibbles become 16 times themselves (bytes with a mask); the 1/16 is on their rows of scores and of weights.
  * One consumer writes and reads the number tile, so it needs no barrier but those of the warpgroup.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import Array
from pallas_kernels.paged_attention.hopper_kernel import (
    Tiles,
    iota,
    multiply,
    plgpu,
    store_transposed,
    transposed,
)
from pallas_kernels.paged_attention.hopper_plan import CodePlan
from pallas_kernels.sealed import SealedStore

_HIGH_UNIT = 1 / 16  # what the numbers made of high nibbles must be multiplied by
_SLOT = 64  # bfloat16 numbers: TMA writes to multiples of 128 bytes


def code_operands(store: SealedStore) -> dict[str, Array]:
    """Returns the pool's arrays as the kernel takes them; XLA makes these views without a copy."""
    layout = store.layout
    number = jnp.float8_e4m3fn if layout.format.is_float else jnp.int8

    def view(x: Array, dtype: Any, *shape: int) -> Array:
        return lax.bitcast_convert_type(x, dtype).reshape(shape)

    rows, width = layout.codes_shape[-2:]
    key_width = math.prod(layout.key_affine_shape[2:]) // layout.num_key_rows
    return {
        "kv": view(store.codes, number, -1, rows, width),
        "key_affine": view(store.key_affine, jnp.bfloat16, -1, layout.num_key_rows, key_width),
        "value_affine": view(store.value_affine, jnp.bfloat16, -1),
    }


def code_scratch(plan: CodePlan, tiled: Any) -> dict[str, Any]:
    """Returns the SMEM that sealed blocks need: the ring, and the numbers made of one tile."""
    layout, ring = plan.codes, plan.stages
    number = jnp.float8_e4m3fn if layout.format.is_float else jnp.int8
    slots = plan.num_runs * layout.num_value_groups * _SLOT
    columns = plan.num_key_blocks * plan.columns
    return {
        "kv_smem": plgpu.SMEM((ring, plan.code_rows, 2 * plan.head_dim), number),
        "key_smem": plgpu.SMEM(
            (ring, plan.num_key_blocks, layout.num_key_rows, plan.head_dim), jnp.bfloat16
        ),
        "value_smem": plgpu.SMEM((ring, slots), jnp.bfloat16),
        "tile_smem": plgpu.SMEM((plan.tile, 2 * plan.head_dim), plan.dtype, transforms=tiled),
        "scaled_smem": plgpu.SMEM((columns, plan.head_dim), plan.dtype, transforms=tiled),
    }


@dataclasses.dataclass(frozen=True)
class CodeTiles(Tiles):
    """`Tiles` of sealed blocks."""

    plan: CodePlan

    def run_of(self, t: Array, run: int) -> tuple[Array, Array]:
        """Returns (token, offset): where a run of tile t begins in the sequence, and in its block."""
        plan = self.plan
        if plan.parts > 1:
            size, parts = plan.block_size, jnp.int32(plan.parts)
            offset = lax.rem(t, parts) * plan.run + run * (size // 2)
            return lax.div(t, parts) * size + offset, offset
        token = t * plan.tile + run * plan.run
        return token, lax.rem(token, jnp.int32(plan.block_size))

    def fetch(self, t: Array, stage: Array) -> None:
        """Starts the copies of tile t, and of its scales, into a stage of the ring."""
        plan, refs, head = self.plan, self.refs, self.work.head
        layout, base = plan.codes, refs.layer[0] * plan.num_blocks
        groups, full = layout.num_value_groups, refs.full.at[stage]
        rows = plan.code_rows // plan.num_key_blocks
        for index in range(plan.num_key_blocks):
            token, offset = self.run_of(t, index)
            block = base + self.block_of(token)
            plgpu.copy_gmem_to_smem(
                refs.kv.at[block * plan.num_kv_heads + head, pl.ds(offset, rows)],
                refs.kv_smem.at[stage, pl.ds(index * rows, rows)],
                full,
            )
            plgpu.copy_gmem_to_smem(
                refs.key_affine.at[block, :, pl.ds(head * plan.head_dim, plan.head_dim)],
                refs.key_smem.at[stage, index],
                full,
            )
        for run in range(plan.num_runs):
            token, offset = self.run_of(t, run)
            size = math.prod(layout.value_affine_shape[2:])
            first = (base + self.block_of(token)) * size
            first += head * plan.block_size + offset
            for group in range(groups):
                # 128 bytes, the least a copy can be: what follows a short run, or zeros past the pool's end, is not used.
                plgpu.copy_gmem_to_smem(
                    refs.value_affine.at[pl.ds(first + group * (size // groups), _SLOT)],
                    refs.value_smem.at[stage, pl.ds((run * groups + group) * _SLOT, _SLOT)],
                    full,
                )

    def tokens(self, t: Array) -> Array:
        """Returns i32[token, column]: where in the sequence each row of tile t lies."""
        row = iota((self.plan.tile, self.plan.columns), 0)
        if self.plan.parts == 1:
            return row + t * self.plan.tile
        low, high = (self.run_of(t, run)[0] for run in (0, 1))
        return row + jnp.where(row < self.plan.run, low, high - self.plan.run)

    def scores(self, t: Array, stage: Array) -> Array:
        """Returns f32[token, column]: k . q of a tile that has arrived, whose codes become numbers on the way."""
        plan, refs, dim = self.plan, self.refs, self.plan.head_dim
        self.make_numbers(stage, 0, dim if self.in_halves else 2 * dim)
        offsets = [self.scale_queries(stage, index) for index in range(plan.num_key_blocks)]
        plgpu.commit_smem()
        keys, row = refs.tile_smem.at[:, pl.ds(0, dim)], iota((plan.tile, plan.columns), 0)
        out: Any = None
        for index, offset in enumerate(offsets):
            columns = pl.ds(index * plan.columns, plan.columns)
            scaled = transposed(refs.scaled_smem.at[columns])
            scores = multiply(keys, scaled, (plan.tile, plan.columns))
            if plan.code_rows < plan.tile:
                scores *= jnp.where(row < plan.code_rows, 1.0, _HIGH_UNIT)
            if offset is not None:
                scores += lax.broadcast_in_dim(offset, scores.shape, [1])
            out = scores if out is None else jnp.where(row < index * plan.block_size, out, scores)
        return out

    @property
    def in_halves(self) -> bool:
        """Whether V becomes numbers apart from K, which takes fewer registers; its rows must fill those of the layout."""
        return self.plan.head_dim % 128 == 0

    def make_numbers(self, stage: Array, start: int, width: int) -> None:
        """Codes of some columns (of K | V) of one stage of the ring to `tile_smem`."""
        plan, refs, dtype = self.plan, self.refs, self.plan.dtype
        columns = pl.ds(start, width)
        # Rows in registers at a time; of a tile of several blocks fewer, since their products need registers too.
        step = 32 if plan.num_key_blocks == 1 else 16
        for row in range(0, plan.code_rows, step):
            rows = pl.ds(row, step)
            codes = plgpu.layout_cast(refs.kv_smem.at[stage, rows, columns][...], _row_layout())
            if plan.codes.format.is_float:
                numbers = codes.astype(jnp.float16).astype(jnp.float32).astype(dtype)
            elif plan.codes.format.bits == 8:
                numbers = codes.astype(dtype)
            else:  # bytes have no shifts, only bitwise operations
                high = (codes & -16).astype(dtype)  # 16 * high
                both = (codes ^ 8).astype(dtype)  # 16 * high + low + 8
                numbers = both - high - jnp.asarray(8, dtype)
                refs.tile_smem[pl.ds(row + plan.code_rows, step), columns] = high
            refs.tile_smem[rows, columns] = numbers

    def scale_queries(self, stage: Array, index: int) -> Array | None:
        """q times the scales of one block to `scaled_smem`; returns f32[column] q . (centre + scale / 2), or None."""
        plan, refs = self.plan, self.refs
        layout = plgpu.Layout.WGMMA

        def affine(kind: int) -> Array:  # f32[head_dim, column]
            x = plgpu.layout_cast(refs.key_smem.at[stage, index, kind][...], layout.reduce(1))
            x = lax.broadcast_in_dim(x.astype(jnp.float32), (plan.head_dim, plan.columns), [0])
            return plgpu.layout_cast(x, layout)

        q = plgpu.layout_cast(transposed(refs.q_smem)[...], plgpu.Layout.WGMMA_TRANSPOSED)
        q = plgpu.layout_cast(q, layout).astype(jnp.float32)
        scale = affine(0)
        columns = pl.ds(index * plan.columns, plan.columns)
        store_transposed(refs.scaled_smem.at[columns], q * scale)
        if plan.codes.symmetric_keys:
            return None
        return (q * (affine(1) + scale * 0.5)).sum(axis=0)

    def weighted(self, weights: Array, t: Array, stage: Array) -> Array:
        """Returns f32[head_dim, column]: V summed by weights f32[token, column]; gives the stage back to the ring."""
        plan, refs, groups = self.plan, self.refs, self.plan.codes.num_value_groups
        if self.in_halves:
            self.make_numbers(stage, plan.head_dim, plan.head_dim)
        for group in range(groups):
            columns = pl.ds(group * plan.columns, plan.columns)
            scaled = weights * self.value_scales(stage, group)
            scaled = jnp.where(weights == 0.0, jnp.zeros_like(weights), scaled)
            store_transposed(refs.p_smem.at[columns], scaled)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.empty.at[stage])
        values = refs.tile_smem.at[:, pl.ds(plan.head_dim, plan.head_dim)]
        shape = (plan.head_dim, groups * plan.columns)
        sums = multiply(transposed(values), transposed(refs.p_smem), shape)
        if groups == 1:
            return sums
        out: Any = None
        channel = iota((plan.head_dim, plan.columns), 0)
        for group in range(groups):  # of each group's sums only its own channels are meant
            start = group * plan.columns
            part = lax.slice(sums, (0, start), (plan.head_dim, start + plan.columns))
            first = group * plan.codes.value_group
            out = part if out is None else jnp.where(channel < first, out, part)
        return out

    def value_scales(self, stage: Array, group: int) -> Array:
        """Returns f32[token, column]: V's scales of one group of channels of a tile."""
        plan, refs, layout = self.plan, self.refs, plgpu.Layout.WGMMA.reduce(1)
        row = plgpu.broadcasted_iota(jnp.int32, (plan.tile,), 0, layout=layout)
        out: Any = None
        for run in range(plan.num_runs):
            # Its slot, begun so much earlier that row r finds the scale of token r of the tile: no other row is taken.
            slot = (run * plan.codes.num_value_groups + group) * _SLOT
            near = refs.value_smem.at[stage, pl.ds(slot - run * plan.run, plan.tile)]
            x = plgpu.layout_cast(near[...], layout).astype(jnp.float32)
            out = x if out is None else jnp.where(row < run * plan.run, out, x)
        if plan.code_rows < plan.tile:
            out *= jnp.where(row < plan.code_rows, 1.0, _HIGH_UNIT)
        out = lax.broadcast_in_dim(out, (plan.tile, plan.columns), [0])
        return plgpu.layout_cast(out, plgpu.Layout.WGMMA)


def _row_layout() -> Any:
    """Registers of codes and of their numbers: 16 lanes a row of 128, so that neither read nor write meets a bank twice."""
    tiling = plgpu.Tiling(((8, 128), (2, 128), (8,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
