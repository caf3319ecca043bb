"""TPU padding against what the TPU compiler reports, shards of kv heads, and index width."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import CacheConfig, capacity, device_bytes, format_bytes
from jaxkv.kv_store import init_store
from jaxkv.model_shape import model_shape
from jaxkv.profile import padded_bytes

# Bytes of one (block, kv head) of a row-major pool as libtpu 0.0.52 reports them (argument bytes of
# pools [3, 7, 2, block_size, width]); v5e, v6e and v5p agree, and so do uint16, bfloat16, float16.
MEASURED = {
    (4, 128): {32: 2048, 16: 1024},
    (4, 160): {32: 4096, 16: 2048},
    (4, 256): {32: 4096, 16: 2048},
    (8, 128): {32: 4096, 16: 2048},
    (8, 160): {32: 8192, 16: 4096},
    (8, 256): {32: 8192, 16: 4096},
    (16, 128): {32: 8192, 16: 4096},
    (16, 160): {32: 16384, 16: 8192},
    (16, 256): {32: 16384, 16: 8192},
    (32, 128): {32: 16384, 16: 8192},
    (32, 160): {32: 32768, 16: 16384},
    (32, 256): {32: 32768, 16: 16384},
    # Rows that do not fill a tile: 3 -> 4, 6 -> 8, 12 -> 16, 20 -> 24; one 16-bit row -> 2.
    (1, 128): {32: 512, 16: 512},
    (3, 128): {32: 2048, 16: 1024},
    (6, 128): {32: 4096, 16: 2048},
    (12, 128): {32: 8192, 16: 4096},
    (20, 128): {32: 12288, 16: 6144},
}

MEASURE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

topology = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1])
device = SingleDeviceSharding(topology.devices[0])
for arrays, force in json.loads(sys.argv[1]):
    pools = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=None if force else device)
        for shape, dtype in arrays
    ]
    orders = [tuple(range(len(pool.shape))) for pool in pools]
    formats = [Format(Layout(major_to_minor=order), device) for order in orders]
    options = {"in_shardings": (formats,)} if force else {}
    first = jax.jit(lambda pools: [pool[(0,) * pool.ndim] for pool in pools], **options)
    compiled = first.lower(pools).compile()
    size = compiled.memory_analysis().argument_size_in_bytes
    found = [format.layout.major_to_minor for format in compiled.input_formats[0][0]]
    print("RESULT", json.dumps([size, found == orders]))
"""


@pytest.mark.parametrize(("rows_width", "by_bits"), MEASURED.items())
def test_tpu_pool_bytes_measured_shapes_match(
    rows_width: tuple[int, int], by_bits: dict[int, int]
) -> None:
    for bits, measured in by_bits.items():
        assert device_bytes.tpu_pool_bytes((3, 7, 2, *rows_width), bits) == 3 * 7 * 2 * measured


def test_tpu_tile_rows_unmeasured_width_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="element_bits: expected 8, 16 or 32, got 4"):
        device_bytes.tpu_tile_rows(32, 4)


def measure(cases: Sequence[tuple[Sequence[tuple[Any, str]], bool]]) -> list[tuple[int, bool]]:
    """Returns per ((shape, dtype) of arrays, forced row-major) their TPU bytes and if all are row-major."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is touched, so processes need no lock
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(cases)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [tuple(json.loads(line.removeprefix("RESULT "))) for line in lines]


BITS = {"float32": 32, "uint16": 16, "bfloat16": 16}
POOLS = [(3, 7, 2, *rows_width) for rows_width in MEASURED]
POOLS += [(2, 1000, 3, 16, 64), (2, 1000, 3, 16, 160), (2, 1000, 3, 32, 576)]
STORES: list[tuple[str, int, dict[str, Any]]] = [  # format, head_dim, options
    *((name, dim, {}) for name in ("int8", "fp8_e4m3", "int4") for dim in (64, 128)),
    ("int8", 128, {"symmetric_keys": True}),
    ("int4", 128, {"num_wide_layers": 1, "value_group": 64}),
]


def quantised_store(kv_format: str, head_dim: int, options: dict[str, Any]) -> Any:
    """Returns a store as shapes: 3 layers, 7 blocks, 5 sequences; 8 kv heads, 2 at head_dim 64."""
    size = format_bytes.default_block_size(kv_format)
    config = CacheConfig(
        3, 8 if head_dim == 128 else 2, head_dim, size, 7, 5, 4,
        format=kv_format, as_bits=False, **options,
    )  # fmt: skip
    return jax.eval_shape(lambda: init_store(config))


def arrays_of(store: Any) -> tuple[tuple[Any, str], ...]:
    """Returns (shape, dtype) of a store's arrays."""
    return tuple((x.shape, x.dtype.name) for x in jax.tree.leaves(store))


