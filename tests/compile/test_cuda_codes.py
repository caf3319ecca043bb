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
from cuda_target import TARGETS, CudaProgram, compile_for, skip_reason, tool

from jaxkv import CacheConfig, init_cache, reserve
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.layout import BatchView
from pallas_kernels.paged_attention.triton import paged_attention_triton
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
    store = SealedStore(
        codes=spec(*layout.codes_shape, dtype=layout.codes_dtype),
        key_affine=spec(*layout.key_affine_shape, dtype=layout.affine_dtype),
        value_affine=spec(*layout.value_affine_shape, dtype=layout.affine_dtype),
        layout=layout,
    )
    view = BatchView(spec(rows, 64), spec(rows), spec(rows), spec(rows, query_len))

    def attend(q: Any, store: Any, layer: Any, view: Any, traced: Any) -> Any:
        return paged_attention_triton(q, store, layer, view, **static, **traced)

    q = spec(rows, query_len, 4 * layout.num_kv_heads, layout.head_dim, dtype=q_dtype)
    return compile_for(TARGETS[arch], attend, (q, store, spec(), view, traced))


def check_codes_program(program: CudaProgram) -> None:
    """The demands on every compiled call: two launches, no spills, no copy of the pool, wide reads, tensor cores."""
    names = [launch.name for launch in program.launches]
    assert names == ["paged_attention", "paged_attention_combine"][: len(names)], names
    stats = program.kernel("paged_attention")
    assert stats.spill_bytes == stats.stack_bytes == 0, stats
    assert program.target.blocks_per_core(stats) >= 2, stats
    assert stats.ptx.count("mma.sync") or stats.ptx.count("wgmma")
    assert "cp.async.cg.shared.global" in stats.ptx, "no 16-byte asynchronous copies of codes"
    assert "e4m3" not in stats.ptx, "an instruction sm_80 does not have"
