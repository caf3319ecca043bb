"""Sealing blocks: the TPU kernel in its interpreter writes what the xla scatter writes, and nothing else."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from jax.experimental.pallas import tpu as pltpu
from sealed_cases import SEALED_CASES, SealedCase, make_sealed_inputs

from pallas_kernels.block_seal import seal_blocks
from pallas_kernels.block_seal.tpu import seal_blocks_tpu
from pallas_kernels.quantiser import dequantize_groups, quantize_fp8, quantize_groups
from pallas_kernels.sealed import seal, unseal


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_tpu_seals_the_named_blocks_of_one_layer_bit_for_bit(name: str) -> None:
    """Ids past the pool are skipped; every other byte of the pools stays."""
    case = next(case for case in SEALED_CASES if case.name == name)
    store = make_sealed_inputs(case).store
    layout = store.layout
    ids = jnp.array([3, layout.num_blocks, 0, layout.num_blocks + 7], jnp.int32)
    shape = (4, layout.num_kv_heads, layout.block_size, 2 * layout.head_dim)
    kv = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    jit = functools.partial(jax.jit, compiler_options=FAST_INTERPRET)
    on_tpu = functools.partial(seal_blocks_tpu, interpret=pltpu.InterpretParams())
    got = jit(on_tpu)(store, jnp.int32(1), kv, ids)
    want = jit(functools.partial(seal_blocks, implementation="xla"))(store, jnp.int32(1), kv, ids)
    for field in ("codes", "key_affine", "value_affine"):
        a, b, old = (np.asarray(getattr(x, field)) for x in (got, want, store))
        assert a.tobytes() == b.tobytes(), field
        same = (
            np.delete(a[1], [0, 3], axis=0).tobytes() == np.delete(old[1], [0, 3], axis=0).tobytes()
        )
        assert same
        assert a[0].tobytes() == old[0].tobytes()
        assert a[1, 3].tobytes() != old[1, 3].tobytes()


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_unseal_of_lone_rows_is_the_quantiser_alone(heads: int, format: str) -> None:
    """64, 192 and 320 numbers a row are stored as [2, 128 or 256], zeros behind them; bits or not, what is read is the same."""
    case = SealedCase("lone rows", format, 64, 64, heads, 1, (), symmetric_keys=True)
    kv = np.random.default_rng(2).normal(size=(2, heads, 64, 128)).astype(np.float32)
    how = {"scale_dtype": jnp.bfloat16}
    quantise = functools.partial(quantize_fp8, **how)
    if format == "int8":
        quantise = functools.partial(quantize_groups, bits=8, symmetric=True, **how)
    want = [
        dequantize_groups(quantise(x, axis))
        for x, axis in zip(np.split(kv, 2, -1), (2, 3), strict=True)
    ]
    for as_bits in (False, True):
        layout = dataclasses.replace(case.layout, as_bits=as_bits)
        blocks = seal(layout, kv)
        for x, shape in (
            (blocks.key_affine, layout.key_affine_shape),
            (blocks.value_affine, layout.value_affine_shape),
        ):
            assert x.shape == (2, 2, 256 if heads > 4 else 128) == (2, *shape[2:])
            assert not x.reshape(2, -1)[:, heads * 64 :].any()
        for got, expected in zip(unseal(layout, blocks), want, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_seal_bad_shapes_name_what_was_expected() -> None:
    store = make_sealed_inputs(SEALED_CASES[0]).store
    ids = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"kv: expected \[n, 2, 64, 128\], got"):
        seal_blocks(store, 0, jnp.zeros((1, 2, 32, 128)), ids)
    with pytest.raises(ValueError, match=r"ids: expected i32\[1\], got float32"):
        seal_blocks(store, 0, jnp.zeros((1, 2, 64, 128)), jnp.zeros(1))
