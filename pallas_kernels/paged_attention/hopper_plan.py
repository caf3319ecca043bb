"""Static sizes of one launch of the Hopper kernel, and what it refuses.

Invariants:
  * A tile of the ring is a whole number of TMA pieces, and a piece never crosses a block.
  * Two thread blocks share a multiprocessor at decode shapes: at most half its shared memory each.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_kernels.layout import KVLayout

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


def choose_splits(blocks: int, most: int) -> int:
    """The fewest splits (at most `most`) that keep the last wave of thread blocks nearly full."""
    slots = 2 * NUM_CORES
    fill = [blocks * s / slots for s in range(1, max(1, min(most, MAX_SPLITS)) + 1)]
    filled = [waves / math.ceil(waves) for waves in fill]
    return next(s for s, share in enumerate(filled, 1) if share >= 0.85 * max(filled))
