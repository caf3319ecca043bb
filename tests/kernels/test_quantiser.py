"""The quantiser's arithmetic: steps, rounding, hard inputs, packing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import quantiser
from pallas_kernels.quantiser import dequantize_groups, quantize_fp8, quantize_groups


def quantise(x, bits=8, symmetric=False, dtype=jnp.float32, ratios=(1.0,)):
    """Quantises channels (last axis) over tokens (first axis)."""
    x = jnp.asarray(x, jnp.float32)
    return quantize_groups(
        x, 0, bits=bits, symmetric=symmetric, scale_dtype=dtype, clip_ratios=ratios
    )


def test_symmetric_codes_round_to_nearest() -> None:
    """Field case L3: at scale 1, [0.6, -0.6, 1.5, 2.5] become [1, -1, 2, 2], not [0, 0, 1, 2]."""
    x = np.array([[0.6], [-0.6], [1.5], [2.5], [127.0]])
    got = quantise(x, symmetric=True)
    assert float(got.scale[0, 0]) == 1.0
    assert np.asarray(got.codes)[:, 0].tolist() == [1, -1, 2, 2, 127]


def test_symmetric_codes_match_the_document() -> None:
    """Document 000 section 4.1: scale = max|x| / qmax, codes = clip(round(x / scale))."""
    x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    for bits in range(2, 9):
        qmax = 2 ** (bits - 1) - 1
        scale = np.abs(x).max(0) / qmax
        want = np.clip(np.round(x / scale), -qmax, qmax)
        got = quantise(x, bits, symmetric=True)
        np.testing.assert_allclose(got.scale[0], scale, rtol=3e-7)
        assert np.abs(np.asarray(got.codes) - want).max() <= (1 if bits == 8 else 0)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_asymmetric_error_is_at_most_half_a_step(bits: int) -> None:
    """All 2^bits codes are used, and no number is further than half a step from its code."""
    x = np.random.default_rng(bits).uniform(99, 101, (64, 7)).astype(np.float32)
    got = quantise(x, bits)
    step = (x.max(0) - x.min(0)) / (2**bits - 1)
    np.testing.assert_allclose(got.scale[0], step, rtol=2e-4)
    error = np.abs(np.asarray(dequantize_groups(got)) - x)
    assert np.all(error <= step / 2 * 1.001 + 1e-5)
    assert np.asarray(got.codes).min() == -(2 ** (bits - 1))
    assert np.asarray(got.codes).max() == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("value", [100.0, -28.5, 1e30, 3.3e38, 1e-30, 0.0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_constant_channel_is_recovered(value: float, symmetric: bool, dtype) -> None:
    """Field cases L1 and L2: a constant comes back (to the rounding of a scale), zeros exactly, nothing is NaN."""
    got = dequantize_groups(quantise(np.full((8, 3), value), 8, symmetric, dtype))
    np.testing.assert_allclose(got, value, rtol=5e-3)


def test_nearly_constant_channel_far_from_zero_keeps_its_variation() -> None:
    """Field case L7 and design section 9: 100 +- 0.5 (a zero point in int8 would be -25,628)."""
    x = 100 + np.linspace(-0.5, 0.5, 32)[:, None]
    error = np.abs(np.asarray(dequantize_groups(quantise(x, 8))) - x)
    assert error.max() <= 1.0 / 255 / 2 * 1.01
    # A bfloat16 centre may lie 2^-9 of 100 off, and the scale then covers that much more.
    error = np.abs(np.asarray(dequantize_groups(quantise(x, 8, dtype=jnp.bfloat16))) - x)
    assert error.max() <= (1.0 + 2 * 100 * 2**-9) / 255 / 2 * 1.02


@pytest.mark.parametrize("size", [3e38, 1e30, 1e-30, 1e-38, 1e-42])
@pytest.mark.parametrize("bits", [4, 8])
def test_any_magnitude_stays_finite_and_within_a_step(size: float, bits: int) -> None:
    """Values near the ends of float32, denormals included: no overflow, no NaN, error within a step."""
    x = (np.random.default_rng(0).uniform(-1, 1, (64, 5)) * size).astype(np.float32)
    for symmetric in (True, False):
        for dtype in (jnp.float32, jnp.bfloat16):
            got = np.asarray(dequantize_groups(quantise(x, bits, symmetric, dtype)))
            error = np.abs(got.astype(np.float64) - x)
            assert error.max() <= max(2 * size / (2**bits - 2) * 1.01, 1.2e-38)


def test_bad_numbers_are_contained_to_their_group() -> None:
    """NaN or infinity makes its own channel NaN, all of it, and leaves the others bit-identical."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    clean = np.asarray(dequantize_groups(quantise(x)))
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[3, 1] = bad
        for got, untouched in (
            (dequantize_groups(quantise(spoilt)), clean),
            (dequantize_groups(quantise(spoilt, 4, True)), dequantize_groups(quantise(x, 4, True))),
            (
                dequantize_groups(quantize_fp8(jnp.asarray(spoilt), 0, scale_dtype=jnp.float32)),
                dequantize_groups(quantize_fp8(jnp.asarray(x), 0, scale_dtype=jnp.float32)),
            ),
        ):
            assert np.isnan(got[:, 1]).all()
            np.testing.assert_array_equal(np.delete(got, 1, 1), np.delete(untouched, 1, 1))


