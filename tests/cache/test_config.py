"""What a cache config accepts, and what the layout it describes says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from driver import SMALL

from jaxkv import CacheConfig
from jaxkv.kv_store import init_store

_SIZES = [
    field.name
    for field in dataclasses.fields(CacheConfig)
    if field.type == "int" and field.name != "num_wide_layers"
]


@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, 2**40, 1.5, True, None, "4"])
@pytest.mark.parametrize("name", _SIZES)
def test_config_size_out_of_range_raises(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected an integer in \[1, .*got ") as error:
        dataclasses.replace(SMALL, **{name: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", ["int3", "", "FLOAT32", "float64"])
def test_config_unknown_format_raises(value: str) -> None:
    with pytest.raises(
        ValueError, match=r"format: expected one of \['bfloat16', .*\], got "
    ) as error:
        dataclasses.replace(SMALL, format=value)
    assert repr(value) in str(error.value)


def test_config_sequence_longer_than_int32_raises() -> None:
    """Field case F1: a position must fit int32."""
    with pytest.raises(
        ValueError, match="max_blocks_per_seq \\* block_size: expected to fit int32"
    ):
        dataclasses.replace(SMALL, block_size=2**16, max_blocks_per_seq=2**15)


def test_config_is_hashable_and_frozen() -> None:
    assert hash(dataclasses.replace(SMALL)) == hash(SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.block_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(("format", "pool"), [("float32", "float32"), ("bfloat16", "uint16")])
def test_config_on_cpu_stores_narrow_formats_as_bits(format: str, pool: str) -> None:
    assert dataclasses.replace(SMALL, format=format).layout.dtype == np.dtype(pool)


def test_config_as_bits_is_kept_as_given() -> None:
    config = dataclasses.replace(SMALL, format="bfloat16", as_bits=False)
    assert config.layout.dtype == jax.numpy.bfloat16
    assert dataclasses.replace(config, num_blocks=3).as_bits is False


def test_config_sentinels_lie_just_past_the_end() -> None:
    """Field case J3: -1 would wrap to the last block, an index past the end is dropped."""
    assert SMALL.no_block == SMALL.num_blocks
    assert SMALL.no_seq == SMALL.max_seqs


def test_layout_bytes_beyond_int32_are_exact() -> None:
    """Field cases F1 and F2: 131,072 blocks of 16 tokens, 8 kv heads of 128."""
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=8,
        head_dim=128,
        block_size=16,
        num_blocks=131_072,
        max_seqs=1,
        max_blocks_per_seq=1,
    )
    assert config.layout.nbytes == 131_072 * 16 * 8 * 2 * 128 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"symmetric_keys": True}, "symmetric_keys: expected only with a quantised format"),
        ({"num_wide_layers": 1}, "num_wide_layers: expected only with a quantised format"),
        ({"format": "fp8_e4m3", "symmetric_keys": False}, "symmetric_keys: expected True for fp8"),
        (
            {"format": "int4", "block_size": 5},
            "block_size: expected an even number for int4, got 5",
        ),
        (
            {"format": "int8", "value_group": 3},
            "value_group: expected a divisor of head_dim 2, got 3",
        ),
        (
            {"format": "int8", "value_group": 0},
            "value_group: expected a divisor of head_dim 2, got 0",
        ),
        ({"format": "int8", "num_wide_layers": 1}, "num_wide_layers: expected 0 or more, and less"),
        ({"format": "int8", "num_wide_layers": -1}, "num_wide_layers: expected 0 or more"),
        ({"format": "int8", "open_format": "int8"}, "format: expected one of"),
    ],
)
def test_config_quantisation_option_that_does_not_fit_raises(
    options: dict[str, Any], message: str
) -> None:
    """Field case L11: a group that does not divide head_dim is refused when the config is built."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **options)


def test_config_odd_head_dim_serves_int4() -> None:
    """Two tokens share a byte, not two channels, so head_dim may be odd; every array counts in nbytes."""
    config = dataclasses.replace(SMALL, format="int4", head_dim=7)
    store = init_store(config)
    assert store.sealed.codes.shape == (2, 11, 2, 2, 14)
    assert config.layout.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(store))
