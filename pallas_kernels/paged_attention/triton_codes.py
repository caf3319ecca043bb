"""The Triton kernel's body over sealed blocks: codes become exact bfloat16 numbers, scales go to the other operand.

One step of the loop is one block (a part of it where the block is large), so K's scales are read once a block::

    codes  [block, kv_head, row, K | V]   two channels a 16-bit word, 16 bytes a thread
       |  shifts, integer to bfloat16 (exact: a code has 8 bits at most)
       |     8 bits: one tile of keys            [row]
       |     4 bits: two tiles, low and high     [row], [row + block_size / 2]       nothing is interleaved
       v
    scores  = (q * key_scale) . codes  +  q . (centre + key_scale / 2)      the second: one float32 number a query and block
    weights = exp2(scores - running peak)
    out[g]  = out[g] * shrink + (weights * value_scale[g]) . codes of group g           one product a group of V's channels

Invariants:
  * Only sealed blocks before a query's own are read: loop bounds are whole blocks, so no code is masked but padding.
  * The codes are exact; q * scale and weights * scale are rounded to bfloat16 once, or are three bfloat16 numbers for a float32 q.
  * The centre never meets a matrix product: it may be hundreds of times what the codes spell.
  * A float8 code is moved into a float16 by integer shifts and stands for 2**-8 of itself there (exact, denormals too),
    so no target needs instructions for float8; the 2**8 goes into the scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layout import Array
from pallas_kernels.paged_attention.triton_ops import KNOBS, LN2, LOG2E, dot, read_knob, spread
from pallas_kernels.paged_attention.triton_plan import (
    Plan,
    Tiling,
    choose_splits,
    power_of_two,
    terms_of,
)
from pallas_kernels.sealed import SealedLayout, SealedStore

_FLOAT8_UNIT = 256.0  # what a float8 code is divided by while its bits are those of a float16


@dataclasses.dataclass(frozen=True)
class CodePlan(Plan):
    """The static side of a call over sealed blocks.

    Attributes:
      codes: the layout of the sealed blocks.
    """

    codes: SealedLayout

    @property
    def halves(self) -> int:
        """Tiles of keys that one tile of codes unpacks to."""
        return 8 // self.codes.format.bits

    @property
    def block_rows(self) -> int:
        """Rows of codes of one head of a block."""
        return self.codes.block_size // self.halves

    @property
    def tile_rows(self) -> int:
        """Rows of codes of one step."""
        return self.tiling.keys // self.halves

    @property
    def parts(self) -> int:
        """Steps of one block."""
        return pl.cdiv(self.block_rows, self.tile_rows)

    @property
    def unit(self) -> float:
        """What the codes must be multiplied by, besides their scale."""
        return _FLOAT8_UNIT if self.codes.format.is_float else 1.0

    def key_range(
        self, tile: Array, kv_len: Array, q_len: Array, window: Any
    ) -> tuple[Array, Array]:
        """Keys [first, end) in whole blocks, those that some query of the tile sees a key of."""
        size = self.codes.block_size
        first, end = super().key_range(tile, kv_len, q_len, window)
        end = jnp.maximum(end - 1, 0) // size * size  # end - 1 is the tile's last query
        return jnp.minimum(first // size * size, end), end

    def steps(self, first: Array, end: Array) -> tuple[Array, Array, Array]:
        """(first step, end step, steps of one split) of a range of whole blocks."""
        first_step = first // self.codes.block_size * self.parts
        end_step = end // self.codes.block_size * self.parts
        return first_step, end_step, pl.cdiv(end_step - first_step, self.tiling.num_splits)


def choose_code_tiling(
    q_shape: tuple[int, ...], q_dtype: Any, layout: SealedLayout, max_keys: int
) -> Tiling:
    """Returns the tiling for a call over sealed blocks; as `choose_tiling`, read from ptxas."""
    rows, query_len, num_q_heads, head_dim = q_shape
    packed = query_len * num_q_heads // layout.num_kv_heads
    halves, wide = 8 // layout.format.bits, head_dim > 128
    narrow_q = terms_of(q_dtype, jnp.bfloat16) == 1
    if wide or (not narrow_q and head_dim > 64):
        most = 16
    else:
        most = 64 if narrow_q and layout.format.is_float else 32  # 64: centres and nibbles spill
    query_rows = min(max(16, power_of_two(packed)), most)
    keys = 64 if query_rows == 16 and not wide else 32
    keys = min(keys, halves * max(16, power_of_two(layout.block_size // halves)))
    warps = 4 if narrow_q and (query_rows == 16 or (query_rows == 32 and head_dim <= 64)) else 8
    if not narrow_q and (wide or (query_rows == 32 and layout.format.name == "int8")):
        warps = 4  # 8: sm_90 spills; of wide heads in 4 bits 4 still spill, a sixteenth to a seventh of that
    splits = choose_splits(
        rows * layout.num_kv_heads * pl.cdiv(packed, query_rows),
        query_rows,
        pl.cdiv(max_keys, keys),
        head_dim,
    )
    return Tiling(query_rows, keys, splits, warps, num_stages=2)


def check_codes(layout: SealedLayout) -> None:
    """Raises NotImplementedError for sealed blocks the kernel cannot read."""
    if layout.head_dim % 2 or layout.value_group % 2:
        raise NotImplementedError(
            "triton paged attention over codes supports even head_dim and value groups, "
            f"got {layout.head_dim} and {layout.value_group}"
        )


def code_operands(store: SealedStore) -> tuple[Array, Array, Array]:
    """Returns codes u16[layer, block, kv_head, row, head_dim], key_affine, value_affine: what the kernel takes.

    Two codes a word: Pallas computes offsets in 32 bits up to 4 GiB, which overflow past 2 GiB if an element is a byte.  XLA
    makes the views without a copy, also that of a lone affine row stored as two, with the padding behind it.
    """
    layout = store.layout
    codes = store.codes.reshape(*store.codes.shape[:-1], -1, 2)
    key_affine, value_affine = (
        x.reshape(*x.shape[:2], rows, -1)
        for x, rows in (
            (store.key_affine, layout.num_key_rows),
            (store.value_affine, layout.num_value_groups),
        )
    )
    return lax.bitcast_convert_type(codes, jnp.uint16), key_affine, value_affine


def attend_codes(
    # in
    q_ref: Any,  # q_dtype[row, q_pos, q_head, head_dim]
    codes_ref: Any,  # u16[layer, block, kv_head, row, head_dim]: K pairs, then V pairs
    key_affine_ref: Any,  # bf16 or bits[layer, block, key row, kv_head * head_dim, or more]
    value_affine_ref: Any,  # bf16 or bits[layer, block, group, kv_head * block_size, or more]
    layer_ref: Any,  # i32[]
    tables_ref: Any,  # i32[row, column]
    kv_lens_ref: Any,  # i32[row]
    q_lens_ref: Any,  # i32[row]
    # in: traced knobs, then out
    *refs: Any,  # names of [], out [(split,) row, q_pos, q_head, head_dim], lse [(split,) row, q_pos, q_head]
    plan: CodePlan,
    constants: dict[str, Any],
    names: tuple[str, ...],
) -> None:
    """One split of one tile of queries of one kv head of one row; as `triton._attend`."""
    *knob_refs, out_ref, lse_ref = refs
    knobs = constants | {n: read_knob(n, r) for n, r in zip(names, knob_refs, strict=True)}
    scale, soft_cap, window = (knobs[name] for name in KNOBS)
    tiling, layout, head_dim = plan.tiling, plan.codes, plan.head_dim
    size, group_width = layout.block_size, layout.value_group
    kv_head, tile = pl.program_id(0) // plan.num_tiles, pl.program_id(0) % plan.num_tiles
    split, row = pl.program_id(1), pl.program_id(2)

    layer = layer_ref[...]
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]
    first_step, end_step, steps = plan.steps(*plan.key_range(tile, kv_len, q_len, window))
    low = first_step + split * steps
    high = jnp.minimum(low + steps, end_step)

    packed = tile * tiling.query_rows + jnp.arange(tiling.query_rows, dtype=jnp.int32)
    query = packed // plan.group  # [query_rows]
    head = kv_head * plan.group + packed % plan.group  # [query_rows]
    inside = query < plan.query_len
    # Padding queries sit at -1, where they see nothing.
    query_pos = jnp.where(query < q_len, kv_len - q_len + query, -1)[:, None]
    own_block = jnp.where(query_pos < 0, 0, query_pos // size * size)
    columns = jnp.arange(plan.width, dtype=jnp.int32)[None, :]
    at = spread((query[:, None], head[:, None], columns))
    q = plgpu.load(
        q_ref.at[(row, *at)], mask=(query_pos >= 0) & (columns < head_dim), other=0.0
    ).astype(jnp.float32)
    terms = terms_of(q_ref.dtype, jnp.bfloat16)

    def step(index: Array, carry: Any) -> Any:
        peak, total, sums = (
            carry  # base-2 logarithm of the largest weight, sum of weights, [group] weighted V
        )
        column, rows = index // plan.parts, jnp.arange(plan.tile_rows, dtype=jnp.int32)
        rows += index % plan.parts * plan.tile_rows
        block = jnp.clip(tables_ref[row, column], 0, layout.num_blocks - 1)
        read = _Block(plan, layer, block, kv_head, rows)
        key_scale = read.key_affine(key_affine_ref, 0)
        offset: Any = 0.0
        if not layout.symmetric_keys:
            middle = read.key_affine(key_affine_ref, 1) + key_scale * 0.5
            offset = jnp.sum(q * middle, axis=1, keepdims=True)
        scaled = q * (key_scale * plan.unit)
        keys = read.codes(codes_ref, 0, head_dim)
        scores, seens = [], []
        for half, codes in enumerate(keys):
            s = (dot(scaled, codes, 1, terms) + offset) * scale
            if soft_cap is not None:
                s = soft_cap * jnp.tanh(s / soft_cap)
            position = (column * size + half * plan.block_rows + rows)[None, :]
            seen = (rows < plan.block_rows)[None, :] & (position < own_block)
            if window is not None:
                seen &= position > query_pos - window
            scores.append(jnp.where(seen, s * LOG2E, -jnp.inf))
            seens.append(seen)
        new_peak = peak
        for s in scores:
            new_peak = jnp.maximum(new_peak, jnp.max(s, axis=1))
        safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        shrink = jnp.exp2(peak - safe)
        weights = [jnp.exp2(s - safe[:, None]) for s in scores]
        total = total * shrink + sum(jnp.sum(w, axis=1) for w in weights)
        new_sums = []
        for group, acc in enumerate(sums):
            acc = acc * shrink[:, None]
            values = read.codes(codes_ref, head_dim + group * group_width, group_width)
            for half, codes in enumerate(values):
                value_scale = read.value_scale(value_affine_ref, group, half)
                scaled_weights = jnp.where(seens[half], weights[half] * value_scale, 0.0)
                acc += dot(scaled_weights, codes, 0, terms)
            new_sums.append(acc)
        return new_peak, total, tuple(new_sums)

    acc = jnp.zeros((tiling.query_rows, _padded(group_width)), jnp.float32)
    peak = jnp.full((tiling.query_rows,), -jnp.inf, jnp.float32)
    total = jnp.zeros((tiling.query_rows,), jnp.float32)
    sums = (acc,) * layout.num_value_groups
    peak, total, sums = lax.fori_loop(low, high, step, (peak, total, sums))

    empty = total == 0  # not "total > 0": a NaN that a query sees must reach the output
    safe_total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, (peak + jnp.log2(safe_total)) * LN2)
    # An idle split writes nothing (the combine does not read it); a lone one writes its zeros.
    written = inside & ((low < high) | (tiling.num_splits == 1))
    prefix = (split,) if tiling.num_splits > 1 else ()
    channel = jnp.arange(_padded(group_width), dtype=jnp.int32)[None, :]
    for group, acc in enumerate(sums):
        at = spread((query[:, None], head[:, None], channel + group * group_width))
        plgpu.store(
            out_ref.at[(*prefix, row, *at)],
            (acc / safe_total[:, None]).astype(out_ref.dtype),
            mask=written[:, None] & (channel < group_width),
        )
    plgpu.store(lse_ref.at[(*prefix, row, query, head)], lse, mask=written)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Reads of one step: rows of codes of one head of one block, and their scales."""

    plan: CodePlan
    layer: Array
    block: Array
    kv_head: Array
    rows: Array  # i32[tile_row], rows of codes

    def codes(self, ref: Any, start: int, width: int) -> list[Array]:
        """Returns the codes of `width` channels from `start` on, bf16[tile_row, padded width] a tile of keys."""
        padded = _padded(width)
        words = jnp.arange(padded // 2, dtype=jnp.int32)[None, :]
        mask = None
        if padded != width or self.plan.block_rows % self.plan.tile_rows:
            mask = (self.rows < self.plan.block_rows)[:, None] & (words < width // 2)
        row, word = spread((self.rows[:, None], words + start // 2))
        index = (self.layer, self.block, self.kv_head, row, word)
        x = plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)
        shape = (self.plan.tile_rows, padded)
        return [jnp.stack(pair, axis=-1).reshape(shape) for pair in self._numbers(x)]

    def _numbers(self, words: Array) -> list[list[Array]]:
        """Returns the codes in words u16[row, word] as bf16[row, word]: a pair of channels for each tile of keys."""
        if self.plan.codes.format.is_float:
            # Sign, then (after a copy of the sign that is masked out) the 7 other bits at the top of 5 + 10.
            signed = lax.bitcast_convert_type(words, jnp.int16)
            moved = (x >> 1 & jnp.int16(-0x4080) for x in (signed << 8, signed))
            pairs = [[lax.bitcast_convert_type(x, jnp.float16) for x in moved]]
        else:
            bits, wide = self.plan.codes.format.bits, words.astype(jnp.int32)
            pairs = [
                [(wide << 32 - bits * (half + 1) - start) >> 32 - bits for start in (0, 8)]
                for half in range(self.plan.halves)
            ]
        return [[x.astype(jnp.float32).astype(jnp.bfloat16) for x in pair] for pair in pairs]

    def key_affine(self, ref: Any, kind: int) -> Array:
        """Returns K's scales (kind 0) or centres (1), f32[1, width], zero past head_dim."""
        head_dim = self.plan.head_dim
        columns = jnp.arange(self.plan.width, dtype=jnp.int32)
        mask = columns < head_dim if head_dim != self.plan.width else None
        index = (self.layer, self.block, kind, self.kv_head * head_dim + columns)
        x = plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)
        return _float32(x)[None, :]

    def value_scale(self, ref: Any, group: int, half: int) -> Array:
        """Returns V's scales of one group of channels, f32[1, tile_row]."""
        size, block_rows = self.plan.codes.block_size, self.plan.block_rows
        mask = self.rows < block_rows if block_rows % self.plan.tile_rows else None
        token = self.kv_head * size + half * block_rows + self.rows
        x = plgpu.load(
            ref.at[self.layer, self.block, group, token],
            mask=mask,
            other=None if mask is None else 0,
        )
        return (_float32(x) * self.plan.unit)[None, :]


def _padded(width: int) -> int:
    """What Triton's tensors and tensor cores want."""
    return max(16, power_of_two(width))


def _float32(x: Array) -> Array:
    """Returns bfloat16 numbers, or their bits, as float32."""
    x = lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
    return x.astype(jnp.float32)
