"""The TPU kernels that change the pool, in their interpreter: new tokens, copies and zeroing of whole blocks.

The oracle is one NumPy assignment per token or block on the bits of the pool, so a NaN's payload counts too.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels.kv_write.tpu as kv_write_tpu
from pallas_kernels.block_copy.tpu import copy_blocks_tpu
from pallas_kernels.block_zero.tpu import zero_blocks_tpu
from pallas_kernels.layout import BatchView, KVLayout, KVStore, encode, kv_format
from pallas_kernels.sealed import SEALED_FORMATS, SealedLayout, SealedStore

INTERPRET = pltpu.InterpretParams()
LENS = {
    "decode": [(1, 1), (1, 8), (1, 9), (0, 5), (1, 16), (1, 17), (0, 0), (1, 40)],
    "speculative": [(4, 4), (4, 10), (3, 17), (0, 9), (1, 16), (2, 33)],
    "prefill": [(24, 24), (17, 40), (24, 29), (1, 5), (0, 3), (16, 32)],
}
quick = functools.partial(jax.jit, compiler_options=FAST_INTERPRET)


def make_store(layout: KVLayout) -> KVStore:
    """Returns a store of random bits: among them NaN, Inf and subnormal numbers."""
    raw = np.random.default_rng(3).integers(0, 256, (*layout.shape, layout.format.itemsize))
    raw = raw.astype(np.uint8).view(f"uint{8 * layout.format.itemsize}")[..., 0]
    return KVStore(jnp.asarray(raw.view(layout.dtype)), layout)


def raw(store: KVStore) -> np.ndarray:
    """Returns the bits of a store."""
    return np.asarray(store.kv).view(f"uint{8 * store.layout.format.itemsize}")


def make_view(layout: KVLayout, lens, seed: int = 0) -> BatchView:
    """Returns a view of rows (q_len, kv_len) in shuffled blocks; unused entries are NO_BLOCK."""
    ids = iter(np.random.default_rng(seed).permutation(layout.num_blocks).tolist())
    tables = np.full((len(lens), 6), layout.no_block, np.int32)
    for row, (_, kv_len) in enumerate(lens):
        for column in range(-(-kv_len // layout.block_size)):
            tables[row, column] = next(ids)
    q_lens, kv_lens = np.array(lens, np.int32).T
    query_len = max(1, int(q_lens.max()))
    index = np.arange(query_len, dtype=np.int32)[None]
    positions = np.where(index < q_lens[:, None], (kv_lens - q_lens)[:, None] + index, 0)
    return BatchView(*(jnp.asarray(x, jnp.int32) for x in (tables, kv_lens, q_lens, positions)))


def make_tokens(layout: KVLayout, view: BatchView):
    """Returns random k and v, different from each other."""
    shape = (*view.positions.shape, layout.num_kv_heads, layout.head_dim)
    rng = np.random.default_rng(5)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in "kv")


def expect(store: KVStore, layer: int, k, v, view: BatchView) -> np.ndarray:
    """Returns the bits of the pool after one assignment per token."""
    layout, pool = store.layout, raw(store).copy()
    bit_type = f"uint{8 * layout.format.itemsize}"
    k, v = (np.asarray(encode(layout, x)).view(bit_type) for x in (k, v))
    tables, kv_lens, q_lens = (
        np.asarray(x) for x in (view.block_tables, view.kv_lens, view.q_lens)
    )
    for row, q_len in enumerate(q_lens):
        for j in range(q_len):
            position = kv_lens[row] - q_len + j
            block = tables[row, position // layout.block_size]
            if block < layout.num_blocks:
                slot = pool[layer, block, :, position % layout.block_size]
                slot[:, : layout.head_dim] = k[row, j]
                slot[:, layout.head_dim :] = v[row, j]
    return pool


def write(store, layer, k, v, view, interpret=INTERPRET) -> KVStore:
    run = quick(functools.partial(kv_write_tpu.write_kv_tpu, interpret=interpret))
    return run(store, jnp.int32(layer), k, v, view)


@pytest.mark.parametrize("phase", LENS)
@pytest.mark.parametrize(
    ("format", "as_bits", "block_size"),
    [("float32", False, 8), ("bfloat16", False, 16), ("bfloat16", True, 32)],
)
def test_write_changes_exactly_the_bits_of_the_new_tokens(phase, format, as_bits, block_size):
    """Field cases A1, D8, O7: position p goes to block p // block_size, K and V apart, nothing else changes."""
    layout = KVLayout(2, 26, 2, block_size, 64, kv_format(format), as_bits)
    store, view = make_store(layout), make_view(layout, LENS[phase])
    k, v = make_tokens(layout, view)
    got = write(store, 1, k, v, view)
    assert got.layout == layout
    assert got.kv.dtype == layout.dtype
    assert np.array_equal(raw(got), expect(store, 1, k, v, view))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_write_in_several_steps_equals_one_step(phase, monkeypatch):
    layout = KVLayout(2, 26, 1, 8, 64, kv_format("float32"), False)
    store, view = make_store(layout), make_view(layout, LENS[phase])
    k, v = make_tokens(layout, view)
    monkeypatch.setattr(kv_write_tpu, "STEP_BYTES", 3 * 8 * 128 * 4)
    assert np.array_equal(raw(write(store, 0, k, v, view)), expect(store, 0, k, v, view))


