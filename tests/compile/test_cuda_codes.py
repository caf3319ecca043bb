"""The Triton attention kernel over sealed blocks, through the real CUDA compilers: every format, sm_80 and sm_90.

Nothing runs here; what the kernel computes is in tests/kernels/test_sealed_attention.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_target import TARGETS, CudaProgram, compile_for, skip_reason

from jaxkv import CacheConfig, init_cache, reserve
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.layout import BatchView
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.triton_codes import code_operands
from pallas_kernels.sealed import SEALED_FORMATS, SealedLayout, SealedStore

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason())),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


def spec(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that exists only as shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def make_layout(format: str, block_size: int, head_dim: int, **sizes: Any) -> SealedLayout:
    """Returns the layout of a small pool of codes; asymmetric K where the format has centres."""
    sizes = {
        "num_layers": 2,
        "num_blocks": 2048,
        "num_kv_heads": 8,
        "symmetric_keys": SEALED_FORMATS[format].is_float,
        "value_group": head_dim,
        "as_bits": False,
    } | sizes
    return SealedLayout(
        block_size=block_size, head_dim=head_dim, format=SEALED_FORMATS[format], **sizes
    )


def store_spec(layout: SealedLayout) -> SealedStore:
    """A pool of codes that exists only as shapes and dtypes."""
    return SealedStore(
        codes=spec(*layout.codes_shape, dtype=layout.codes_dtype),
        key_affine=spec(*layout.key_affine_shape, dtype=layout.affine_dtype),
        value_affine=spec(*layout.value_affine_shape, dtype=layout.affine_dtype),
        layout=layout,
    )


def compile_codes(
    arch: str,
    layout: SealedLayout,
    query_len: int = 1,
    rows: int = 64,
    q_dtype: Any = jnp.bfloat16,
    **knobs: Any,
) -> CudaProgram:
    """Compiles one attention call of 4 q heads a kv head; knobs that are ShapeDtypeStructs are traced."""
    knobs = {"scale": 0.125, "soft_cap": None, "window": None} | knobs
    traced = {name: x for name, x in knobs.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in knobs.items() if name not in traced}
    view = BatchView(spec(rows, 64), spec(rows), spec(rows), spec(rows, query_len))

    def attend(q: Any, store: Any, layer: Any, view: Any, traced: Any) -> Any:
        return paged_attention_triton(q, store, layer, view, **static, **traced)

    q = spec(rows, query_len, 4 * layout.num_kv_heads, layout.head_dim, dtype=q_dtype)
    return compile_for(TARGETS[arch], attend, (q, store_spec(layout), spec(), view, traced))


def check_codes_program(program: CudaProgram) -> None:
    """The demands on every compiled call: two launches, no spills, no copy of the pool, wide reads, tensor cores."""
    names = [launch.name for launch in program.launches]
    assert names == ["paged_attention", "paged_attention_combine"][: len(names)], names
    stats = program.kernel("paged_attention")
    assert stats.spill_bytes == stats.stack_bytes == 0, stats
    assert stats.ptx.count("mma.sync") or stats.ptx.count("wgmma")
    assert "cp.async.cg.shared.global" in stats.ptx, "no 16-byte asynchronous copies of codes"
    assert "e4m3" not in stats.ptx, "an instruction sm_80 does not have"


TRACED = {
    "scale": spec(dtype=jnp.float32),
    "soft_cap": spec(dtype=jnp.float32),
    "window": spec(),
}
CALLS = {
    "int8": (make_layout("int8", 64, 128), {}),
    "int8 symmetric, head_dim 64": (make_layout("int8", 64, 64, symmetric_keys=True), {}),
    "int8 as bits, block 128": (make_layout("int8", 128, 128, as_bits=True), TRACED),
    "int8 float32 q": (make_layout("int8", 64, 128), {"q_dtype": jnp.float32}),
    "fp8_e4m3": (make_layout("fp8_e4m3", 32, 128), {}),
    "fp8_e4m3 as bits, head_dim 64": (make_layout("fp8_e4m3", 64, 64, as_bits=True), TRACED),
    "int4": (make_layout("int4", 64, 128, value_group=32), {}),
    "int8 float32 q, head_dim 64": (make_layout("int8", 64, 64), {"q_dtype": jnp.float32}),
    "int4 one scale a head": (make_layout("int4", 64, 64), {}),
}
CHUNKS = ("int8", "int8 float32 q, head_dim 64", "fp8_e4m3", "int4")


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90"])
def test_decode_over_codes_compiles_without_spills(arch: str) -> None:
    for layout, options in CALLS.values():
        program = compile_codes(arch, layout, **options)
        check_codes_program(program)
        stats = program.kernel("paged_attention")
        assert program.target.blocks_per_core(stats) >= 2, (layout, stats)


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90"])
def test_chunked_prefill_over_codes_compiles_without_spills(arch: str) -> None:
    for name in CHUNKS:
        layout, options = CALLS[name]
        check_codes_program(compile_codes(arch, layout, query_len=512, rows=1, **options))


def test_offsets_into_codes_of_2_to_4_gib_do_not_overflow() -> None:
    """Pallas computes offsets in 32 bits up to 4 GiB, in elements; of bytes there would be too many for the sign."""
    layout = make_layout("int8", 64, 128, num_blocks=12_000)
    assert 2**31 < math.prod(layout.codes_shape) < 2**32
    operand = jax.eval_shape(lambda x: code_operands(x)[0], store_spec(layout))
    assert math.prod(operand.shape) < 2**31


def test_quantised_decode_loop_keeps_the_cache_in_place() -> None:
    """reserve, write, seal and attend, layers scanned inside a loop: no copy of codes, open blocks or wide layers."""
    config = CacheConfig(
        num_layers=4,
        num_kv_heads=8,
        head_dim=128,
        block_size=64,
        num_blocks=4096,
        max_seqs=8,
        max_blocks_per_seq=64,
        format="int8",
        as_bits=False,
        num_wide_layers=1,
    )
    rows = jnp.arange(8, dtype=jnp.int32)

    def loop(cache: Any, q: Any, k: Any, steps: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            cache, x = carry
            cache, view = reserve(config, cache, rows, jnp.ones(8, jnp.int32), 1)

            def layer(carry: Any, index: Any) -> Any:
                store, x = carry
                x, store = cached_attention(x, k, k, store, index, view, scale=0.1)
                return (store, x), None

            layers = jnp.arange(config.num_layers, dtype=jnp.int32)
            (store, x), _ = jax.lax.scan(layer, (cache.store, x), layers)
            return dataclasses.replace(cache, store=store), x

        return jax.lax.fori_loop(0, steps, step, (cache, q))

    cache = jax.eval_shape(lambda: init_cache(config))
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    q, k = (spec(8, 1, heads, 128, dtype=jnp.bfloat16) for heads in (32, 8))
    program = compile_for(TARGETS["sm_90"], loop, (cache, q, k, spec()), donate_argnums=(0,))
    assert program.memory.alias_size_in_bytes >= nbytes
    assert program.memory.temp_size_in_bytes <= 0.01 * nbytes
