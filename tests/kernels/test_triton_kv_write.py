"""The Triton write kernel, run by the Pallas interpreter, against one NumPy assignment per token and head."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET

from pallas_kernels.kv_write.reference import write_kv_reference
from pallas_kernels.kv_write.triton import write_kv_triton
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format

NUM_BLOCKS = 12
write = jax.jit(functools.partial(write_kv_triton, interpret=True), compiler_options=FAST_INTERPRET)


def make_layout(format: str, as_bits: bool, **sizes: int) -> KVLayout:
    """Returns a small layout: 3 kv heads (no power of two), head_dim 24 (padded to 32), blocks of 4."""
    sizes = {"num_kv_heads": 3, "block_size": 4, "head_dim": 24} | sizes
    return KVLayout(2, NUM_BLOCKS, format=kv_format(format), as_bits=as_bits, **sizes)


def make_view(lens: list[tuple[int, int]], query_len: int, block_size: int = 4) -> BatchView:
    """Returns a view of rows with the given (q_len, kv_len) in shuffled blocks, block 0 among them."""
    ids = iter(np.roll(np.random.default_rng(1).permutation(NUM_BLOCKS), 3).tolist())
    tables = np.full((len(lens), 5), NUM_BLOCKS, np.int32)
    for row, (_, kv_len) in enumerate(lens):
        for column in range(-(-kv_len // block_size)):
            tables[row, column] = next(ids)
    q_lens, kv_lens = np.array(lens, np.int32).T
    index = np.arange(query_len, dtype=np.int32)[None]
    positions = np.where(index < q_lens[:, None], (kv_lens - q_lens)[:, None] + index, 0)
    return BatchView(*(jnp.asarray(x, jnp.int32) for x in (tables, kv_lens, q_lens, positions)))


def random_store(layout: KVLayout) -> KVStore:
    """Returns a store of random bits, so that any slot that changes by accident shows.

    In a pool of numbers all NaNs are alike: XLA:CPU, under the interpreter, does not keep their payload.
    """
    bits = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    numbers = bits.view(layout.format.dtype).copy()
    if layout.dtype == layout.format.dtype:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            numbers[np.isnan(numbers)] = np.nan
    return KVStore(jnp.asarray(numbers.view(layout.dtype).reshape(layout.shape)), layout)


def random_kv(view: BatchView, layout: KVLayout) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 k and v that differ everywhere, with NaN in padding."""
    rng = np.random.default_rng(2)
    shape = (*view.positions.shape, layout.num_kv_heads, layout.head_dim)
    k, v = rng.normal(size=(2, *shape)).astype(np.float32)
    padding = np.arange(view.query_len)[None, :] >= np.asarray(view.q_lens)[:, None]
    k[padding] = v[padding] = np.nan
    return k, v


def expected_bytes(store: KVStore, layer: int, k: Any, v: Any, view: BatchView) -> bytes:
    """Returns the pool's bytes after one plain assignment per token and head."""
    layout = store.layout
    kv = np.array(store.kv).view(layout.format.dtype)
    tables, kv_lens, q_lens = map(np.asarray, (view.block_tables, view.kv_lens, view.q_lens))
    for row in range(len(kv_lens)):
        for j in range(q_lens[row]):
            column, slot = divmod(int(kv_lens[row] - q_lens[row] + j), layout.block_size)
            if tables[row, column] < NUM_BLOCKS:
                token = np.concatenate([k[row, j], v[row, j]], -1).astype(layout.format.dtype)
                kv[layer, tables[row, column], :, slot] = token
    return kv.tobytes()


@pytest.mark.parametrize(
    ("format", "as_bits"),
    [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", True)],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_only_the_new_tokens_of_the_layer_change(format: str, as_bits: bool, layer: int) -> None:
    """Decode, a chunk over a block edge, an idle row, an empty row, a padded row in one call."""
    layout = make_layout(format, as_bits)
    view = make_view([(1, 9), (7, 10), (0, 6), (0, 0), (2, 4)], query_len=7)
    store, (k, v) = random_store(layout), random_kv(view, layout)
    written = write(store, jnp.int32(layer), jnp.asarray(k), jnp.asarray(v), view)
    assert written.layout == layout
    assert np.asarray(written.kv).tobytes() == expected_bytes(store, layer, k, v, view)


@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 8, 9])
def test_decode_around_block_edges(kv_len: int) -> None:
    """Field case A1: position p goes to block p // 4, slot p % 4."""
    layout = make_layout("float32", False)
    view = make_view([(1, kv_len), (1, 2)], query_len=1)
    store, (k, v) = random_store(layout), random_kv(view, layout)
    written = write(store, jnp.int32(1), jnp.asarray(k), jnp.asarray(v), view)
    assert np.asarray(written.kv).tobytes() == expected_bytes(store, 1, k, v, view)


def test_entries_that_are_no_block_write_nothing() -> None:
    """Field cases E3 and J3: padding never lands in the last block, nor in any other.

    The array has a block more than the layout knows of: the interpreter drops writes past the end of an
    array, a GPU does not.
    """
    layout = make_layout("float32", False)
    view = make_view([(3, 6), (2, 3)], query_len=3)
    store, (k, v) = random_store(layout), random_kv(view, layout)
    store = dataclasses.replace(store, kv=jnp.concatenate([store.kv, store.kv[:, :1]], axis=1))
    for entry in (NUM_BLOCKS, 2_000_000, -1):
        tables = view.block_tables.at[0, 1].set(entry)
        broken = dataclasses.replace(view, block_tables=tables)
        written = write(store, jnp.int32(0), jnp.asarray(k), jnp.asarray(v), broken)
        expected = dataclasses.replace(
            view, block_tables=view.block_tables.at[0, 1].set(NUM_BLOCKS)
        )
        assert np.asarray(written.kv).tobytes() == expected_bytes(store, 0, k, v, expected)


def test_equals_the_reference_on_a_chunk_of_many_programs() -> None:
    layout = make_layout("bfloat16", False, num_kv_heads=2, block_size=8, head_dim=16)
    view = make_view([(33, 40), (30, 30)], query_len=33, block_size=8)
    store, (k, v) = random_store(layout), random_kv(view, layout)
    k, v = jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16)
    written = write(store, jnp.int32(1), k, v, view)
    expected = write_kv_reference(store, jnp.int32(1), k, v, view)
    assert np.asarray(written.kv).tobytes() == np.asarray(expected.kv).tobytes()


def test_what_is_not_supported_says_what_is() -> None:
    layout = make_layout("float32", False)
    view = make_view([(1, 1)], query_len=1)
    k = jnp.zeros((1, 1, 3, 24), jnp.float8_e5m2)
    with pytest.raises(NotImplementedError, match="supports float32, bfloat16 and float16, got k"):
        write_kv_triton(random_store(layout), jnp.int32(0), k, k, view)
