"""Short rows of words in one flat array.

    words   [ row 0, padding | row 1, padding | ... ]      stride words each

An i32[n, k] with small k costs up to 128 / k times its bytes on a TPU, which pads the last axis to 128 lanes; the flat
array has no such axis.  Strides divide a cache line or are multiples of it, so no row lies on one line more than it must.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

Array = jax.Array

LINE = 16  # words of a cache line


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["num_rows", "width"]
)
@dataclasses.dataclass(frozen=True)
class FlatRows:
    """num_rows rows of width words.

    Attributes:
      words: i32[num_rows * stride].
      num_rows, width: static.
    """

    words: Array
    num_rows: int
    width: int

    @property
    def stride(self) -> int:
        """Words from one row to the next; static."""
        return stride_of(self.width)

    def read(self, rows: Array, first: int = 0, width: int | None = None) -> Array:
        """Returns i32[..., width], words of rows i32[...]; the rest of the row where width is None.

        REQUIRES: rows within [0, num_rows).

        Args:
          rows: which.
          first: the first column; one below 0 counts from the row's end.
          width: words.
        """
        return self._gather(rows, first, width, offset_dim=rows.ndim)

    def columns(self, rows: Array, first: int = 0, width: int | None = None) -> Array:
        """Returns what `read` does as i32[width, ...]: few words in front cost a TPU no padding."""
        return self._gather(rows, first, width, offset_dim=0)

    def _gather(self, rows: Array, first: int, width: int | None, offset_dim: int) -> Array:
        first %= self.width
        width = self.width - first if width is None else width
        dims = jax.lax.GatherDimensionNumbers(
            offset_dims=(offset_dim,), collapsed_slice_dims=(), start_index_map=(0,)
        )
        at = (rows * self.stride + first)[..., None]
        mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.gather(self.words, at, dims, (width,), mode=mode)

    def write(self, rows: Array, values: Array, first: int = 0) -> FlatRows:
        """Sets words of rows i32[k] to values i32[k, n], from column `first` on; row num_rows is skipped.

        REQUIRES: rows named twice get the same words.
        """
        dims = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
        )
        at = self._places(rows, first % self.width)[:, None]
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        return dataclasses.replace(
            self, words=jax.lax.scatter(self.words, at, values, dims, mode=mode)
        )

    def set(self, rows: Array, columns: Array, values: Array) -> FlatRows:
        """Sets one word each (i32[k] all); row num_rows is skipped."""
        words = self.words.at[self._places(rows, columns)].set(values, mode="drop")
        return dataclasses.replace(self, words=words)

    def _places(self, rows: Array, columns: Array | int) -> Array:
        return jnp.where(rows < self.num_rows, rows * self.stride + columns, self.words.shape[0])

    def unpacked(self) -> Array:
        """Returns i32[num_rows, width]; copies, for checks and pictures."""
        return self.words.reshape(self.num_rows, self.stride)[:, : self.width]


def flat_rows(num_rows: int, row: Array) -> FlatRows:
    """Returns num_rows times the same row, i32[width].

    Raises:
      ValueError: a place would not fit 32 bits.
    """
    width = row.shape[0]
    size = num_rows * stride_of(width)
    if size > 2**31 - 1:
        raise ValueError(
            f"num_rows: expected at most {(2**31 - 1) // stride_of(width):,} rows of {width} words, got {num_rows:,}"
        )
    padded = jnp.pad(row.astype(jnp.int32), (0, stride_of(width) - width))
    return FlatRows(jnp.tile(padded, num_rows), num_rows, width)


def stride_of(width: int) -> int:
    """Returns the words that a row takes: a power of two up to a cache line, whole lines beyond."""
    if width <= LINE:
        return 1 << (width - 1).bit_length()
    return -(-width // LINE) * LINE
