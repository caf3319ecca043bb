"""The physical layout of quantised K and V: sealed blocks as codes, open blocks in full precision.

A block is sealed once, when it fills, and never written again.  Until then its tokens live in a small full-precision pool
of open blocks (a plain `KVStore`), one open block a sequence::

    tokens of a sequence     [ block 0 | block 1 | ... | block n-1 | open block      ]
                               codes     codes           codes       float32/bf16/f16
    block ids from             the block table                       view.open_ids

Sealed arrays, all with the pool's block ids::

    codes         [layer, block, kv_head, block_size, 2 * head_dim]      8 bits: int8, or float8_e4m3fn
                  [layer, block, kv_head, block_size / 2, 2 * head_dim]  4 bits: token i low, token i + block_size/2 high
    key_affine    [layer, block, key rows, kv_head * head_dim]           K: scale (and centre) per channel of the block
    value_affine  [layer, block, groups, kv_head * block_size]           V: scale per token and group of channels

Affine rows fill whole TPU registers, zeros behind their end, and a lone row is stored as two: 64 numbers as [2, 128], 320 as
[2, 256].  Of an array with one row a block, or with rows of other widths, XLA:TPU puts the blocks of a layer side by side into tiles,
and copies all of it, padded, for a kernel that copies blocks.

Invariants:
  * Every array counts in `nbytes`, zeros too; the affine arrays are bfloat16, heads side by side.
  * Flat, a block's affine array is its rows in equal shares, each from the start of its own; nothing reads the zeros.
  * Reading is `quantiser.dequantize_groups` with these arrays; kernels fold the scales into q and into the probabilities.
  * The first and last `num_wide_layers` layers are not quantised: they live in `wide`, a `KVStore` with the same block ids.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantiser
from pallas_kernels.layout import KVLayout, KVStore

Array = jax.Array

_LANES = 128  # numbers of a TPU register


@dataclasses.dataclass(frozen=True)
class SealedFormat:
    """How one element of a sealed block is stored.

    Attributes:
      name: the format's public name.
      bits: per element.
      is_float: codes are float8_e4m3fn, and there are no centres.
    """

    name: str
    bits: int
    is_float: bool = False


SEALED_FORMATS: dict[str, SealedFormat] = {
    "int8": SealedFormat("int8", 8),
    "fp8_e4m3": SealedFormat("fp8_e4m3", 8, is_float=True),
    "int4": SealedFormat("int4", 4),
}


@dataclasses.dataclass(frozen=True)
class SealedLayout:
    """Static description of the sealed arrays.

    Attributes:
      num_layers: the quantised layers.
      num_blocks, num_kv_heads, block_size, head_dim: sizes of the pool.
      format: the element format.
      symmetric_keys: K has no centres.
      value_group: channels of V that share a scale; divides head_dim.
      as_bits: store bfloat16 and float8 as unsigned integers (see `KVLayout`).
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    format: SealedFormat
    symmetric_keys: bool
    value_group: int
    as_bits: bool

    @property
    def no_block(self) -> int:
        """The table entry that means "no block here"."""
        return self.num_blocks

    @property
    def num_value_groups(self) -> int:
        """Scales of one V vector."""
        return self.head_dim // self.value_group

    @property
    def num_key_rows(self) -> int:
        """Numbers of one K channel: its scale (and centre)."""
        return 1 if self.symmetric_keys else 2

    @property
    def codes_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the codes: [layer, block, kv_head, block_size (or half of it), 2 * head_dim]."""
        rows = self.block_size * self.format.bits // 8
        return self.num_layers, self.num_blocks, self.num_kv_heads, rows, 2 * self.head_dim

    @property
    def codes_dtype(self) -> np.dtype:
        """Number type of the codes as JAX sees it."""
        if self.format.bits < 8 or (self.format.is_float and self.as_bits):
            return np.dtype(np.uint8)
        return jnp.dtype(jnp.float8_e4m3fn) if self.format.is_float else np.dtype(np.int8)

    @property
    def key_affine_shape(self) -> tuple[int, int, int, int]:
        """Shape of K's scales (and centres)."""
        return self._affine_shape(self.num_key_rows, self.num_kv_heads * self.head_dim)

    @property
    def value_affine_shape(self) -> tuple[int, int, int, int]:
        """Shape of V's scales."""
        return self._affine_shape(self.num_value_groups, self.num_kv_heads * self.block_size)

    def _affine_shape(self, rows: int, width: int) -> tuple[int, int, int, int]:
        if rows == 1:
            rows, width = 2, -(-width // 2)
        return self.num_layers, self.num_blocks, rows, -(-width // _LANES) * _LANES

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, without device padding."""
        sizes = [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in (
                (self.codes_shape, self.codes_dtype),
                (self.key_affine_shape, self.affine_dtype),
                (self.value_affine_shape, self.affine_dtype),
            )
        ]
        return sum(sizes)

    @property
    def affine_dtype(self) -> np.dtype:
        """Number type of the affine arrays as JAX sees it."""
        return np.dtype(np.uint16) if self.as_bits else jnp.dtype(jnp.bfloat16)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "key_affine", "value_affine"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class SealedStore:
    """The sealed blocks.  Blocks that no sequence has filled hold anything; nothing reads them.

    Attributes:
      codes: layout.codes_dtype[layer, block, kv_head, row, 2 * head_dim].
      key_affine: layout.affine_dtype[layer, block, key row, kv_head * head_dim], padded as `key_affine_shape` says.
      value_affine: layout.affine_dtype[layer, block, group, kv_head * block_size], padded as `value_affine_shape` says.
      layout: static description.
    """

    codes: Array
    key_affine: Array
    value_affine: Array
    layout: SealedLayout


@dataclasses.dataclass(frozen=True)
class QuantisedLayout:
    """Static description of a quantised cache's bytes; has the fields of `KVLayout` that a model checks.

    Attributes:
      sealed: the codes.
      open: the pool of open blocks, of the quantised layers.
      num_wide_layers: layers at each end that are not quantised.
    """

    sealed: SealedLayout
    open: KVLayout
    num_wide_layers: int

    @property
    def num_layers(self) -> int:
        """All layers of the model."""
        return self.sealed.num_layers + 2 * self.num_wide_layers

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.sealed.num_blocks

    @property
    def num_kv_heads(self) -> int:
        """K/V heads of a layer."""
        return self.sealed.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one K or V vector."""
        return self.sealed.head_dim

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.sealed.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: codes, scales, open blocks and wide layers; without device padding."""
        return self.sealed.nbytes + self.open.nbytes + (self.wide.nbytes if self.wide else 0)

    @property
    def wide(self) -> KVLayout | None:
        """The layers that are not quantised; None if there are none."""
        if not self.num_wide_layers:
            return None
        return dataclasses.replace(
            self.open, num_layers=2 * self.num_wide_layers, num_blocks=self.num_blocks
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sealed", "open", "wide"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class QuantisedStore:
    """The bytes of a quantised cache.

    Attributes:
      sealed: blocks that are full.
      open: blocks that are filling, and until the next `reserve` the full-precision copy of one that just filled.
      wide: the first and last layers in full precision; None if all are quantised.
      layout: static description.
    """

    sealed: SealedStore
    open: KVStore
    wide: KVStore | None
    layout: QuantisedLayout


class SealedBlocks(NamedTuple):
    """A batch of blocks as the sealed arrays hold them, without layer: [n, ...] of each array's own shape."""

    codes: Array
    key_affine: Array
    value_affine: Array


def seal(layout: SealedLayout, kv: Array) -> SealedBlocks:
    """Quantises whole blocks in one pass; depends on nothing but their tokens.

    Args:
      layout: says how.
      kv: float[n, kv_head, block_size, 2 * head_dim], as the open store decodes them.

    Returns:
      The n blocks as `SealedStore` holds them.
    """
    n, heads, tokens, _ = kv.shape
    keys, values = kv[..., : layout.head_dim], kv[..., layout.head_dim :]
    groups = values.reshape(n, heads, tokens, layout.num_value_groups, layout.value_group)
    if layout.format.is_float:
        key = quantiser.quantize_fp8(keys, 2, scale_dtype=jnp.bfloat16)
        value = quantiser.quantize_fp8(groups, 4, scale_dtype=jnp.bfloat16)
    else:
        bits = layout.format.bits
        ratios = quantiser.CLIP_RATIOS if bits < 8 else (1.0,)
        how = {"bits": bits, "scale_dtype": jnp.bfloat16, "clip_ratios": ratios}
        key = quantiser.quantize_groups(keys, 2, symmetric=layout.symmetric_keys, **how)
        value = quantiser.quantize_groups(groups, 4, symmetric=True, **how)
    codes = jnp.concatenate([key.codes, value.codes.reshape(values.shape)], axis=-1)
    if layout.format.bits < 8:
        codes = quantiser.pack_nibbles(codes, axis=2)
    affine = [key.scale] if key.centre is None else [key.scale, key.centre]
    key_affine = jnp.stack([x.reshape(n, -1) for x in affine], axis=1)
    value_affine = value.scale[..., 0].transpose(0, 3, 1, 2)
    return SealedBlocks(
        codes=_to_bits(codes, layout.codes_dtype),
        key_affine=_stored(layout, key_affine, layout.key_affine_shape),
        value_affine=_stored(layout, value_affine, layout.value_affine_shape),
    )


def unseal(layout: SealedLayout, blocks: SealedBlocks) -> tuple[Array, Array]:
    """Returns K and V f32[..., kv_head, block_size, head_dim] of sealed blocks [...]; inverse of `seal` up to its steps."""
    dim = layout.head_dim
    keys = unseal_keys(layout, blocks.codes[..., :dim], blocks.key_affine)
    return keys, unseal_values(layout, blocks.codes[..., dim:], blocks.value_affine)


def unseal_keys(layout: SealedLayout, codes: Array, affine: Array) -> Array:
    """Returns K f32[..., kv_head, block_size, head_dim] of the K half of `SealedBlocks.codes`, and `.key_affine`."""
    keys = _code_values(layout, codes)
    affine = _rows(affine, layout.num_key_rows, layout.num_kv_heads, 1, layout.head_dim)
    scale = affine[..., 0, :, :, :]
    return keys * scale if layout.symmetric_keys else (keys + 0.5) * scale + affine[..., 1, :, :, :]


def unseal_values(layout: SealedLayout, codes: Array, affine: Array) -> Array:
    """Returns V f32[..., kv_head, block_size, head_dim] of the V half of `SealedBlocks.codes`, and `.value_affine`."""
    values = _code_values(layout, codes)
    scales = _rows(affine, layout.num_value_groups, layout.num_kv_heads, layout.block_size)
    scales = jnp.moveaxis(scales, -3, -1)[..., None]  # [..., kv_head, token, group, 1]
    groups = values.reshape(*values.shape[:-1], -1, layout.value_group)
    return (groups * scales).reshape(values.shape)


def _code_values(layout: SealedLayout, codes: Array) -> Array:
    """Returns codes of blocks as f32[..., kv_head, block_size, n]."""
    if layout.format.bits < 8:
        codes = quantiser.unpack_nibbles(codes, axis=-2)
    elif codes.dtype == jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return codes.astype(jnp.float32)


def _stored(layout: SealedLayout, x: Array, shape: tuple[int, ...]) -> Array:
    """Returns rows bf16[n, row, ...] as the affine array of `shape` holds n blocks."""
    x = x.reshape(*x.shape[:2], -1)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, math.prod(shape[2:]) // x.shape[1] - x.shape[2])))
    return _to_bits(x.reshape(-1, *shape[2:]), layout.affine_dtype)


def _rows(x: Array, *shape: int) -> Array:
    """Returns the rows of an affine array [..., row, width] as f32[..., *shape], shape[0] of them."""
    lead = x.shape[:-2]
    x = x.reshape(*lead, shape[0], -1)[..., : math.prod(shape[1:])]
    return bfloat16_values(x).reshape(*lead, *shape)


def _to_bits(x: Array, dtype: np.dtype) -> Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def bfloat16_values(x: Array) -> Array:
    """Returns bfloat16 numbers, or their bits, as float32."""
    x = jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
    return x.astype(jnp.float32)
