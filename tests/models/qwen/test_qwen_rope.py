"""Position rules against worked numbers, and the rotation against complex multiplication."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.qwen import RopeConfig
from models.qwen.rope import attention_factor, cos_sin, inverse_frequencies, rotate


def yarn(factor: float, **given: float | None) -> RopeConfig:
    return RopeConfig(
        type="yarn", theta=1e6, factor=factor, original_max_position_embeddings=32768, **given
    )


@pytest.mark.parametrize(("theta", "expected"), [(1e6, 0.001), (1e4, 0.01)])
def test_second_frequency_at_head_dim_4(theta: float, expected: float) -> None:
    """Field case N4."""
    inv_freq = inverse_frequencies(RopeConfig(theta=theta), 4)
    np.testing.assert_allclose(inv_freq, [1.0, expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1.25, 1.0223144),
        (4.0, 1.1386294),
        (16.0, 1.2772589),
        (32.0, 1.3465736),
        (64.0, 1.4158883),
        (128.0, 1.4852030),
    ],
)
def test_yarn_derives_attention_factor_from_factor(factor: float, expected: float) -> None:
    assert attention_factor(yarn(factor)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("factor", "given"), [(64.0, 1.0), (128.0, 1.4852030)])
def test_given_attention_factor_replaces_the_derived_one(factor: float, given: float) -> None:
    """Field case N5: neither ignored (1.4158883) nor multiplied (2.2058)."""
    assert attention_factor(yarn(factor, attention_factor=given)) == given


def test_mscale_ratio_equal_scales_give_one() -> None:
    """Field case N6: transformers' ratio gives 1.0 at factor 16 with both scales 1."""
    assert attention_factor(yarn(16.0, mscale=1.0, mscale_all_dim=1.0)) == 1.0
    only_one = attention_factor(yarn(16.0, mscale=1.0))
    assert only_one == pytest.approx(1.2772589, abs=1e-7)
    ratio = attention_factor(yarn(16.0, mscale=0.707, mscale_all_dim=1.0))
    assert ratio == pytest.approx((0.0707 * math.log(16) + 1) / 1.2772589, abs=1e-7)


def test_attention_factor_scales_cos_and_sin() -> None:
    positions = jnp.zeros((1, 1), jnp.int32)
    cos, sin = cos_sin(yarn(4.0), 8, positions)
    np.testing.assert_allclose(cos, 1.1386294, rtol=1e-6)
    np.testing.assert_array_equal(sin, 0.0)


def test_linear_divides_every_frequency() -> None:
    plain = inverse_frequencies(RopeConfig(), 16)
    scaled = inverse_frequencies(RopeConfig(type="linear", factor=4.0), 16)
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_yarn_keeps_fast_and_interpolates_slow_frequencies() -> None:
    """head_dim 64, theta 1e6: the first pair turns 5215 times over 32768 positions, the last 0.008 times."""
    plain = inverse_frequencies(RopeConfig(theta=1e6), 64)
    blended = inverse_frequencies(yarn(4.0), 64)
    assert blended[0] == plain[0]
    assert blended[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)
    assert np.all(np.diff(plain / blended) >= -1e-5)


def test_llama3_divides_long_wavelengths_only() -> None:
    rope = RopeConfig(type="llama3", theta=5e5, factor=8.0, original_max_position_embeddings=8192)
    plain = inverse_frequencies(RopeConfig(theta=5e5), 128)
    scaled = inverse_frequencies(rope, 128)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 2048], plain[wavelength < 2048], rtol=1e-6)
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)


def test_freq_factors_divide_one_by_one() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    scaled = inverse_frequencies(RopeConfig(freq_factors=factors), 8)
    np.testing.assert_allclose(scaled * factors, inverse_frequencies(RopeConfig(), 8), rtol=1e-6)
    with pytest.raises(ValueError, match="freq_factors: expected 8 numbers, got 4"):
        inverse_frequencies(RopeConfig(freq_factors=factors), 16)


@pytest.mark.parametrize("rope", [RopeConfig(theta=1e6), yarn(4.0)])
def test_rotation_depends_on_position_not_on_length(rope: RopeConfig) -> None:
    """Field cases N3 and N7: position 5 turns alike in a call of 6 and next to 131071, the last of the context."""
    short, _ = cos_sin(rope, 8, jnp.arange(6, dtype=jnp.int32)[None])
    far, far_sin = cos_sin(rope, 8, jnp.asarray([[5, 131071]], jnp.int32))
    np.testing.assert_array_equal(short[0, 5], far[0, 0])
    assert np.isfinite(np.asarray(far)).all()
    assert np.isfinite(np.asarray(far_sin)).all()


def test_rotate_equals_complex_multiplication() -> None:
    random = np.random.RandomState(0)
    x = random.standard_normal((2, 3, 4, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2], [7, 8, 100]])
    rope = RopeConfig(theta=100.0)
    cos, sin = cos_sin(rope, 8, jnp.asarray(positions, jnp.int32))
    turned = np.asarray(rotate(jnp.asarray(x), cos, sin))
    z = x[..., :4].astype(np.float64) + 1j * x[..., 4:]
    exponent = np.arange(4) / 4
    z = z * np.exp(1j * positions[:, :, None, None] * 100.0**-exponent)
    np.testing.assert_allclose(turned, np.concatenate([z.real, z.imag], axis=-1), atol=1e-5)


def test_rotate_keeps_dtype_and_computes_in_float32() -> None:
    cos, sin = cos_sin(RopeConfig(), 8, jnp.full((1, 1), 1000, jnp.int32))
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    exact = rotate(x.astype(jnp.float32), cos, sin)
    assert rotate(x, cos, sin).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotate(x, cos, sin), exact.astype(jnp.bfloat16))
