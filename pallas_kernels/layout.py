"""The physical layout of the KV pool, shared by every kernel.

Invariants:
  * One array holds all layers: ``[layer, block, kv_head, block_size, 2 * head_dim]``.  Kernels take the
    whole stack and a layer index; slicing ``pool[layer]`` outside a kernel would copy it.
  * K and V of a token lie side by side on the last axis: ``[..., :head_dim]`` is K, ``[..., head_dim:]`` is V.
    One (block, kv_head) is one contiguous read, one block of all heads is one DMA, and head_dim 64 fills
    the 128 lanes of a TPU.
  * ``NO_BLOCK == num_blocks`` marks an unused table entry.  It is out of range on purpose: a scatter with
    ``mode="drop"`` drops it (JAX would wrap -1 to the last block).  Whoever reads clamps first.

Picture of one block::

    kv[layer, block]           head 0: token 0 [ k k k k | v v v v ]
                                       token 1 [ k k k k | v v v v ]
                                       ...
                               head 1: token 0 [ k k k k | v v v v ]
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How one element of K or V is stored.

    Attributes:
      name: the format's public name.
      dtype: the number type the stored bits stand for.
    """

    name: str
    dtype: np.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize


FORMATS: dict[str, KVFormat] = {
    name: KVFormat(name, jnp.dtype(name)) for name in ("float32", "bfloat16", "float16")
}


def kv_format(name: str) -> KVFormat:
    """Returns the format called `name`.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {sorted(FORMATS)}, got {name!r}")
    return FORMATS[name]


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Static description of the pool array.

    Attributes:
      num_layers, num_blocks, num_kv_heads, block_size, head_dim: sizes of the pool.
      format: the element format.
      as_bits: store elements narrower than 32 bits as unsigned integers of the same width.  XLA:CPU
        widens bfloat16 scatters and gathers to float32 over the whole pool (measured 531 ms against
        15 ms a step); integers are left alone.  Kernels bitcast what they read.
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    format: KVFormat
    as_bits: bool

    @property
    def no_block(self) -> int:
        """The table entry that means "no block here"."""
        return self.num_blocks

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the pool: [layer, block, kv_head, block_size, 2 * head_dim]."""
        return (
            self.num_layers,
            self.num_blocks,
            self.num_kv_heads,
            self.block_size,
            2 * self.head_dim,
        )

    @property
    def dtype(self) -> np.dtype:
        """Number type of the pool array as JAX sees it."""
        itemsize = self.format.itemsize
        return (
            np.dtype(f"uint{8 * itemsize}") if self.as_bits and itemsize < 4 else self.format.dtype
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the pool array, without device padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.format.itemsize


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kv"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class KVStore:
    """The bytes of the cache.

    Attributes:
      kv: layout.dtype[layer, block, kv_head, block_size, 2 * head_dim].  Slots that no sequence has
        written may hold anything, NaN included.
      layout: static description of `kv`.
    """

    kv: Array
    layout: KVLayout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["block_tables", "kv_lens", "q_lens", "positions", "open_ids"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class BatchView:
    """What one call of the model needs to know about its rows.

    Attributes:
      block_tables: i32[row, max_blocks].  Entries at and past ceil(kv_len / block_size) hold NO_BLOCK.
      kv_lens: i32[row].  Tokens the row holds, the new ones of this call included.
      q_lens: i32[row].  New tokens of the row, 0 <= q_len <= kv_len.  0 makes the row a no-op: nothing is
        written and its attention output is zero.
      positions: i32[row, q_pos].  Position of each query, kv_len - q_len + j; 0 in padding (j >= q_len).
      open_ids: i32[row], the open block of each row that has new tokens (quantised stores); None for plain ones.
    """

    block_tables: Array
    kv_lens: Array
    q_lens: Array
    positions: Array
    open_ids: Array | None = None

    @property
    def query_len(self) -> int:
        """Static number of query positions per row, padding included."""
        return self.positions.shape[1]


def encode(layout: KVLayout, x: Array) -> Array:
    """Casts float values to the pool's format and, where it stores bits, to its bits (same shape)."""
    x = x.astype(layout.format.dtype)
    return (
        x if layout.dtype == layout.format.dtype else jax.lax.bitcast_convert_type(x, layout.dtype)
    )


def decode(layout: KVLayout, x: Array) -> Array:
    """Reads pool elements as float32 (same shape).  Inverse of `encode` up to rounding."""
    if layout.dtype != layout.format.dtype:
        x = jax.lax.bitcast_convert_type(x, layout.format.dtype)
    return x.astype(jnp.float32)
