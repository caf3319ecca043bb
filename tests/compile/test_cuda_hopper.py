"""The Hopper kernel through the real CUDA compiler: what ptxas made of it, without a device."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import tempfile

import jax
import jax.numpy as jnp
import pytest
from compile.cuda_target import TARGETS, compile_for, kernel_stats, skip_reason, tool
from test_cuda_codes import make_layout, store_spec

from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format
from pallas_kernels.paged_attention.hopper import paged_attention_hopper
from pallas_kernels.paged_attention.hopper_plan import SMEM_BYTES, make_code_plan, make_plan
from pallas_kernels.sealed import SEALED_FORMATS

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason())),
]

NAME = "paged_attention_hopper_kernel"
QWEN3_8B = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
QWEN25_05B = {"num_q_heads": 14, "num_kv_heads": 2, "head_dim": 64}


@functools.cache
def build(
    *,
    num_q_heads,
    num_kv_heads,
    head_dim,
    block_size=64,
    rows=64,
    query_len=1,
    context=4096,
    format="bfloat16",
    as_bits=False,
    bounded=False,
    num_layers=1,
    arch="sm_90",
    **codes,
):
    """Returns (program, statistics of the kernel, its plan) of one attention call; `codes` are options of `make_layout`.

    The backend keeps every kernel it has compiled in this process, whatever the target, and writes files
    for new ones only: two calls that need their own files must differ in a shape.
    """
    max_blocks = context // block_size
    shape = jax.ShapeDtypeStruct
    sizes = {"num_layers": num_layers, "num_blocks": max_blocks * rows}
    sizes |= {"num_kv_heads": num_kv_heads, "as_bits": as_bits}
    if format in SEALED_FORMATS:
        layout = make_layout(format, block_size, head_dim, **sizes, **codes)
        store, planner, q_dtype = store_spec(layout), make_code_plan, jnp.bfloat16
    else:
        layout = KVLayout(
            block_size=block_size, head_dim=head_dim, format=kv_format(format), **sizes
        )
        store, planner = KVStore(shape(layout.shape, layout.dtype), layout), make_plan
        q_dtype = layout.format.dtype
    i32 = functools.partial(shape, dtype=jnp.int32)
    q = shape((rows, query_len, num_q_heads, head_dim), q_dtype)
    view = BatchView(i32((rows, max_blocks)), i32((rows,)), i32((rows,)), i32((rows, query_len)))

    def attend(q, store, layer, view, scale, soft_cap, window):
        out, _ = paged_attention_hopper(
            q,
            store,
            layer,
            view,
            scale=scale,
            soft_cap=soft_cap if bounded else None,
            window=window if bounded else None,
        )
        return out

    number = shape((), jnp.float32)
    arguments = (q, store, i32(()), view)
    arguments = (*arguments, number, number, i32(()))
    with tempfile.TemporaryDirectory(prefix="jaxkv-hopper-") as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            program = compile_for(TARGETS[arch], attend, arguments)
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        [ptx] = [path.read_text() for path in pathlib.Path(folder).glob(f"{NAME}*.ptx")]
        [passes] = pathlib.Path(folder).glob(f"{NAME}*.log")
        shared = re.search(r"dynamic_shared_memory_size %c(\d+)_i32", passes.read_text())
    [entry] = re.findall(r"\.entry\s+(\w+)", ptx)
    plan = planner(layout, q.shape, max_blocks)
    return program, kernel_stats(ptx, entry, 256, int(shared[1])), plan


DECODE = [
    {**model, "block_size": block_size}
    for model in (QWEN3_8B, QWEN25_05B)
    for block_size in (16, 64, 128)
]
OTHERS = [
    {**QWEN3_8B, "rows": 1, "context": 32768},
    {**QWEN3_8B, "format": "float16", "bounded": True},
    {**QWEN3_8B, "query_len": 4},
    {**QWEN3_8B, "query_len": 512, "rows": 1},
    {**QWEN25_05B, "query_len": 512, "rows": 1, "bounded": True},
    {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 256},
    {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 96},
    {"num_q_heads": 32, "num_kv_heads": 32, "head_dim": 80},
    {"num_q_heads": 64, "num_kv_heads": 1, "head_dim": 128},
]
CODES = [
    {**QWEN3_8B, "format": "int8"},
    {**QWEN3_8B, "format": "fp8_e4m3", "block_size": 32},
    {**QWEN25_05B, "format": "int4", "value_group": 32, "block_size": 128},
]
MORE_CODES = [
    {**QWEN25_05B, "format": "int8", "as_bits": True, "symmetric_keys": True, "bounded": True},
    {**QWEN25_05B, "format": "fp8_e4m3", "block_size": 32, "as_bits": True},
    {**QWEN3_8B, "format": "int4", "value_group": 32},
    {**QWEN3_8B, "format": "int4", "bounded": True},
    {**QWEN3_8B, "format": "fp8_e4m3"},
    {**QWEN25_05B, "format": "fp8_e4m3", "as_bits": True},
    {**QWEN25_05B, "format": "int4", "value_group": 32},
    {**QWEN3_8B, "format": "int8", "block_size": 32},
    {**QWEN3_8B, "format": "int8", "query_len": 4},
    {**QWEN3_8B, "format": "int4", "value_group": 32, "query_len": 64, "rows": 1},
    {"num_q_heads": 32, "num_kv_heads": 1, "head_dim": 128, "format": "int8"},
]


def describe(options):
    return "-".join(f"{name}={value}" for name, value in options.items())


@pytest.mark.parametrize("options", DECODE + OTHERS, ids=describe)
def test_sm_90_uses_tma_and_wgmma_and_spills_nothing(options):
    program, stats, plan = build(**options)
    assert stats.spill_bytes == stats.stack_bytes == 0
    assert stats.tensor_core_ptx == stats.ptx.count("wgmma.mma_async") > 0
    assert stats.ptx.count("cp.async.bulk.tensor") > 0
    # Nothing of the KV passes through registers on its way in.
    assert not re.findall(r"ld\.global\S*\.v[24]|ld\.global\S*\.b64|cp\.async\.c[ag]", stats.ptx)
    assert len(program.launches) <= 2
    parts = plan.splits if plan.splits > 1 else 0
    values = plan.rows * plan.query_len * plan.num_q_heads * plan.head_dim
    merging = parts * 2 * 4 * values  # out and lse of each split, float32
    assert program.memory.temp_size_in_bytes <= merging + 2**20


@pytest.mark.parametrize("options", DECODE, ids=describe)
def test_two_thread_blocks_fit_one_core_at_decode_shapes(options):
    program, stats, _ = build(**options)
    assert program.target.blocks_per_core(stats) >= 2


def test_few_query_heads_take_eight_columns():
    _, stats, _ = build(**QWEN3_8B, block_size=64)
    assert set(re.findall(r"wgmma\.mma_async\S+\.(m64n\d+k16)", stats.ptx)) == {"m64n8k16"}


def test_only_v_is_transposed_by_the_tensor_core():
    """Scores read K and q with head_dim innermost; the output reads V token by token: transpose A."""
    _, stats, _ = build(**QWEN3_8B, block_size=64)
    flags = re.findall(r"wgmma\.mma_async[^;]*?p, 1, 1, (\d), (\d);", stats.ptx)
    assert flags.count(("0", "0")) == 128 // 16  # head_dim / 16 steps of K q^T
    assert flags.count(("1", "0")) == 128 // 64 * (
        64 // 16
    )  # head_dim / 64 rows, tokens / 16 steps
    assert len(flags) == 16


@pytest.mark.parametrize("as_bits", [False, True])
def test_stacked_pool_of_a_gigabyte_is_read_in_place(as_bits):
    program, _, _ = build(**QWEN3_8B, block_size=32, num_layers=4 + as_bits, as_bits=as_bits)
    assert program.memory.argument_size_in_bytes > 2**30
    assert program.memory.temp_size_in_bytes < 2**20


def test_sm_100_is_refused_by_the_backend_for_wgmma(capfd):
    """wgmma exists on sm_90a alone; sm_100 has tcgen05 in its place.

    The exception only says that a pass failed; MLIR's check of the first wgmma instruction says why, on stderr.
    """
    with pytest.raises(jax.errors.JaxRuntimeError, match="Pass pipeline failed"):
        build(**QWEN3_8B, rows=63, arch="sm_100")
    assert "'nvvm.wgmma.fence.aligned' op is not supported on sm_100a" in capfd.readouterr().err


def test_disassembly_has_tma_and_wgmma():
    _, stats, _ = build(**QWEN3_8B, block_size=64)
    if not tool("nvdisasm").exists():
        pytest.skip("needs nvidia-cuda-nvdisasm")
    assert stats.count("HGMMA") == stats.tensor_core_ptx
    assert stats.count("UTMALDG") > 0
    assert stats.count("LDG.*128") == 0


@pytest.mark.parametrize(
    "options",
    [*CODES, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in MORE_CODES)],
    ids=describe,
)
def test_codes_come_by_tma_and_meet_wgmma_without_spills(options):
    """No copy of the pool, no code through a register on its way into SMEM, two thread blocks a multiprocessor at decode."""
    program, stats, plan = build(**options)
    assert stats.spill_bytes == stats.stack_bytes == 0
    assert stats.tensor_core_ptx == stats.ptx.count("wgmma.mma_async") > 0
    assert stats.ptx.count("cp.async.bulk.tensor") > 0
    assert not re.findall(r"ld\.global\S*\.v[24]|ld\.global\S*\.b64|cp\.async\.c[ag]", stats.ptx)
    assert plan.stages >= 2
    assert stats.shared_bytes <= SMEM_BYTES
    assert len(program.launches) <= 2
    parts = plan.splits if plan.splits > 1 else 0
    values = plan.rows * plan.query_len * plan.num_q_heads * plan.head_dim
    assert program.memory.temp_size_in_bytes <= parts * 2 * 4 * values + 2**20
    if plan.columns <= 16 and plan.head_dim <= 128:
        assert program.target.blocks_per_core(stats) >= 2
