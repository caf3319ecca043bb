"""Static sizes of one launch of the Hopper kernel, and what it refuses.

Invariants:
  * A tile of the ring is a whole number of TMA pieces, and a piece never crosses a block.
  * Of sealed blocks a tile is whole runs: tokens that lie side by side in a block (and, of nibbles, in one half of it).
  * Two thread blocks share a multiprocessor at decode shapes: at most half its shared memory each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import Array, KVLayout
from pallas_kernels.sealed import SealedLayout

NUM_CORES = 132  # of H100 and H200; decides the number of splits only
SMEM_BYTES = 227 * 1024
MAX_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one launch.

    Attributes:
      rows, query_len, num_q_heads, num_kv_heads, head_dim, block_size, num_blocks, dtype: the problem.
      head_columns: query heads of one kv head, padded to a multiple of 8.
      query_tile: query positions of one thread block.
      tile: tokens of one stage of the ring.
      stages: depth of the ring.
      splits: parts of the sequence served by different thread blocks.
    """

    rows: int
    query_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: Any
    head_columns: int
    query_tile: int
    tile: int
    stages: int
    splits: int

    @property
    def group(self) -> int:
        """Query heads of one kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def columns(self) -> int:
        """Columns of S^T: wgmma's N."""
        return self.head_columns * self.query_tile

    @property
    def value_width(self) -> int:
        """Columns [2 * head_dim - value_width, 2 * head_dim) of a token that V^T takes: head_dim, up to 64s."""
        return -(-self.head_dim // 64) * 64

    @property
    def swizzle(self) -> int:
        """Bytes of a row of the SMEM tiles: the widest that K and V both fill."""
        return next(s for s in (128, 64, 32) if self.head_dim % (s // 2) == 0)

    @property
    def query_tiles(self) -> int:
        """Query tiles of a row."""
        return -(-self.query_len // self.query_tile)

    @property
    def piece(self) -> int:
        """Tokens of one TMA copy: what a tile and a block have in common."""
        return math.gcd(self.tile, self.block_size)

    @property
    def copies(self) -> int:
        """TMA copies of a tile."""
        return self.tile // self.piece

    def keys_before(self, position: Array) -> Array:
        """Keys 0 <= i < keys_before that a query at `position` sees, but for the window."""
        return position + 1

    def tiles_of(self, first: Array, last: Array) -> tuple[Array, Array]:
        """Tiles begin <= t < end that hold the keys first <= i < last."""
        tile = jnp.int32(self.tile)
        return lax.div(first, tile), lax.div(last + self.tile - 1, tile)


def make_plan(
    layout: KVLayout, q_shape: tuple[int, ...], max_blocks: int, splits: int | None = None
) -> Plan:
    """Chooses the sizes for a problem, or refuses it.

    Args:
      layout: the pool.
      q_shape: [row, q_pos, q_head, head_dim].
      max_blocks: columns of the block tables; bounds the number of splits.
      splits: overrides the number of splits.

    Raises:
      NotImplementedError: the message names what is supported.
    """
    rows, query_len, num_q_heads, head_dim = q_shape
    head_columns = -(-num_q_heads // layout.num_kv_heads // 8) * 8
    for name, value, good, supported in (
        ("format", layout.format.name, layout.format.itemsize == 2, "bfloat16, float16"),
        ("head_dim", head_dim, head_dim in range(32, 257, 16), "multiples of 16 from 32 to 256"),
        ("block_size", layout.block_size, layout.block_size % 8 == 0, "multiples of 8"),
        ("query heads per kv head", head_columns, head_columns <= 64, "at most 64"),
    ):
        if not good:
            raise NotImplementedError(f"hopper: {name}: supported are {supported}; got {value}")
    query_tile = min(query_len, max(1, 32 // head_columns))
    columns = query_tile * head_columns
    tile = 128 if head_dim <= 64 and columns <= 16 else 64
    # Two thread blocks share a multiprocessor where a few columns leave room for it.
    budget = SMEM_BYTES // (2 if columns <= 16 and head_dim <= 128 else 1) - 1024
    width = -(-head_dim // 64) * 64
    fixed = columns * (width * (2 + 4 + 4) + tile * 2 + 4) + 3 * 1024
    stages = min(6, (budget - fixed) // (tile * 2 * head_dim * 2))
    blocks = rows * layout.num_kv_heads * -(-query_len // query_tile)
    if splits is None:
        splits = choose_splits(blocks, max_blocks * layout.block_size // (4 * tile))
    return Plan(
        rows, query_len, num_q_heads, layout.num_kv_heads, head_dim, layout.block_size,
        layout.num_blocks, layout.format.dtype, head_columns, query_tile, tile, stages, splits,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CodePlan(Plan):
    """Static sizes of one launch over sealed blocks; `dtype` is what the codes become.

    Attributes:
      codes: the layout of the sealed blocks.
    """

    codes: SealedLayout

    @property
    def group_span(self) -> int:
        """Tokens that whole tiles cover: of nibbles a block, since a tile takes its share of both halves."""
        return self.block_size if self.codes.format.bits < 8 else self.tile

    @property
    def parts(self) -> int:
        """Tiles of a span."""
        return self.group_span // self.tile

    @property
    def run(self) -> int:
        """Tokens of a tile that lie side by side in a block."""
        if self.parts > 1:
            return self.tile // 2
        return min(self.tile, self.block_size)

    @property
    def num_runs(self) -> int:
        """Runs of a tile."""
        return self.tile // self.run

    @property
    def num_key_blocks(self) -> int:
        """Blocks of a tile: so many scales has a channel of K in it."""
        return max(1, self.tile // self.block_size)

    @property
    def code_rows(self) -> int:
        """Rows of codes of a tile."""
        return self.tile * self.codes.format.bits // 8

    @property
    def copies(self) -> int:
        """TMA copies of a tile: codes, K's scales and centres, V's scales."""
        return 2 * self.num_key_blocks + self.num_runs * self.codes.num_value_groups

    def keys_before(self, position: Array) -> Array:
        """As `Plan.keys_before`: those of the blocks before the query's own."""
        return lax.div(position, jnp.int32(self.block_size)) * self.block_size

    def tiles_of(self, first: Array, last: Array) -> tuple[Array, Array]:
        """As `Plan.tiles_of`; none where first == last, as it is when the window ends inside a query's own block."""
        span = jnp.int32(self.group_span)
        begin = lax.div(first, span) * self.parts
        end = lax.div(last + self.group_span - 1, span) * self.parts
        return begin, jnp.where(first < last, end, begin)


def make_code_plan(
    layout: SealedLayout, q_shape: tuple[int, ...], max_blocks: int, splits: int | None = None
) -> CodePlan:
    """Chooses the sizes for a problem over sealed blocks, or refuses it.

    Args:
      layout: the pool.
      q_shape, max_blocks, splits: as in `make_plan`.

    Raises:
      NotImplementedError: the message names what is supported.
    """
    rows, query_len, num_q_heads, head_dim = q_shape
    head_columns = -(-num_q_heads // layout.num_kv_heads // 8) * 8
    size, groups, tile = layout.block_size, layout.num_value_groups, 64
    num_scales = math.prod(layout.value_affine_shape)
    multiple, most = size % tile == 0, 32  # 64 columns spill registers
    blocks = "multiples of 64" if layout.format.bits < 8 else "16, 32 and multiples of 64"
    for name, value, good, supported in (
        ("head_dim", head_dim, head_dim in (64, 128), "64 and 128"),  # TMA: 256 codes a row at most
        ("block_size", size, multiple or (layout.format.bits == 8 and size in (16, 32)), blocks),
        ("query heads per kv head times value groups", head_columns * groups,
         head_columns * groups <= most, f"at most {most}, heads in eights"),
        ("scales of V in the pool", num_scales, 64 <= num_scales < 2**31, "64 to 2**31 - 1"),
    ):  # fmt: skip
        if not good:
            raise NotImplementedError(
                f"hopper: {layout.format.name}: {name}: supported are {supported}; got {value}"
            )
    query_tile = min(query_len, max(1, most // (head_columns * groups)))
    plan = CodePlan(
        rows, query_len, num_q_heads, layout.num_kv_heads, head_dim, size, layout.num_blocks,
        jnp.dtype(jnp.bfloat16), head_columns, query_tile, tile, 1, 1, layout,
    )  # fmt: skip
    columns = plan.columns
    budget = SMEM_BYTES // (2 if columns <= 16 else 1) - 1024
    fixed = columns * (head_dim * (2 + 4 + 4 + 2 * plan.num_key_blocks) + groups * tile * 2 + 4)
    fixed += tile * 2 * head_dim * 2 + 4 * 1024
    stage = plan.code_rows * 2 * head_dim + 2 * plan.num_runs * groups * tile
    stage += 2 * plan.num_key_blocks * layout.num_key_rows * head_dim
    if splits is None:
        blocks_at_once = rows * layout.num_kv_heads * plan.query_tiles
        splits = choose_splits(blocks_at_once, max_blocks * size // (4 * tile))
    return dataclasses.replace(plan, stages=min(6, (budget - fixed) // stage), splits=splits)


def choose_splits(blocks: int, most: int) -> int:
    """The fewest splits (at most `most`) that keep the last wave of thread blocks nearly full."""
    slots = 2 * NUM_CORES
    fill = [blocks * s / slots for s in range(1, max(1, min(most, MAX_SPLITS)) + 1)]
    filled = [waves / math.ceil(waves) for waves in fill]
    return next(s for s, share in enumerate(filled, 1) if share >= 0.85 * max(filled))
