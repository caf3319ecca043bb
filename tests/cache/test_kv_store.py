"""Copying blocks and reading sequences back, bit by bit."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from driver import SMALL

from jaxkv import KVStore
from jaxkv.kv_store import gather_dense, init_store
from pallas_kernels.block_copy import copy_blocks
from pallas_kernels.layout import FORMATS, decode, encode

_copy = jax.jit(copy_blocks)


def _random_store(format: str) -> KVStore:
    """Returns a store of random bit patterns: NaN, Inf and denormals of every kind included."""
    layout = dataclasses.replace(SMALL, format=format).layout
    bits = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    return KVStore(kv=jnp.asarray(bits.view(layout.dtype).reshape(layout.shape)), layout=layout)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_copy_blocks_first_pairs_are_bit_equal_and_the_rest_untouched(
    format: str, count: int
) -> None:
    """Field case D8: K and V of all layers and heads, whatever bits they hold."""
    store = _random_store(format)
    src, dst = np.array([10, 0, 10], np.int32), np.array([0 + 3, 7, 5], np.int32)
    want = np.array(store.kv)
    for s, d in list(zip(src, dst, strict=True))[:count]:
        want[:, d] = want[:, s]
    after = _copy(store, src, dst, np.int32(count))
    assert np.asarray(after.kv).tobytes() == want.tobytes()
    assert (after.kv.dtype, after.layout) == (store.kv.dtype, store.layout)


@pytest.mark.parametrize("format", FORMATS)
def test_gather_dense_permuted_table_reads_in_order(format: str) -> None:
    """Sentinels past the end are clamped, block 0 and the last block are in use."""
    store = init_store(dataclasses.replace(SMALL, format=format))
    layout = store.layout
    values = np.arange(np.prod(layout.shape), dtype=np.float32).reshape(layout.shape) % 251
    store = KVStore(kv=encode(layout, jnp.asarray(values)), layout=layout)
    table = np.array([10, 0, 4, SMALL.no_block], np.int32)
    k, v = gather_dense(store, table, 9)
    assert k.shape == v.shape == (2, 9, 2, 2)
    for token in range(9):
        block, slot = table[token // 4], token % 4
        np.testing.assert_array_equal(k[:, token], values[:, block, :, slot, :2])
        np.testing.assert_array_equal(v[:, token], values[:, block, :, slot, 2:])


@pytest.mark.parametrize("format", FORMATS)
def test_encode_then_decode_rounds_once_to_the_format(format: str) -> None:
    layout = dataclasses.replace(SMALL, format=format).layout
    x = np.array([0.1, -3.25, 1e-3, np.inf, 65504.0], np.float32)
    stored = encode(layout, jnp.asarray(x))
    assert stored.dtype == layout.dtype
    np.testing.assert_array_equal(
        decode(layout, stored), jnp.asarray(x).astype(format).astype(jnp.float32)
    )


def test_store_beyond_65536_blocks_keeps_them_apart() -> None:
    """Field cases F1-F3: data in blocks 65535, 65536 and 69999 of 70,000 tiny ones."""
    config = dataclasses.replace(
        SMALL, num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, num_blocks=70_000
    )
    store = init_store(config)
    ids = jnp.array([65_535, 65_536, 69_999])
    marks = jnp.arange(1.0, 4.0)[:, None] * jnp.ones((1, 16))
    store = dataclasses.replace(store, kv=store.kv.at[0, ids, 0, 0].set(marks))
    src, dst = np.array([65_536, 69_999], np.int32), np.array([0, 65_537], np.int32)
    store = jax.jit(copy_blocks, donate_argnums=0)(store, src, dst, np.int32(2))
    read = jax.jit(functools.partial(gather_dense, kv_len=4))
    k, v = read(store, jnp.array([69_999, 65_535, 0, 65_537]))
    assert k[0, :, 0, 0].tolist() == v[0, :, 0, 7].tolist() == [3, 1, 2, 3]
    used = np.flatnonzero(np.asarray(store.kv)[0, :, 0, 0, 0])
    assert used.tolist() == [0, 65_535, 65_536, 65_537, 69_999]
