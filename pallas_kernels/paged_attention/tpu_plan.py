"""The static side of the TPU kernel: how one call is cut into tiles and chunks, and what it refuses.

Words: a *tile* is the run of query positions one grid step answers; a *chunk* is the run of blocks fetched
together and attended to at once; *queries* are the rows of the score matrix of one kv head: the query
positions of a tile times the query heads that share the kv head (q_pos major).
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import KVLayout
from pallas_kernels.sealed import SealedLayout

LANES = 128
VMEM_LIMIT_BYTES = 64 * 2**20
SUPPORTED = (
    "float32 or bfloat16 stores, block_size a multiple of 8, head_dim a multiple of 8 up to 256"
)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Limits that trade VMEM, code size and latency; the defaults fit v5e, v6e and v5p.

    Attributes:
      chunk_bytes: one of the two buffers; wide enough to hide the latency of HBM.
      max_chunk_len: tokens per chunk in decode.
      max_chunk_len_wide: the same where a tile has more than `wide_queries` queries; bounds the score matrix.
      max_chunk_blocks: copies started per chunk; they are unrolled.
      max_queries: score rows per kv head and tile.
      wide_queries: up to here the kv heads of a chunk are unrolled, so that their latencies overlap.
      smem_table_bytes: larger tables stay in HBM and visit SMEM row by row.
      num_cores: TensorCores that share the rows where they divide evenly (2 on v4 and v5p).
    """

    chunk_bytes: int = 2 * 2**20
    max_chunk_len: int = 2048
    max_chunk_len_wide: int = 512
    max_chunk_blocks: int = 64
    max_queries: int = 256
    wide_queries: int = 32
    smem_table_bytes: int = 256 * 2**10
    num_cores: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything the kernel knows at trace time.

    Attributes:
      num_cores, rows_per_core: how the rows of the batch are shared out.
      num_tiles, tile_len: tiles per row, query positions per tile.
      num_kv_heads, group, head_dim: kv heads, query heads per kv head, width of K and of V.
      block_size, num_blocks, max_blocks: tokens per block, blocks of the pool, columns of the table.
      chunk_blocks: blocks fetched together.
      dtype: the number type of K and V, also where the pool holds bits.
      compute_dtype: the type both operands of a matrix product have.
      unroll_heads: the kv heads of a chunk are unrolled.
      table_in_smem: the whole table is prefetched; else it visits SMEM row by row.
      codes: the layout of the codes, where the kernel reads sealed blocks; else None.
    """

    num_cores: int
    rows_per_core: int
    num_tiles: int
    tile_len: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    num_blocks: int
    max_blocks: int
    chunk_blocks: int
    dtype: np.dtype
    compute_dtype: np.dtype
    unroll_heads: bool
    table_in_smem: bool
    codes: SealedLayout | None = None

    @property
    def chunk_len(self) -> int:
        """Tokens per chunk; a multiple of 128."""
        return self.chunk_blocks * self.block_size

    @property
    def num_queries(self) -> int:
        """Rows of one kv head's score matrix."""
        return self.tile_len * self.group

    @property
    def lse_width(self) -> int:
        """`num_queries` rounded up to whole lanes."""
        return round_up(self.num_queries, LANES)

    @property
    def table_width(self) -> int:
        """Columns of the table in whole lanes, where it visits SMEM row by row."""
        return LANES if self.table_in_smem else round_up(self.max_blocks, LANES)

    @property
    def key_width(self) -> int:
        """Lanes of the K operand, from lane 0.  Where K ends inside a register q is zero past head_dim."""
        return min(round_up(self.head_dim, LANES), 2 * self.head_dim)

    @property
    def value_start(self) -> int:
        """First lane of the V operand: the start of the register V begins in, so no lane is moved."""
        return self.head_dim // LANES * LANES

    @property
    def value_width(self) -> int:
        """Lanes of the V operand; its last `head_dim` are V."""
        return 2 * self.head_dim - self.value_start


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def make_plan(
    q_shape: tuple[int, ...],
    q_dtype: np.dtype,
    layout: KVLayout | SealedLayout,
    max_blocks: int,
    tuning: Tuning,
) -> Plan:
    """Returns the plan of one call.

    Args:
      q_shape: [row, q_pos, q_head, head_dim].
      q_dtype: dtype of q.
      layout: the pool's layout.
      max_blocks: columns of the block table.
      tuning: the limits.

    Raises:
      NotImplementedError: the target cannot do this; the message says what it can.
    """
    rows, query_len, num_q_heads, head_dim = q_shape
    codes = layout if isinstance(layout, SealedLayout) else None
    if isinstance(layout, SealedLayout):
        check_codes_supported(layout)
        dtype, exact = layout.codes_dtype, q_dtype == jnp.bfloat16
    else:
        check_supported(layout)
        dtype, exact = layout.format.dtype, layout.format.dtype == q_dtype == jnp.bfloat16
    group = num_q_heads // layout.num_kv_heads
    tile_len = _tile_len(query_len, group, tuning)
    is_wide = tile_len * group > tuning.wide_queries
    num_cores = 1 if rows % tuning.num_cores else tuning.num_cores
    return Plan(
        num_cores=num_cores,
        rows_per_core=rows // num_cores,
        num_tiles=-(-query_len // tile_len),
        tile_len=tile_len,
        num_kv_heads=layout.num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        max_blocks=max_blocks,
        chunk_blocks=_chunk_blocks(layout, max_blocks, is_wide, tuning),
        dtype=dtype,
        compute_dtype=jnp.dtype(jnp.bfloat16 if exact else jnp.float32),
        unroll_heads=not is_wide or codes is not None,
        table_in_smem=rows * max_blocks * 4 <= tuning.smem_table_bytes,
        codes=codes,
    )


def check_supported(layout: KVLayout) -> None:
    """Refuses, before any launch, what the TPU kernels cannot do.

    Raises:
      NotImplementedError: names the value and what is supported.
    """
    if layout.format.name not in ("float32", "bfloat16"):
        raise NotImplementedError(
            f"format {layout.format.name} on tpu: Mosaic has no loads of it; supported are {SUPPORTED}"
        )
    if layout.block_size % 8:
        raise NotImplementedError(
            f"block_size {layout.block_size} on tpu: supported are {SUPPORTED}"
        )
    if layout.head_dim % 8 or layout.head_dim > 256:
        raise NotImplementedError(f"head_dim {layout.head_dim} on tpu: supported are {SUPPORTED}")


def check_codes_supported(layout: SealedLayout) -> None:
    """Refuses, before any launch, sealed blocks that the TPU kernels cannot read.

    Raises:
      NotImplementedError: names the value and what is supported.
    """
    tile = 32 * 8 // layout.format.bits  # tokens of a whole tile of codes
    if layout.block_size % tile:
        raise NotImplementedError(
            f"block_size {layout.block_size} with {layout.format.name} on tpu: expected a multiple of {tile}"
        )
    if layout.head_dim not in (64, 128, 256):
        raise NotImplementedError(
            f"head_dim {layout.head_dim} with {layout.format.name} on tpu: supported are 64, 128, 256"
        )


def _tile_len(query_len: int, group: int, tuning: Tuning) -> int:
    """Returns query positions per tile: all of them, or a power of two that keeps max_queries."""
    most = max(1, tuning.max_queries // group)
    return query_len if query_len <= most else 1 << (most.bit_length() - 1)


def _chunk_blocks(
    layout: KVLayout | SealedLayout, max_blocks: int, is_wide: bool, tuning: Tuning
) -> int:
    """Returns blocks per chunk: chunk_bytes worth, within the limits, whole lanes of tokens."""
    bs = layout.block_size
    step = LANES // math.gcd(bs, LANES)
    bits = layout.format.bits if isinstance(layout, SealedLayout) else 8 * layout.format.itemsize
    block_bytes = layout.num_kv_heads * bs * 2 * layout.head_dim * bits // 8
    max_len = tuning.max_chunk_len_wide if is_wide else tuning.max_chunk_len
    blocks = min(
        tuning.chunk_bytes // block_bytes,
        max_len // bs,
        tuning.max_chunk_blocks,
        round_up(max_blocks, step),
    )
    return max(step, blocks // step * step)
