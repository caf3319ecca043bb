"""How the Triton kernels cut a call of paged attention up: static sizes, and which keys each program reads.

Invariants:
  * Everything here follows from shapes, dtypes and lengths, never from block ids.
  * Both kernels compute the same ranges from the same lengths: the second reads exactly the parts the first wrote.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layout import Array, KVLayout

_MAX_SPLITS = 128
_PROGRAMS = 528  # programs that fill the chip: two on each of the 132 multiprocessors of an H200, twice over
_COMBINE_ELEMENTS = 4096  # float32 parts a combine program holds, unless its splits alone need more


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one attention call is cut up.

    Attributes:
      query_rows: rows of a tile of packed queries; a power of two, at least 16 (tensor cores).
      keys: keys of one step of the loop.
      num_splits: programs that share the keys of one tile of queries.
      num_warps, num_stages: of the attention kernel.
    """

    query_rows: int
    keys: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tiling(
    q_shape: tuple[int, ...], q_dtype: Any, layout: KVLayout, max_keys: int
) -> Tiling:
    """Returns the tiling for a call; depends on static shapes and dtypes only.

    The sizes are the largest that neither spill a register nor keep two decode programs from sharing a
    multiprocessor, on sm_80 and sm_90, as read from ptxas (`benchmarks/static_gpu.py`).
    """
    rows, query_len, num_q_heads, head_dim = q_shape
    packed = query_len * num_q_heads // layout.num_kv_heads
    query_rows, wide = max(16, power_of_two(packed)), head_dim > 128
    warps = 4
    if layout.format.itemsize == 4:
        query_rows = min(query_rows, 32)
        keys = 16 if wide or query_rows > 16 else 32
        warps = (
            8 if query_rows == 32 and head_dim > 64 else 4
        )  # 4: sm_90 spills; 8 at 64: sm_80 does
    elif terms_of(q_dtype, layout.format.dtype) > 1:
        query_rows = min(query_rows, 16 if wide else 32)
        keys = 32 if wide or query_rows > 16 else 64
    elif wide:
        query_rows, keys = min(query_rows, 64), 32
        warps = 8 if query_rows >= 32 else 4  # 4 at 32 rows: sm_90 spills
    else:
        query_rows = min(query_rows, 128)
        many_blocks = query_rows == 16 and layout.block_size < 16 and head_dim > 64
        keys = 32 if query_rows == 64 or many_blocks else 64  # 64 in blocks of 8: sm_80 spills
        warps = 8 if query_rows == 128 else 4
    tiles = rows * layout.num_kv_heads * pl.cdiv(packed, query_rows)
    splits = choose_splits(tiles, query_rows, pl.cdiv(max_keys, keys), head_dim)
    return Tiling(query_rows, keys, splits, warps, num_stages=2)


def choose_splits(tiles: int, query_rows: int, max_steps: int, head_dim: int) -> int:
    """Returns how many programs share a tile of queries: enough to fill the chip, no more than have a step each."""
    programs = _PROGRAMS if query_rows <= 32 else _PROGRAMS // 2
    most = min(max_steps, _MAX_SPLITS, 4 * _COMBINE_ELEMENTS // power_of_two(head_dim))
    return max(1, min(pl.cdiv(programs, tiles), most))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a call, and the arithmetic both kernels must agree on."""

    tiling: Tiling
    group: int
    num_kv_heads: int
    query_len: int
    head_dim: int
    max_keys: int
    windowed: bool

    @property
    def num_tiles(self) -> int:
        """Tiles of queries of one (row, kv head)."""
        return pl.cdiv(self.query_len * self.group, self.tiling.query_rows)

    @property
    def width(self) -> int:
        """head_dim padded to what Triton's tensors and tensor cores want."""
        return max(16, power_of_two(self.head_dim))

    @property
    def combine_items(self) -> int:
        """(q_pos, q_head) pairs of one combine program."""
        room = _COMBINE_ELEMENTS // (power_of_two(self.tiling.num_splits) * self.width)
        return min(max(room, 1), power_of_two(self.query_len * self.group * self.num_kv_heads))

    @property
    def combine_elements(self) -> int:
        """float32 parts of one combine program."""
        return self.combine_items * power_of_two(self.tiling.num_splits) * self.width

    def key_range(
        self, tile: Array, kv_len: Array, q_len: Array, window: Any
    ) -> tuple[Array, Array]:
        """Keys [first, end) that some query of the tile sees; empty where it has no query."""
        first_query = tile * self.tiling.query_rows // self.group
        last_query = ((tile + 1) * self.tiling.query_rows - 1) // self.group
        last_query = jnp.minimum(last_query, q_len - 1)
        before = kv_len - q_len  # position of query 0
        end = jnp.where(first_query <= last_query, before + last_query + 1, 0)
        end = jnp.clip(end, 0, self.max_keys)
        first = jnp.maximum(before + first_query - window + 1, 0) if self.windowed else 0
        return jnp.minimum(first, end), end

    def steps(self, first: Array, end: Array) -> tuple[Array, Array, Array]:
        """(first step, end step, steps of one split) of a range of keys."""
        first_step = first // self.tiling.keys
        end_step = pl.cdiv(end, self.tiling.keys)
        return first_step, end_step, pl.cdiv(end_step - first_step, self.tiling.num_splits)


def terms_of(q_dtype: Any, kv_dtype: Any) -> int:
    """How many numbers of the pool's format must stand for one of q, or for one weight.

    One when the formats agree (the weights are rounded to it, as in any half-precision attention) or when
    the pool is float32.  Otherwise three: their sum carries 24 bits of bfloat16, so float32 activations
    lose nothing over a half-precision pool and K and V go to the tensor cores as they are.
    """
    return 1 if q_dtype == kv_dtype or kv_dtype == jnp.float32 else 3


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