def test_write_to_no_block_is_dropped():
    """Field cases E3, J3, R4: entries past the pool, far past it and below it reach no block."""
    layout = KVLayout(1, 26, 1, 8, 64, kv_format("float32"), False)
    store, view = make_store(layout), make_view(layout, LENS["decode"])
    tables = view.block_tables.at[1].set(layout.no_block).at[2].set(2_000_000).at[4].set(-1)
    gone = dataclasses.replace(view, block_tables=tables)
    k, v = make_tokens(layout, view)
    still = dataclasses.replace(view, q_lens=view.q_lens.at[jnp.array([1, 2, 4])].set(0))
    assert np.array_equal(raw(write(store, 0, k, v, gone)), expect(store, 0, k, v, still))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_write_race_detection_is_silent(phase, monkeypatch, capfd):
    layout = KVLayout(1, 26, 1, 16, 64, kv_format("bfloat16"), False)
    store, view = make_store(layout), make_view(layout, LENS[phase])
    k, v = make_tokens(layout, view)
    monkeypatch.setattr(kv_write_tpu, "STEP_BYTES", 4 * 8 * 128 * 2)
    got = write(store, 0, k, v, view, pltpu.InterpretParams(detect_races=True))
    assert np.array_equal(raw(got), expect(store, 0, k, v, view))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("count", [0, 2, 4, 9])
def test_copy_moves_the_first_pairs_of_all_layers(count, capfd):
    layout = KVLayout(3, 7, 2, 8, 64, kv_format("bfloat16"), True)
    store = make_store(layout)
    src, dst = np.array([5, 5, 7, 0], np.int32), np.array([2, 6, 1, 3], np.int32)
    expected = raw(store).copy()
    for a, b in list(zip(src, dst, strict=True))[:count]:
        if a < layout.num_blocks:
            expected[:, b] = expected[:, a]
    interpret = pltpu.InterpretParams(detect_races=True)
    run = quick(functools.partial(copy_blocks_tpu, interpret=interpret))
    got = run(store, jnp.asarray(src), jnp.asarray(dst), jnp.int32(count))
    assert np.array_equal(raw(got), expected)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("sealed", [False, True])
def test_zero_clears_the_first_blocks_of_all_layers_and_arrays(sealed, capfd):
    """A plain pool and the three arrays of int4 codes; an id outside the pool is skipped, one past the count is left."""
    if sealed:
        layout = SealedLayout(3, 7, 2, 64, 64, SEALED_FORMATS["int4"], False, 32, True)
        rng = np.random.default_rng(0)
        store = SealedStore(
            *(
                jnp.asarray(rng.integers(1, 250, shape).astype(dtype))
                for shape, dtype in (
                    (layout.codes_shape, layout.codes_dtype),
                    (layout.key_affine_shape, layout.affine_dtype),
                    (layout.value_affine_shape, layout.affine_dtype),
                )
            ),
            layout,
        )
    else:
        store = make_store(KVLayout(3, 7, 2, 8, 64, kv_format("bfloat16"), True))
    interpret = pltpu.InterpretParams(detect_races=True)
    run = quick(functools.partial(zero_blocks_tpu, interpret=interpret))
    ids = jnp.array([5, 7, 0, 3], jnp.int32)
    for count, zeroed in ((0, []), (3, [0, 5])):
        got = run(store, ids, jnp.int32(count))
        for before, after in zip(jax.tree.leaves(store), jax.tree.leaves(got), strict=True):
            expected = np.asarray(before).copy()
            expected[:, zeroed] = 0
            assert np.array_equal(np.asarray(after), expected)
    assert "RACE" not in capfd.readouterr().out


def test_write_and_copy_refuse_what_mosaic_refuses():
    layout = KVLayout(1, 4, 1, 8, 64, kv_format("float16"), False)
    store, view = make_store(layout), make_view(layout, [(1, 1)])
    k, v = make_tokens(layout, view)
    with pytest.raises(NotImplementedError, match=r"float16.*supported are float32 or bfloat16"):
        write(store, 0, k, v, view)
    with pytest.raises(NotImplementedError, match=r"float16.*supported are float32 or bfloat16"):
        copy_blocks_tpu(store, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), jnp.int32(1))
