"""The per-channel quantiser of the documents, on any axis: codes, scales, the way back, and what it cost.

A channel is an index of `axis`; its scale (and centre) come from all other axes together::

    x [.., channel, ..]  ->  codes (packed, or the shape of x),  scale and centre [1, channel, 1]

This is for data at hand. The cache seals its blocks by the same arithmetic (`pallas_kernels.quantiser`), in its own layout
(`pallas_kernels.sealed`).

Invariants:
  * Everything is a pure function under `jit`; only `axis`, `bits` and `symmetric` are static.
  * Codes come from the stored, rounded scale; no finite number is clipped, nothing is divided by zero, nothing overflows.
  * A channel that holds NaN or an infinity reads back as NaN, all of it; the others do not change.
  * Codes of up to 4 bits lie two to a byte; wider ones take a byte each. All of it counts in `nbytes`.

References: doc 000 section 4 (docs/formulas.md says where its code is not followed).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import quantiser
from pallas_kernels.quantiser import Quantised

Array = jax.Array

MIN_BITS, MAX_BITS = 2, 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "centre"],
    meta_fields=["axis", "bits", "shape"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """An array as codes; build it with `quantize`.

    Attributes:
      codes: i8[shape]; for bits <= 4 u8[ceil(size / 2)], the flattened codes two to a byte (the last half byte of an odd
        size holds 0).
      scale: float[1, .., channel, .., 1], what one step of the codes stands for.
      centre: float like scale, the middle of the channel's range; None if symmetric.
      axis: the channel axis, 0 or more.
      bits: bits of a code.
      shape: of the array that was quantised.
    """

    codes: Array
    scale: Array
    centre: Array | None
    axis: int
    bits: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of codes with their padding, scales and centres."""
        arrays = (self.codes, self.scale, self.centre)
        return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)


class QuantizationError(NamedTuple):
    """How far the codes are from the data (f32[] each; NaN if the data holds NaN or infinities), and what they save.

    `compression_ratio` is the data's bytes over those of codes, scales and padding.
    """

    max_abs_error: Array
    mean_abs_error: Array
    rmse: Array
    compression_ratio: float


def quantize(
    x: ArrayLike,
    *,
    axis: int = -1,
    bits: int = 8,
    symmetric: bool = True,
    scale_dtype: DTypeLike = jnp.float32,
) -> QuantizedArray:
    """Quantises an array channel by channel::

        symmetric     scale = max|x| / qmax          x ~ code * scale                    qmax = 2^(bits-1) - 1
        asymmetric    scale = (max - min) / (2^bits - 1)    x ~ (code + 1/2) * scale + centre

    Args:
      x: float[...], at least one axis and one number; arithmetic is float32.
      axis: the channel axis; all others share its scales.
      bits: 2 to 8.
      symmetric: without a centre, for data around zero.
      scale_dtype: float type of scale and centre; a narrow one makes them coarser, never too small for the data.

    Returns:
      The codes and scales; `dequantize` reads them.

    Raises:
      ValueError: bits or axis out of range, x or scale_dtype not floating, x without an axis or a number.

    References: doc 000 sections 4.1 and 4.2.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: expected a floating dtype, got {x.dtype}")
    if x.size == 0 or x.ndim == 0:
        raise ValueError(f"x: expected an axis and at least one number, got shape {x.shape}")
    if not jnp.issubdtype(scale_dtype, jnp.floating):
        raise ValueError(f"scale_dtype: expected a floating dtype, got {jnp.dtype(scale_dtype)}")
    bits = _integer("bits", bits, MIN_BITS, MAX_BITS)
    axis = _integer("axis", axis, -x.ndim, x.ndim - 1) % x.ndim
    over = tuple(i for i in range(x.ndim) if i != axis)
    codes, scale, centre = quantiser.quantize_groups(
        x, over, bits=bits, symmetric=symmetric, scale_dtype=scale_dtype
    )
    return QuantizedArray(_pack(codes, bits), scale, centre, axis, bits, x.shape)


def dequantize(quantized: QuantizedArray) -> Array:
    """Returns the numbers that the codes stand for, f32[shape].

    References: doc 000 section 4.3.
    """
    return quantiser.dequantize_groups(
        Quantised(_unpack(quantized), quantized.scale, quantized.centre)
    )


def quantization_error(x: ArrayLike, quantized: QuantizedArray) -> QuantizationError:
    """Returns what quantisation did to an array.

    Args:
      x: float[shape], the data that was quantised; its own bytes are what the compression is measured against.
      quantized: what `quantize` made of it.

    Raises:
      ValueError: x has another shape.

    References: doc 000 section 4.3.
    """
    x = jnp.asarray(x)
    if x.shape != quantized.shape:
        raise ValueError(f"x: expected shape {quantized.shape}, got {x.shape}")
    error = jnp.abs(dequantize(quantized) - x.astype(jnp.float32))
    largest = jnp.max(error)
    unit = jnp.where(largest > 0, largest, 1)  # squares of errors near 1e30 would overflow
    share = error / unit
    return QuantizationError(
        max_abs_error=largest,
        mean_abs_error=unit * jnp.mean(share),
        rmse=unit * jnp.sqrt(jnp.mean(jnp.square(share))),
        compression_ratio=x.size * x.dtype.itemsize / quantized.nbytes,
    )


def _pack(codes: Array, bits: int) -> Array:
    """Returns codes as they are stored; flat and two to a byte up to 4 bits."""
    if bits > 4:
        return codes
    flat = codes.reshape(-1)
    return quantiser.pack_nibbles(jnp.pad(flat, (0, flat.size % 2)), axis=0)


def _unpack(quantized: QuantizedArray) -> Array:
    if quantized.bits > 4:
        return quantized.codes
    size = math.prod(quantized.shape)
    return quantiser.unpack_nibbles(quantized.codes, axis=0)[:size].reshape(quantized.shape)


def _integer(name: str, value: object, least: int, most: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or not least <= value <= most
    ):
        raise ValueError(f"{name}: expected an integer in [{least}, {most}], got {value!r}")
    return int(value)
