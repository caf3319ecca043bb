"""Rotary position embedding: the frequencies of each scaling rule, and the rotation.

Invariants:
  * The angle of a token depends on its position alone, never on the length of its sequence; a key that was
    rotated once stays right when the sequence grows or its block is shared.  Rules that break this
    (dynamic NTK, longrope) are refused by `RopeConfig`.
  * Angles are computed from positions, not read from a table, so no position is past the end of one.
  * Everything here is float32.  The pairs rotated together are (i, i + head_dim / 2).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

SUPPORTED = ("default", "linear", "yarn", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions become angles.

    Attributes:
      type: one of `SUPPORTED`.
      theta: base of the frequencies, > 1.
      factor: how many times longer the context became; >= 1.  Not used by "default".
      original_max_position_embeddings: context the frequencies were trained for; used by yarn and llama3.
      attention_factor: multiplies cos and sin.  None lets yarn derive it from factor, mscale and
        mscale_all_dim; a given number is used as it is, never multiplied by the derived one.
      mscale, mscale_all_dim: yarn; the attention factor is their ratio when both are given and not 0.
      beta_fast, beta_slow: yarn; rotations that bound the ramp between the two sets of frequencies.
      truncate: yarn; round the bounds of the ramp outwards to whole dimensions.
      low_freq_factor, high_freq_factor: llama3; bound the wavelengths that are interpolated.
      freq_factors: divides the frequencies one by one (GGUF's `rope_freqs`); empty means none.

    Raises:
      ValueError: a number is out of its range.
      NotImplementedError: the type is not one of `SUPPORTED`.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    freq_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in SUPPORTED:
            raise NotImplementedError(
                f"rope_type: {self.type!r} is not supported here (supported: {', '.join(SUPPORTED)}); types whose "
                "angles depend on the sequence length would change keys that are already cached"
            )
        if not self.theta > 1:
            raise ValueError(f"rope_theta: expected a number above 1, got {self.theta!r}")
        if not self.factor >= 1:
            raise ValueError(f"rope factor: expected a number of at least 1, got {self.factor!r}")
        if self.type in ("yarn", "llama3") and not self.original_max_position_embeddings:
            raise ValueError(
                f"original_max_position_embeddings: expected a positive integer for rope_type {self.type!r}, "
                f"got {self.original_max_position_embeddings!r}"
            )
        if self.type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected more than low_freq_factor {self.low_freq_factor}, got {self.high_freq_factor}"
            )


def attention_factor(rope: RopeConfig) -> float:
    """Returns what cos and sin are multiplied by; 1.0 for every rule but yarn.

    References:
      Peng et al., "YaRN", 2023, section 3.4; the ratio rule as in transformers' modeling_rope_utils.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns f32[head_dim / 2], the angle per position of each rotated pair.

    Raises:
      ValueError: `freq_factors` has another length than head_dim / 2.

    References:
      Su et al., "RoFormer", 2021, section 3.2; Peng et al., "YaRN", 2023, section 3.2; the llama3 rule as
      published with Llama 3.1.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain: np.ndarray = np.float32(1.0) / np.power(np.float32(rope.theta), exponent)
    if rope.freq_factors:
        if len(rope.freq_factors) != head_dim // 2:
            raise ValueError(
                f"freq_factors: expected {head_dim // 2} numbers, got {len(rope.freq_factors)}"
            )
        plain = plain / np.asarray(rope.freq_factors, np.float32)
    if rope.type == "linear":
        return plain / np.float32(rope.factor)
    if rope.type == "yarn":
        return _yarn_frequencies(rope, plain, head_dim)
    if rope.type == "llama3":
        return _llama3_frequencies(rope, plain)
    return plain


def _yarn_frequencies(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """Blends interpolated and plain frequencies along a ramp over the dimensions."""
    original = float(rope.original_max_position_embeddings or 0)

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return (
            head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(
        np.float32
    )
    return (plain / np.float32(rope.factor)) * ramp + plain * (1 - ramp)


def _llama3_frequencies(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Divides long wavelengths by the factor, keeps short ones, interpolates between."""
    original = float(rope.original_max_position_embeddings or 0)
    turns = original * plain / np.float32(2 * math.pi)  # rotations over the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((turns - rope.low_freq_factor) / span, 0, 1).astype(np.float32)
    return (1 - keep) * plain / np.float32(rope.factor) + keep * plain


def cos_sin(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each f32[row, q_pos, 1, head_dim / 2], of i32[row, q_pos] positions."""
    inv_freq = jnp.asarray(inverse_frequencies(rope, head_dim)).reshape(1, 1, 1, -1)
    angles = positions.astype(jnp.float32)[:, :, None, None] * inv_freq
    factor = jnp.float32(attention_factor(rope))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns x rotated, x.dtype[row, q_pos, head, head_dim]; cos and sin as `cos_sin` returns them."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
