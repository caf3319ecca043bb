"""The bytes of every format against the arrays that the cache allocates."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import pytest

from jaxkv import CacheConfig, format_bytes, ledger
from jaxkv.kv_store import init_store
from jaxkv.profile import arrays_bytes
from pallas_kernels.layout import FORMATS
from pallas_kernels.sealed import SEALED_FORMATS, QuantisedStore

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_wide_layers": 2},
    {"symmetric_keys": True, "open_format": "float32"},
    {"value_group": 16, "num_wide_layers": 1, "block_size": 6},
    {"value_group": 64, "block_size": 96, "open_format": "float16"},
]
SIZES = {"num_layers": 5, "num_blocks": 7, "max_seqs": 3}


def test_formats_are_those_of_the_kernels() -> None:
    """The ledger imports no kernel; this holds its tables against theirs."""
    widths = {name: row.element_bits for name, row in format_bytes.KV_FORMATS.items()}
    assert widths == {name: 8 * row.itemsize for name, row in FORMATS.items()}
    mine = {
        name: (row.code_bits, not row.has_centres)
        for name, row in format_bytes.QUANTISED_FORMATS.items()
    }
    assert mine == {name: (row.bits, row.is_float) for name, row in SEALED_FORMATS.items()}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("kv_format", [*FORMATS, *SEALED_FORMATS])
def test_store_bytes_equal_layout_and_arrays(kv_format: str, head_dim: int) -> None:
    """Every array by name, and the sum against `layout.nbytes`; head_dim 80 is no multiple of int4's group, and
    rows of scales are padded to whole registers, but for 4 heads of 64."""
    for heads, options in itertools.product((3, 4), OPTIONS):
        quantised = format_bytes.is_quantised(kv_format)
        given = options if quantised else {k: v for k, v in options.items() if k == "block_size"}
        if head_dim % given.get("value_group", 1):
            continue
        size = given.get("block_size", format_bytes.default_block_size(kv_format))
        own = {"num_kv_heads": heads, "head_dim": head_dim}
        shape = {**SIZES, **own, "max_blocks_per_seq": 2, **given, "block_size": size}
        config = CacheConfig(format=kv_format, **shape)
        counted = format_bytes.store_bytes(kv_format=kv_format, **SIZES, **own, **given)
        assert counted.total == config.layout.nbytes
        store = jax.eval_shape(lambda config=config: init_store(config))
        _check_arrays(counted, store)
        if quantised:
            chosen = {k: v for k, v in given.items() if k in ("symmetric_keys", "value_group")}
            arrays = format_bytes.block_arrays(heads, head_dim, kv_format, size, **chosen)
            lead = (5 - 2 * given.get("num_wide_layers", 0), 7)
            for name, array in arrays.items():
                assert getattr(store.sealed, name).shape == (*lead, *array.shape)


def _nbytes(array: Any) -> int:
    return int(array.size) * array.dtype.itemsize


def _check_arrays(counted: format_bytes.StoreBytes, store: Any) -> None:
    if not isinstance(store, QuantisedStore):
        assert (counted.codes, counted.scales, counted.open) == (_nbytes(store.kv), 0, 0)
        return
    sealed = store.sealed
    assert counted.codes == _nbytes(sealed.codes)
    assert counted.scales == _nbytes(sealed.key_affine) + _nbytes(sealed.value_affine)
    assert counted.open == _nbytes(store.open.kv)
    assert counted.wide == (0 if store.wide is None else _nbytes(store.wide.kv))


@pytest.mark.parametrize("kv_format", SEALED_FORMATS)
def test_store_bytes_equal_allocated_arrays(kv_format: str) -> None:
    """Once with memory behind it."""
    config = CacheConfig(5, 2, 64, 32, 7, 3, 2, format=kv_format, num_wide_layers=1)
    counted = format_bytes.store_bytes(
        5, 2, 64, kv_format, num_blocks=7, max_seqs=3, block_size=32, num_wide_layers=1
    )
    assert counted.total == arrays_bytes(init_store(config))


def test_bytes_per_token_quantised_counts_scales_and_rounds_up() -> None:
    """By hand, 8 kv heads of 128: codes 2,048; K scale and centre 4,096 a block of 64; V scale 2 a head."""
    assert ledger.bytes_per_token_per_layer(8, 128, "int8") == 2048 + 4096 // 64 + 16
    assert ledger.bytes_per_token_per_layer(8, 128, "int8", block_size=32) == 2048 + 128 + 16
    assert ledger.bytes_per_token_per_layer(8, 128, "fp8_e4m3") == 2048 + 2048 // 64 + 16
    assert ledger.bytes_per_token_per_layer(8, 128, "int4") == 1024 + 64 + 4 * 16
    assert ledger.bytes_per_token(10, 8, 128, "int4") == 11_520
    # Lone rows of 128 numbers take 512 bytes, two of 9 and one of 7 too; 1024 / 7 is rounded up.
    assert ledger.bytes_per_token_per_layer(2, 64, "fp8_e4m3") == 256 + 2 * 512 // 64
    assert ledger.bytes_per_token_per_layer(1, 9, "int8", block_size=7) == 18 + 147
    assert ledger.bytes_per_token(3, 1, 9, "int8", block_size=7) == 3 * 165
    assert ledger.bytes_per_token(3, 8, 128, "bfloat16", block_size=7) == 3 * 4096
    assert format_bytes.open_block_bytes(8, 128, "int8") == 64 * 4096
    assert format_bytes.open_block_bytes(8, 128, "int8", open_format="float32") == 2 * 64 * 4096
    assert format_bytes.open_block_bytes(8, 128, "float16") == 0


def test_values_and_latents_of_quantised_formats_are_refused() -> None:
    """Weights have no blocks to share scales over, and a latent no layout: nothing counts as bare codes."""
    for kv_format in SEALED_FORMATS:
        with pytest.raises(ValueError, match=f"float32, float16, bfloat16; got '{kv_format}'"):
            ledger.values_bytes(100, kv_format)
        with pytest.raises(NotImplementedError, match=f"MLA latents, got '{kv_format}'"):
            ledger.mla_bytes_per_token_per_layer(512, 64, kv_format)


@pytest.mark.parametrize(
    ("kv_format", "options", "message"),
    [
        ("int9", {}, "kv_format: expected one of float32, .*int4; got 'int9'"),
        ("int4", {"block_size": 9}, "block_size: expected an even number for int4, got 9"),
        ("int8", {"block_size": 0}, "block_size: expected an integer >= 1, got 0"),
        ("int8", {"value_group": 24}, "value_group: expected a divisor of head_dim 64, got 24"),
        ("fp8_e4m3", {"symmetric_keys": False}, "symmetric_keys: expected True for fp8_e4m3"),
        ("bfloat16", {"value_group": 32}, "value_group: expected only with a quantised format"),
        ("int8", {"open_format": "int8"}, "open_format: expected one of float32, .*; got 'int8'"),
        ("float32", {"num_wide_layers": 1}, "num_wide_layers: expected only with a quantised"),
        ("int8", {"num_wide_layers": 1}, "num_wide_layers: expected less than half of 2 layers"),
    ],
)
def test_store_bytes_bad_choice_names_value_and_expectation(
    kv_format: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        format_bytes.store_bytes(2, 2, 64, kv_format, num_blocks=3, max_seqs=1, **options)