def test_clipping_comes_before_the_cast() -> None:
    """Field cases L4 and L5: codes past the range saturate; a cast first would wrap 300 to 44."""
    x = np.array([[300.0], [-300.0], [0.0]])
    got = quantise(x, symmetric=True, ratios=(127 / 300,))
    assert float(got.scale[0, 0]) == pytest.approx(1.0)
    assert np.asarray(got.codes)[:, 0].tolist() == [127, -127, 0]


def test_fp8_codes_never_overflow_to_nan() -> None:
    """Field case L6: float8 turns 465 and up into NaN; scaled by the largest value, all codes lie within 448."""
    x = jnp.asarray([[448.0], [464.0], [465.0], [1000.0], [-1000.0], [0.0]])
    got = quantize_fp8(x, 0, scale_dtype=jnp.float32)
    read = np.asarray(dequantize_groups(got))[:, 0]
    assert np.abs(got.codes.astype(jnp.float32)).max() <= 448
    np.testing.assert_allclose(read, np.asarray(x)[:, 0], rtol=2**-4)


def test_clip_ratio_of_least_error_wins() -> None:
    """One far outlier among many small numbers costs less clipped than as a coarse step for all."""
    x = np.random.default_rng(0).normal(size=(512, 2)).astype(np.float32)
    x[7] = 6.0
    plain, best = (
        np.square(np.asarray(dequantize_groups(quantise(x, 4, True, ratios=r))) - x).sum(0)
        for r in ((1.0,), quantiser.CLIP_RATIOS)
    )
    assert np.all(best < 0.8 * plain)


@pytest.mark.parametrize("axis", [0, 1])
def test_packed_nibbles_round_trip_every_code(axis: int) -> None:
    """Field case L14: every pair of codes -8 .. 7 comes back."""
    codes = np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8))).reshape(2, -1)
    codes = codes if axis == 0 else codes.T
    packed = quantiser.pack_nibbles(jnp.asarray(codes, jnp.int8), axis)
    assert packed.dtype == jnp.uint8
    assert packed.size == codes.size // 2
    np.testing.assert_array_equal(quantiser.unpack_nibbles(packed, axis), codes)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4),
    st.sampled_from([2, 3, 4, 8]),
    st.booleans(),
)
def test_any_group_is_within_its_step(values: list[float], bits: int, symmetric: bool) -> None:
    """Property: the error of any finite group is at most half a step of its range, with room for bfloat16 scales."""
    x = np.array(values, np.float32)[:, None]
    got = _jitted(bits, symmetric)(x)
    wide = x.astype(np.float64)
    reach = 2 * np.abs(wide).max() if symmetric else wide.max() - wide.min()
    slack = 0 if symmetric else 2 * np.abs(wide).max() * 2**-8
    step = (reach + slack) / (2**bits - (2 if symmetric else 1))
    assert np.abs(np.asarray(got, np.float64) - wide).max() <= step / 2 * 1.02 + 1e-37


_JITTED: dict = {}


def _jitted(bits: int, symmetric: bool):
    """Returns the quantiser and its inverse, compiled once for each kind."""
    if (bits, symmetric) not in _JITTED:
        _JITTED[bits, symmetric] = jax.jit(
            lambda x: dequantize_groups(quantise(x, bits, symmetric, jnp.bfloat16))
        )
    return _JITTED[bits, symmetric]