@functools.cache
def measured() -> dict[tuple[Any, bool], tuple[int, bool]]:
    """Returns what one process of the TPU compiler says of every case below."""
    singles = [(shape, dtype) for shape in POOLS for dtype in BITS]
    cases: list[tuple[Any, bool]] = [((x,), force) for x in singles for force in (True, False)]
    cases += [((((3, 7, 2, rows, 128), "uint8"),), True) for rows in (2, 12, 24)]
    stores = [arrays_of(quantised_store(*store)) for store in STORES]
    cases += [(arrays, True) for arrays in stores]
    cases += [((x,), False) for x in dict.fromkeys(x for arrays in stores for x in arrays)]
    return dict(zip(cases, measure(cases), strict=True))


needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: the TPU compiler is the measure",
)


@pytest.mark.compile
@pytest.mark.exhaustive  # 29 s; the table above is what it reports
@needs_tpu_compiler
def test_tpu_array_bytes_compiler_reports_the_same() -> None:
    for (arrays, force), (size, is_row_major) in measured().items():
        if len(arrays) > 1:
            continue
        ((shape, dtype),) = arrays
        bits = 8 * jnp.dtype(dtype).itemsize
        if force or device_bytes.tpu_keeps_row_major(shape, bits):
            expected = device_bytes.tpu_array_bytes(shape, bits)
            assert (size, is_row_major) == (expected, True), (shape, dtype, force)
    # Left to itself XLA gives up the row order of a many-block pool of width 160 to save padding.
    size, is_row_major = measured()[(((2, 1000, 3, 16, 160), "bfloat16"),), False]
    assert size < device_bytes.tpu_pool_bytes((2, 1000, 3, 16, 160), 16)
    assert not is_row_major


@pytest.mark.compile
@needs_tpu_compiler
def test_tpu_bytes_of_quantised_stores_are_the_compilers() -> None:
    """Codes, scales, open blocks and wide layers: profile and plan count what the compiler reports."""
    for kv_format, head_dim, options in STORES:
        store = quantised_store(kv_format, head_dim, options)
        size, _ = measured()[arrays_of(store), True]
        assert padded_bytes(store) == size, (kv_format, head_dim, options)
        shape = model_shape(3, 8, store.layout.num_kv_heads, head_dim)
        one = capacity.shard_shape(shape, 1, store.layout.block_size)
        how = (kv_format, "tpu", format_bytes.KVOptions(**options))
        planned = 7 * capacity.pool_bytes(one, *how) + 5 * capacity.open_block_bytes(one, *how)
        assert planned == size, (kv_format, head_dim, options)


# Shards and index width ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "shards", "held"), [(2, 4, 1), (4, 8, 1), (8, 4, 2), (8, 8, 1), (3, 1, 3)]
)
def test_shard_kv_heads_dividing_or_replicated_is_held(
    kv_heads: int, shards: int, held: int
) -> None:
    """Field case M8."""
    assert device_bytes.shard_kv_heads(kv_heads, shards) == held


@pytest.mark.parametrize(("kv_heads", "shards"), [(6, 4), (2, 3), (4, 6)])
def test_shard_kv_heads_neither_divides_is_rejected(kv_heads: int, shards: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of {kv_heads} kv heads, got {shards}"):
        device_bytes.shard_kv_heads(kv_heads, shards)


def test_element_offset_block_131072_does_not_wrap() -> None:
    """Field case F1: bs 16, kv 8, hd 128. In int32 the product is -2147483648."""
    keys_only = (1, 131_073, 8, 16, 128)
    assert device_bytes.element_offset(keys_only, block=131_072) == 2**31
    wrapped = np.multiply(np.int32(131_072), np.array([16_384], dtype=np.int32))[0]
    assert wrapped == -(2**31)
    fused = (1, 131_073, 8, 16, 256)
    assert device_bytes.element_offset(fused, block=131_072) == 2**32


@pytest.mark.parametrize("block", [65_535, 65_536, 69_999])
def test_element_offset_ids_past_16_bits_stay_distinct(block: int) -> None:
    """Field case F3: 70,000 blocks of bs 1, kv 1, hd 8."""
    tiny = (1, 70_000, 1, 1, 16)
    assert device_bytes.element_offset(tiny, block=block) == block * 16


def test_element_offset_equals_numpy_row_major() -> None:
    shape = (2, 3, 2, 4, 6)
    for index in np.ndindex(shape[:4]):
        flat = int(np.ravel_multi_index((*index, 0), shape))
        assert device_bytes.element_offset(shape, *index) == flat


def test_max_blocks_int32_limit_is_65536_blocks() -> None:
    """Field case F2: 2^31 / (bs * 2 * kv * hd) at bs 16, kv 8, hd 128."""
    assert device_bytes.max_blocks_int32(num_kv_heads=8, block_size=16, width=256) == 65_536
    assert device_bytes.int32_offset_warnings((1, 65_536, 8, 16, 256)) == ()
    assert device_bytes.int32_offset_warnings((1, 65_537, 8, 16, 256)) != ()


def test_check_block_ids_sentinel_must_fit_int32() -> None:
    device_bytes.check_block_ids(2**31 - 2)
    with pytest.raises(ValueError, match="num_blocks: expected below 2147483647"):
        device_bytes.check_block_ids(2**31 - 1)
