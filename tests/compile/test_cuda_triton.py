"""The Triton kernels through the real CUDA compilers: launches, registers, shared memory, loads, tensor cores.

Nothing runs here; what the kernels compute is in tests/kernels/test_triton_*.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_target import TARGETS, CudaProgram, compile_for, skip_reason, tool

from pallas_kernels.kv_write.triton import write_kv_triton
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format
from pallas_kernels.paged_attention.triton import paged_attention_triton

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason())),
    # JAX 0.11 says at every lowering that its Triton backend will go.  It stays our way to sm_80 while
    # it lives (design notes); there is no call site here to change.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

HEAD_DIMS = (64, 80, 96, 128, 256)
# How many query positions, rows and table columns a call has.
CALLS = {"decode": (1, 64, 256), "speculative": (5, 8, 256), "prefill": (512, 1, 256)}


def spec(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that exists only as shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def store_spec(layout: KVLayout) -> KVStore:
    """A pool that exists only as shape and dtype."""
    return KVStore(spec(*layout.shape, dtype=layout.dtype), layout)


def view_spec(rows: int, query_len: int, columns: int) -> BatchView:
    """A batch view that exists only as shapes."""
    return BatchView(spec(rows, columns), spec(rows), spec(rows), spec(rows, query_len))


def compile_attention(
    arch: str,
    layout: KVLayout,
    call: str = "decode",
    group: int = 4,
    q_dtype: Any = None,
    **knobs: Any,
) -> CudaProgram:
    """Compiles one attention call; knobs that are ShapeDtypeStructs are traced."""
    query_len, rows, columns = CALLS[call]
    shape = (rows, query_len, group * layout.num_kv_heads, layout.head_dim)
    q = spec(*shape, dtype=q_dtype or layout.format.dtype)
    knobs = {"scale": 0.125, "soft_cap": None, "window": None} | knobs
    traced = {name: x for name, x in knobs.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in knobs.items() if name not in traced}

    def attend(q: Any, store: Any, layer: Any, view: Any, traced: Any) -> Any:
        return paged_attention_triton(q, store, layer, view, **static, **traced)

    args = (q, store_spec(layout), spec(), view_spec(rows, query_len, columns), traced)
    return compile_for(TARGETS[arch], attend, args)


def make_layout(format: str, head_dim: int, **sizes: Any) -> KVLayout:
    """Returns the layout of a small pool."""
    sizes = {
        "num_layers": 2,
        "num_blocks": 4096,
        "num_kv_heads": 8,
        "block_size": 16,
        "as_bits": False,
    } | sizes
    return KVLayout(head_dim=head_dim, format=kv_format(format), **sizes)


def check_attention(program: CudaProgram, layout: KVLayout, call: str) -> None:
    """The demands on every compiled call: launches, spills, room for two, wide copies, tensor cores.

    Copies and products are counted in the PTX, where ptxas takes them from one for one
    (`test_disassembly_has_what_the_ptx_asks_for`): the disassembler takes as long as the compiler.
    """
    names = [launch.name for launch in program.launches]
    assert names == ["paged_attention", "paged_attention_combine"][: len(names)]
    for name in names:
        stats = program.kernel(name)
        assert stats.spill_bytes == stats.stack_bytes == 0, (name, stats)
        assert program.target.blocks_per_core(stats) >= (2 if call == "decode" else 1), stats
        if name == "paged_attention":
            assert stats.shared_bytes <= program.target.shared_per_block
            assert set(stats.copy_widths) == {16}, stats.copy_widths
            assert stats.tensor_core_ptx > 0 or layout.format.itemsize == 4


@pytest.mark.parametrize(
    "call", ["decode", "prefill", pytest.param("speculative", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    ("format", "head_dims"),
    # float16 gives bfloat16's code with another suffix: the same registers and bytes at every head_dim.
    [
        ("bfloat16", HEAD_DIMS),
        ("float16", (80, 256)),
        ("float32", (80, 128)),
        pytest.param("float32", HEAD_DIMS, marks=pytest.mark.exhaustive),
    ],
    ids=("bfloat16", "float16", "float32", "float32_every"),
)
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90"])
def test_every_head_dim_compiles_without_spills(
    arch: str, format: str, head_dims: tuple[int, ...], call: str
) -> None:
    for head_dim in head_dims:
        layout = make_layout(format, head_dim)
        check_attention(compile_attention(arch, layout, call), layout, call)


@pytest.mark.parametrize("call", CALLS)
def test_sm_100_compiles_too(call: str) -> None:
    """Tiles of 16 and 32 rows are warp-level products (HMMA) there too, those of prefill tcgen05."""
    for format, head_dim in (
        ("bfloat16", 64),
        ("bfloat16", 128),
        ("float16", 256),
        ("float32", 80),
    ):
        layout = make_layout(format, head_dim)
        check_attention(compile_attention("sm_100", layout, call), layout, call)


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90"])
def test_block_sizes_groups_bits_and_traced_knobs_compile(arch: str) -> None:
    traced = {
        "scale": spec(dtype=jnp.float32),
        "soft_cap": spec(dtype=jnp.float32),
        "window": spec(),
    }
    for sizes, options in (
        ({"block_size": 8, "num_kv_heads": 2}, {"group": 7}),
        ({"block_size": 24, "as_bits": True}, {}),
        ({"block_size": 64}, {"window": 4096}),
        ({"block_size": 256}, {"soft_cap": 50.0}),
        ({"num_kv_heads": 1}, {"group": 32}),
        ({"num_kv_heads": 4}, {"group": 8, "call": "speculative"}),  # tiles of 64 rows
        ({}, {"q_dtype": jnp.float32}),
        ({}, traced),
        ({}, traced | {"call": "prefill"}),
    ):
        layout = make_layout("bfloat16", 128, **sizes)
        program = compile_attention(arch, layout, **options)
        check_attention(program, layout, options.get("call", "decode"))


@pytest.mark.skipif(not tool("nvdisasm").exists(), reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize(
    ("arch", "call", "opcode"),
    [("sm_80", "decode", "HMMA"), ("sm_90", "prefill", "HGMMA"), ("sm_100", "prefill", "UTCHMMA")],
)
def test_disassembly_has_what_the_ptx_asks_for(arch: str, call: str, opcode: str) -> None:
    """Copies of 128 bits, one for one; the tensor-core instruction of the chip (UTCHMMA: tcgen05)."""
    stats = compile_attention(arch, make_layout("bfloat16", 128), call).kernel("paged_attention")
    copies = {o: n for o, n in stats.instructions.items() if o.startswith("LDGSTS")}
    assert all(o.endswith(".128") for o in copies), copies
    assert sum(copies.values()) == stats.copy_widths[16]
    assert (
        stats.count(rf"{opcode}\b") == stats.tensor_core_instructions == stats.tensor_core_ptx > 0
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("call", ["decode", "prefill"])
def test_write_is_one_launch_in_place_and_wide(arch: str, call: str) -> None:
    query_len, rows, columns = CALLS[call]
    for format, head_dim, as_bits in (
        ("bfloat16", 128, False),
        ("float16", 80, True),
        ("float32", 64, False),
    ):
        layout = make_layout(format, head_dim, as_bits=as_bits)
        k = spec(rows, query_len, layout.num_kv_heads, head_dim, dtype=layout.format.dtype)
        args = (store_spec(layout), spec(), k, k, view_spec(rows, query_len, columns))
        program = compile_for(TARGETS[arch], write_kv_triton, args, donate_argnums=(0,))
        assert [launch.name for launch in program.launches] == ["write_kv"]
        assert program.memory.alias_size_in_bytes == layout.nbytes
        assert program.memory.temp_size_in_bytes == 0
        stats = program.kernel("write_kv")
        assert stats.spill_bytes == 0
        stores = set(re.findall(r"st\.global\S*", stats.ptx))
        assert stores == {"st.global.v4.b32"}


@pytest.mark.parametrize("kernel", ["paged_attention", "write_kv"])
def test_offsets_into_a_large_pool_have_64_bits(kernel: str) -> None:
    """Field cases F1 and F2.  The block stride (7,680 elements) is no power of two, so it stays a factor.

    The large pool has more than 2**32 elements a layer: below that LLVM may prove, from the clip of the block
    id, that the unsigned product fits 32 bits, and rightly uses the narrow instruction.
    """
    narrow = []
    for num_blocks in (4096, 1_000_000):  # 126 MB and 31 GB
        layout = make_layout("bfloat16", 80, num_kv_heads=3, num_blocks=num_blocks)
        assert math.prod(layout.shape[2:]) == 7680
        if kernel == "paged_attention":
            program = compile_attention("sm_90", layout)
        else:
            k = spec(8, 1, 3, 80, dtype=jnp.bfloat16)
            args = (store_spec(layout), spec(), k, k, view_spec(8, 1, 256))
            program = compile_for(TARGETS["sm_90"], write_kv_triton, args, donate_argnums=(0,))
        products = re.findall(
            r"(?:mul|mad)\.lo\.s32.*\b(?:7680|15360)\b", program.kernel(kernel).ptx
        )
        narrow.append(len(products))
    assert narrow[0] > 0, "the pattern no longer finds the 32-bit products of a small pool"
    assert narrow[1] == 0


def decode_loop(
    q: Any, store: Any, tables: Any, kv_lens: Any, steps: Any, *, num_layers: int
) -> Any:
    """`steps` tokens through `num_layers` layers that write, then attend; the store is carried."""
    heads = store.layout.num_kv_heads

    def layer(carry: Any, index: Any) -> Any:
        x, store, view = carry
        store = write_kv_triton(store, index, x[:, :, :heads], x[:, :, -heads:], view)
        x, _ = paged_attention_triton(x, store, index, view, scale=0.1, soft_cap=None, window=None)
        return (x, store, view), None

    def step(state: Any) -> Any:
        i, x, store, kv_lens = state
        view = BatchView(tables, kv_lens, jnp.ones_like(kv_lens), (kv_lens - 1)[:, None])
        (x, store, _), _ = jax.lax.scan(
            layer, (x, store, view), jnp.arange(num_layers, dtype=jnp.int32)
        )
        return i + 1, x, store, kv_lens + 1

    return jax.lax.while_loop(lambda s: s[0] < steps, step, (jnp.int32(0), q, store, kv_lens))


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("num_layers", "num_q_heads", "num_kv_heads", "head_dim"),
    [pytest.param(36, 32, 8, 128, id="qwen3_8b"), pytest.param(24, 14, 2, 64, id="qwen2.5_0.5b")],
)
def test_decode_loop_keeps_the_pool_in_place(
    arch: str, num_layers: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    block_bytes = num_layers * num_kv_heads * 16 * 2 * head_dim * 2
    layout = make_layout(
        "bfloat16",
        head_dim,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        num_blocks=-(-(1 << 30) // block_bytes),
    )
    q = spec(8, 1, num_q_heads, head_dim, dtype=jnp.bfloat16)
    args = (q, store_spec(layout), spec(8, 256), spec(8), spec())
    loop = functools.partial(decode_loop, num_layers=num_layers)
    program = compile_for(TARGETS[arch], loop, args, donate_argnums=(1,))
    assert layout.nbytes >= 1 << 30
    assert program.memory.alias_size_in_bytes == layout.nbytes
    assert program.memory.temp_size_in_bytes <= 0.01 * layout.nbytes
    inner = [launch.name for launch in program.launches if launch.depth == 2]
    assert [inner.count(n) for n in ("write_kv", "paged_attention", "paged_attention_combine")] == [
        1
    ] * 3


def copy_blocks_loop(store: KVStore, src: Any, dst: Any, count: Any) -> KVStore:
    """Copy-on-write in plain XLA: whole blocks, all layers, one after the other."""

    def copy(i: Any, kv: Any) -> Any:
        block = jax.lax.dynamic_slice_in_dim(kv, src[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(kv, block, dst[i], axis=1)

    return dataclasses.replace(store, kv=jax.lax.fori_loop(0, count, copy, store.kv))


def copy_blocks_scatter(store: KVStore, src: Any, dst: Any, count: Any) -> KVStore:
    """The same as one gather and one scatter; `count` is not used, idle entries of dst lie past the end."""
    return dataclasses.replace(store, kv=store.kv.at[:, dst].set(store.kv[:, src], mode="drop"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_plain_xla_block_copies_stay_in_place_unless_a_cond_surrounds_them(arch: str) -> None:
    """A loop needs room for one block, a scatter for all copies; `lax.cond` copies the whole pool."""
    layout = make_layout("bfloat16", 128, num_layers=36, num_blocks=256)
    block_bytes = layout.nbytes // layout.num_blocks

    def under_cond(store: KVStore, src: Any, dst: Any, count: Any) -> KVStore:
        return jax.lax.cond(
            count > 0, lambda s: copy_blocks_loop(s, src, dst, count), lambda s: s, store
        )

    temps = []
    for copy in (copy_blocks_loop, copy_blocks_scatter, under_cond):
        args = (store_spec(layout), spec(8), spec(8), spec())
        memory = compile_for(TARGETS[arch], copy, args, donate_argnums=(0,)).memory
        assert memory.alias_size_in_bytes == layout.nbytes
        temps.append(memory.temp_size_in_bytes)
    assert temps[0] <= 1.01 * block_bytes
    assert temps[1] <= 8.01 * block_bytes
    assert temps[2] >= layout.nbytes, (
        "the compiler has learnt to branch in place: say so in the docs"
    )
