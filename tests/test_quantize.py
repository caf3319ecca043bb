"""The per-channel quantiser against the documents' formulas in float64 NumPy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.quantize import QuantizedArray, dequantize, quantization_error, quantize


@functools.partial(jax.jit, static_argnames=("axis", "bits", "symmetric", "scale_dtype"))
def there_and_back(x: jax.Array, **how: Any) -> tuple[QuantizedArray, jax.Array, Any]:
    """Returns the codes, the numbers read back, and the error report, from one program."""
    got = quantize(x, **how)
    return got, dequantize(got), quantization_error(x, got)


def document(x: np.ndarray, axis: int, bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Doc 000 sections 4.1 to 4.3 as written, with a wide zero point: scale[channel], codes and numbers read back."""
    qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    moved = np.moveaxis(x.astype(np.float64), axis, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    if symmetric:
        scale, zero = np.abs(flat).max(0) / qmax, 0.0
        codes = np.clip(np.round(flat / scale), -qmax, qmax)
    else:
        scale = (flat.max(0) - flat.min(0)) / (qmax - qmin)
        zero = np.round(qmin - flat.min(0) / scale)
        codes = np.clip(np.round(flat / scale) + zero, qmin, qmax)
    back = [np.moveaxis(y.reshape(moved.shape), -1, axis) for y in (codes, (codes - zero) * scale)]
    return scale, back[0], back[1]


def codes_of(quantized: QuantizedArray) -> np.ndarray:
    """Unpacks by hand: number i of the flat codes is the low half of byte i, or the high half of byte i - bytes."""
    stored = np.asarray(quantized.codes)
    if quantized.bits > 4:
        return stored
    nibbles = np.concatenate([stored & 15, stored >> 4]).astype(np.int64)
    signed = np.where(nibbles > 7, nibbles - 16, nibbles)
    return signed[: np.prod(quantized.shape)].reshape(quantized.shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantize_matches_the_documents_formulas(bits: int, symmetric: bool) -> None:
    """Channels of different size and place on every axis of an odd shape."""
    x = np.random.default_rng(bits).normal(size=(5, 7, 9)).astype(np.float32)
    x += np.linspace(-3, 3, 7, dtype=np.float32)[:, None]
    x *= np.array([1, 1e-3, 1, 50, 1, 1e3, 1, 7, 1], np.float32)
    for axis in (0, -1):
        got, back, _ = there_and_back(x, axis=axis, bits=bits, symmetric=symmetric)
        scale, codes, read = document(x, axis, bits, symmetric)
        assert got.axis == axis % 3
        assert got.scale.shape == tuple(n if i == axis % 3 else 1 for i, n in enumerate(x.shape))
        np.testing.assert_allclose(np.asarray(got.scale).ravel(), scale, rtol=2e-6)
        back = np.asarray(back, np.float64)
        step = np.asarray(got.scale, np.float64)
        assert np.all(np.abs(back - x) <= step * 0.5001 + 1e-6 * np.abs(x))
        if symmetric:
            assert got.centre is None
            off = codes_of(got) != codes  # only where a number lies on the edge of two codes
            assert np.abs(codes_of(got) - codes).max() <= 1
            assert off.mean() < 0.01
        else:
            edges = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            assert (codes_of(got).min(), codes_of(got).max()) == edges
            centred = (codes_of(got) + 0.5) * step + np.asarray(got.centre, np.float64)
            np.testing.assert_allclose(back, centred, rtol=1e-5, atol=1e-5 * step.max())
            if axis == -1:  # axis 0 has many numbers next to zero, which a zero point hits exactly
                assert rms((back - x) / step) <= 1.1 * rms((read - x) / step)


def rms(x: np.ndarray) -> float:
    """Returns the root mean square."""
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize(
    ("shape", "bits", "symmetric"),
    [((1,), 4, True), ((13,), 3, False), ((5, 3), 4, True), ((5, 3), 2, False), ((5, 3), 7, True)],
)
def test_codes_are_packed_and_every_byte_counts(
    shape: tuple[int, ...], bits: int, symmetric: bool
) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float16)
    got, read, report = there_and_back(x, bits=bits, symmetric=symmetric, scale_dtype=jnp.bfloat16)
    code_bytes = x.size if bits > 4 else (x.size + 1) // 2
    assert got.codes.nbytes == code_bytes
    assert got.nbytes == code_bytes + shape[-1] * (2 if symmetric else 4)
    assert report.compression_ratio == pytest.approx(2 * x.size / got.nbytes)
    assert read.shape == shape


def test_jit_equals_eager_and_one_program_serves_a_shape() -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(6, 5)), jnp.bfloat16)
    for symmetric in (True, False):
        how = {"axis": 0, "bits": 4, "symmetric": symmetric}
        eager = quantize(x, **how)
        compiled, read, report = there_and_back(x, **how)
        jax.tree.map(np.testing.assert_array_equal, compiled, eager)
        assert (compiled.axis, compiled.bits, compiled.shape) == (0, 4, (6, 5))
        np.testing.assert_allclose(read, dequantize(eager), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(report, quantization_error(x, eager), rtol=1e-4)
        before = there_and_back._cache_size()
        there_and_back(x + 1, **how)
        assert there_and_back._cache_size() == before


def test_error_report_equals_numpy_and_does_not_overflow() -> None:
    """The squares of errors near 1e30 lie past float32."""
    x = np.random.default_rng(3).normal(size=(8, 4)).astype(np.float32)
    for size in (1.0, 1e32, 1e-32):
        data = x * np.float32(size)
        _, read, report = there_and_back(data, bits=5)
        error = np.abs(np.asarray(read, np.float64) - data)
        want = (error.max(), error.mean(), rms(error), 128 / (32 + 16))
        np.testing.assert_allclose(report, want, rtol=1e-5)
    assert there_and_back(0 * x, bits=5)[2][:3] == (0, 0, 0)


def test_hard_channels_stay_apart() -> None:
    """Field cases L1, L2 and L7 beside one another: constant, zero, far from zero, huge; and one with a NaN."""
    columns = [
        np.full(8, 100.0),
        np.zeros(8),
        100 + np.linspace(0, 1, 8),
        np.linspace(-3e38, 3e38, 8),
    ]
    x = np.stack([*columns, np.where(np.arange(8) == 3, np.nan, 1.0)], axis=1).astype(np.float32)
    for symmetric in (True, False):
        read = np.asarray(there_and_back(x, symmetric=symmetric)[1])
        np.testing.assert_allclose(read[:, 0], 100.0, rtol=1e-6)
        assert not read[:, 1].any()
        step = 101 / 127 if symmetric else 1 / 255  # a zero point in int8 would be -25,628
        assert np.abs(read[:, 2] - x[:, 2]).max() <= 0.51 * step
        assert np.abs(read[:, 3] / 3e38 - x[:, 3] / 3e38).max() <= 0.51 / 127
        assert np.isnan(read[:, 4]).all()


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones((2, 3)), {"bits": 1}, r"bits: expected an integer in \[2, 8\], got 1"),
        (np.ones((2, 3)), {"bits": 9}, r"bits: .* got 9"),
        (np.ones((2, 3)), {"bits": True}, r"bits: .* got True"),
        (np.ones((2, 3)), {"bits": 4.0}, r"bits: .* got 4.0"),
        (np.ones((2, 3)), {"axis": 2}, r"axis: expected an integer in \[-2, 1\], got 2"),
        (np.ones((2, 3)), {"axis": -3}, r"axis: .* got -3"),
        (np.ones((2, 3)), {"axis": None}, r"axis: .* got None"),
        (np.ones((2, 3), np.int32), {}, "x: expected a floating dtype, got int32"),
        (np.ones((0, 3)), {}, r"x: expected an axis and at least one number, got shape \(0, 3\)"),
        (np.float32(1), {}, r"x: .* got shape \(\)"),
        (np.ones((2, 3)), {"scale_dtype": jnp.int8}, "scale_dtype: expected a floating .* int8"),
    ],
)
def test_quantize_bad_input_names_value_and_expectation(
    x: Any, options: dict[str, Any], message: str
) -> None:
    x = np.asarray(x, np.float32) if x.dtype == np.float64 else x
    with pytest.raises(ValueError, match=message):
        quantize(x, **options)


def test_error_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x: expected shape \(4,\), got \(2, 2\)"):
        quantization_error(np.ones((2, 2), np.float32), quantize(np.ones(4, np.float32)))
