"""The arithmetic of quantised K and V: scale, centre and codes of groups of numbers.

A group shares one scale and, if it is asymmetric, one centre; `b` bits give the integers -2^(b-1) .. 2^(b-1) - 1::

    symmetric     x ~ code * scale                          codes -(2^(b-1) - 1) .. 2^(b-1) - 1
    asymmetric    x ~ (code + 1/2) * scale + centre         all 2^b codes, evenly around the centre
    fp8_e4m3      x ~ code * scale                          |code| <= 448, the largest finite value

Invariants:
  * Codes come from the stored (rounded) scale and centre.  The centre is rounded first and the scale, rounded up, then
    covers both ends, so no finite number is clipped unless a smaller clip ratio was asked for.
  * The centre is a number of the data's own size, not a multiple of the scale: it cannot overflow, however far the group
    lies from zero.
  * Scale 0 means that every number of the group is its centre (0 if symmetric): constant groups are exact up to the rounding
    of the centre, and nothing is divided by zero.
  * Clipping comes before the cast to integers.
  * A group that holds NaN or an infinity has scale NaN and reads back as NaN, all of it; no other group changes.

References: seeds/000 section 4 (its zero point as int8 overflows, its cast before the clip wraps: see docs/formulas.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Array = jax.Array

FP8_MAX = 448.0
# Shrunken ranges tried for few bits: losing the tails of a group can cost less than coarse steps for all of it.
CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


class Quantised(NamedTuple):
    """Codes of the shape of the data; scale and centre have size 1 on the axes they share (centre None: symmetric)."""

    codes: Array
    scale: Array
    centre: Array | None


def quantize_groups(
    x: Array,
    over: int | tuple[int, ...],
    *,
    bits: int,
    symmetric: bool,
    scale_dtype: DTypeLike,
    clip_ratios: tuple[float, ...] = (1.0,),
) -> Quantised:
    """Quantises groups of numbers to integers; a group runs over the axes `over`.

    Args:
      x: float[...].
      over: the axes a group runs over.
      bits: 2 to 8.
      symmetric: no centre.
      scale_dtype: float type of scale and centre.
      clip_ratios: shares of the range to try; the one with the least squared error wins, group by group.

    Returns:
      codes i8[...], scale and centre scale_dtype[..., 1, ...].
    """
    x = x.astype(jnp.float32)
    top = 2.0 ** (bits - 1) - 1
    if symmetric:
        centre, middle, reach, bottom = (
            None,
            jnp.float32(0),
            jnp.max(jnp.abs(x), over, keepdims=True),
            -top,
        )
        steps = top
    else:
        low, high = (f(x, over, keepdims=True) for f in (jnp.min, jnp.max))
        centre = _round_finite(low / 2 + high / 2, scale_dtype)
        middle = centre.astype(jnp.float32)
        reach, bottom, steps = jnp.maximum(high - middle, middle - low), -top - 1, top + 0.5

    offset = 0.0 if symmetric else 0.5

    def attempt(ratio: Array) -> tuple[Array, Array]:
        scale = _round_up(reach * (ratio / steps), scale_dtype)
        wide = scale.astype(jnp.float32)
        inverse = jnp.where(wide > 0, 1 / jnp.where(wide > 0, wide, 1), 0.0)
        codes = jnp.clip(jnp.round((x - middle) * inverse - offset), bottom, top)
        return codes, scale

    def better(best: Any, ratio: Array) -> tuple[Any, None]:
        """Keeps the smaller error of (error, codes, scale), group by group."""
        new_codes, new_scale = attempt(ratio)
        read = (new_codes + offset) * new_scale.astype(jnp.float32) + middle
        new_error = jnp.sum(jnp.square(read - x), over, keepdims=True)
        wins = new_error < best[0]
        new = (new_error, new_codes, new_scale)
        return tuple(jnp.where(wins, n, old) for n, old in zip(new, best, strict=True)), None

    codes, scale = attempt(jnp.float32(clip_ratios[0]))
    if len(clip_ratios) > 1:
        start = (jnp.full(scale.shape, jnp.inf), codes, scale)
        (_, codes, scale), _ = jax.lax.scan(better, start, jnp.asarray(clip_ratios, jnp.float32))
    codes = jnp.where(jnp.isfinite(codes), codes, 0.0).astype(jnp.int8)
    return Quantised(codes, scale, centre)


def quantize_fp8(x: Array, over: int | tuple[int, ...], *, scale_dtype: DTypeLike) -> Quantised:
    """Quantises groups of numbers to float8_e4m3fn codes; a group runs over the axes `over`.

    Returns:
      codes float8_e4m3fn[...], scale scale_dtype[..., 1, ...], no centre.
    """
    x = x.astype(jnp.float32)
    scale = _round_up(jnp.max(jnp.abs(x), over, keepdims=True) / FP8_MAX, scale_dtype)
    wide = scale.astype(jnp.float32)
    codes = x * jnp.where(wide > 0, 1 / jnp.where(wide > 0, wide, 1), 0.0)
    codes = jnp.where(jnp.isfinite(codes), jnp.clip(codes, -FP8_MAX, FP8_MAX), 0.0)
    return Quantised(codes.astype(jnp.float8_e4m3fn), scale, None)


def dequantize_groups(quantised: Quantised) -> Array:
    """Returns the numbers the codes stand for, f32[...]."""
    scale = quantised.scale.astype(jnp.float32)
    codes = quantised.codes.astype(jnp.float32)
    if quantised.centre is None:
        return codes * scale
    return (codes + 0.5) * scale + quantised.centre.astype(jnp.float32)


def pack_nibbles(codes: Array, axis: int) -> Array:
    """Packs 4-bit codes two to a byte: index i of the axis in the low half, index i + n/2 in the high half.

    Args:
      codes: i8[...], values -8 .. 7.
      axis: an axis of even size n.

    Returns:
      u8[...] with n / 2 entries on that axis.
    """
    low, high = jnp.split(codes.astype(jnp.uint8) & 0xF, 2, axis)
    return low | (high << 4)


def unpack_nibbles(packed: Array, axis: int) -> Array:
    """Returns the i8 codes that `pack_nibbles` packed along `axis`."""
    signed = packed.astype(jnp.int8)
    low = (signed << 4) >> 4  # an arithmetic shift brings the sign back
    return jnp.concatenate([low, signed >> 4], axis)


def _round_finite(x: Array, dtype: DTypeLike) -> Array:
    """Rounds to nearest; what would overflow becomes the largest finite number."""
    top = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -top, top), x).astype(dtype)


def _round_up(x: Array, dtype: DTypeLike) -> Array:
    """Rounds non-negative numbers up to the next number of the type; NaN and infinity become NaN."""
    rounded = _round_finite(x, dtype)
    eps = float(jnp.finfo(dtype).eps)
    up = _round_finite(rounded.astype(jnp.float32) * (1 + eps), dtype)
    out = jnp.where(rounded.astype(jnp.float32) < x, up, rounded)
    return jnp.where(jnp.isfinite(x), out, jnp.nan).astype(dtype)
