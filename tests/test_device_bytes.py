"""TPU padding against what the TPU compiler reports, shards of kv heads, and index width."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from jaxkv import device_bytes

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
import json, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

topology = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1])
device = SingleDeviceSharding(topology.devices[0])
row_major = Format(Layout(major_to_minor=(0, 1, 2, 3, 4)), device)
for shape, dtype, force in json.loads(sys.argv[1]):
    sharding = None if force else device
    pool = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    options = {"in_shardings": row_major} if force else {}
    compiled = jax.jit(lambda x: x[0, 0, 0, 0, 0], **options).lower(pool).compile()
    layout = compiled.as_text().split("entry_computation_layout", 1)[1]
    order = re.search(r"\\]\\{([0-9,]+):", layout)
    size = compiled.memory_analysis().argument_size_in_bytes
    print("RESULT", json.dumps([size, order.group(1) == "4,3,2,1,0"]))
"""


@pytest.mark.parametrize(("rows_width", "by_bits"), MEASURED.items())
def test_tpu_pool_bytes_measured_shapes_match(
    rows_width: tuple[int, int], by_bits: dict[int, int]
) -> None:
    for bits, measured in by_bits.items():
        assert device_bytes.tpu_pool_bytes((3, 7, 2, *rows_width), bits) == 3 * 7 * 2 * measured


def test_tpu_tile_rows_unmeasured_width_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="element_bits: expected 16 or 32, got 8"):
        device_bytes.tpu_tile_rows(32, 8)


def measure(cases: Sequence[tuple[tuple[int, ...], str, bool]]) -> list[tuple[int, bool]]:
    """Returns per (pool shape, dtype, forced row-major) its TPU bytes and if it is row-major."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
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


@pytest.mark.compile
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: the TPU compiler is the measure",
)
def test_tpu_pool_bytes_compiler_reports_the_same() -> None:
    bits = {"float32": 32, "uint16": 16, "bfloat16": 16}
    shapes = [(3, 7, 2, *rows_width) for rows_width in MEASURED]
    shapes += [(2, 1000, 3, 16, 64), (2, 1000, 3, 16, 160), (2, 1000, 3, 32, 576)]
    cases = [(shape, dtype, force) for shape in shapes for dtype in bits for force in (True, False)]
    results = measure(cases)
    assert len(results) == len(cases)
    for (shape, dtype, force), (size, is_row_major) in zip(cases, results, strict=True):
        expected = device_bytes.tpu_pool_bytes(shape, bits[dtype])
        if force or device_bytes.tpu_keeps_row_major(shape, bits[dtype]):
            assert (size, is_row_major) == (expected, True), (shape, dtype, force)
    # Left to itself XLA gives up the row order of a many-block pool of width 160 to save padding.
    free = results[cases.index(((2, 1000, 3, 16, 160), "bfloat16", False))]
    assert free[0] < device_bytes.tpu_pool_bytes((2, 1000, 3, 16, 160), 16)
    assert not free[1]


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
