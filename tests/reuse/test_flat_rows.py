"""Rows in a flat array behave like those of i32[n, k]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.flat_rows import FlatRows, flat_rows, stride_of

WIDTHS = [1, 3, 8, 15, 16, 27, 44]


def counted(width: int) -> tuple[FlatRows, np.ndarray]:
    """Returns five rows of distinct numbers, and the same as a NumPy array."""
    want = np.arange(5 * width, dtype=np.int32).reshape(5, width)
    rows = flat_rows(5, jnp.zeros(width, jnp.int32))
    return rows.write(jnp.arange(5, dtype=jnp.int32), jnp.asarray(want)), want


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_read_as_they_were_written(width: int) -> None:
    rows, want = counted(width)
    ids = jnp.array([[4, 0], [2, 2]], jnp.int32)
    np.testing.assert_array_equal(rows.unpacked(), want)
    np.testing.assert_array_equal(rows.read(ids), want[np.asarray(ids)])
    np.testing.assert_array_equal(rows.read(ids, -1), want[np.asarray(ids), -1:])
    np.testing.assert_array_equal(rows.read(ids, 0, 1), want[np.asarray(ids), :1])
    np.testing.assert_array_equal(rows.columns(ids), np.moveaxis(want[np.asarray(ids)], -1, 0))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_row_behind_the_last_is_skipped_and_no_neighbour_is_touched(width: int) -> None:
    rows, want = counted(width)
    ids, values = jnp.array([5, 1], jnp.int32), jnp.full((2, 1), -7, jnp.int32)
    last = want.copy()
    last[1, -1] = -7
    np.testing.assert_array_equal(rows.write(ids, values, -1).unpacked(), last)
    first = want.copy()
    first[1, 0] = -7
    columns = jnp.zeros(2, jnp.int32)
    np.testing.assert_array_equal(rows.set(ids, columns, values[:, 0]).unpacked(), first)


def test_rows_lie_on_as_few_cache_lines_as_they_can() -> None:
    strides = {width: stride_of(width) for width in WIDTHS}
    assert strides == {1: 1, 3: 4, 8: 8, 15: 16, 16: 16, 27: 32, 44: 48}


def test_more_rows_than_32_bits_can_place_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 67,108,863 rows of 27 words, got 67,108,864"):
        jax.eval_shape(lambda: flat_rows(2**26, jnp.zeros(27, jnp.int32)))
