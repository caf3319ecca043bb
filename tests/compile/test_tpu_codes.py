"""Reading and sealing codes, compiled by the real TPU compiler; a decode loop around them keeps every pool in place."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compile.tpu_target import CHIPS, available, compile_for

from jaxkv import CacheConfig, init_cache, reserve
from pallas_kernels.block_seal import seal_blocks
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.layout import BatchView
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.sealed import SEALED_FORMATS, SealedLayout, SealedStore

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]


def arrays(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def make_sealed(format: str, block_size: int, head_dim: int, heads: int = 2) -> SealedStore:
    group = 32 if format == "int4" else head_dim
    layout = SealedLayout(
        4, 64, heads, block_size, head_dim, SEALED_FORMATS[format],
        symmetric_keys=format == "fp8_e4m3", value_group=group, as_bits=False,
    )  # fmt: skip
    return SealedStore(
        arrays(layout.codes_shape, layout.codes_dtype),
        arrays(layout.key_affine_shape, layout.affine_dtype),
        arrays(layout.value_affine_shape, layout.affine_dtype),
        layout,
    )


def nbytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compile_read(chip: Any, store: SealedStore, query_len: int = 1, group: int = 4) -> Any:
    layout, rows = store.layout, 4
    view = BatchView(
        arrays((rows, 16)), arrays((rows,)), arrays((rows,)), arrays((rows, query_len))
    )
    q = arrays((rows, query_len, layout.num_kv_heads * group, layout.head_dim), jnp.bfloat16)

    def read(q: Any, store: Any, layer: Any, view: Any, cap: Any, window: Any) -> Any:
        return paged_attention_tpu(q, store, layer, view, scale=0.1, soft_cap=cap, window=window)

    return compile_for(chip, read, q, store, arrays(()), view, arrays((), jnp.float32), arrays(()))


@pytest.mark.parametrize(
    ("chip", "format", "block_size", "head_dim", "query_len"),
    [
        ("v5e", "int8", 64, 128, 1),
        ("v6e", "fp8_e4m3", 32, 128, 1),
        ("v5p", "int4", 64, 64, 70),
        pytest.param("v5e", "fp8_e4m3", 32, 64, 1, marks=pytest.mark.exhaustive),
        pytest.param("v5e", "int4", 64, 128, 1, marks=pytest.mark.exhaustive),
        pytest.param("v5e", "int8", 32, 64, 70, marks=pytest.mark.exhaustive),
        pytest.param("v6e", "int8", 64, 64, 1, marks=pytest.mark.exhaustive),
        pytest.param("v6e", "int4", 64, 128, 1, marks=pytest.mark.exhaustive),
        pytest.param("v5p", "int8", 64, 128, 1, marks=pytest.mark.exhaustive),
        pytest.param("v5p", "fp8_e4m3", 32, 128, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_reading_codes_compiles(
    chip: str, format: str, block_size: int, head_dim: int, query_len: int
) -> None:
    store = make_sealed(format, block_size, head_dim)
    memory = compile_read(CHIPS[chip], store, query_len).memory_analysis()
    q_bytes = 4 * query_len * 8 * head_dim * 4
    assert memory.temp_size_in_bytes < nbytes(store) // 2 + 8 * q_bytes


@pytest.mark.parametrize(
    ("block_size", "head_dim", "message"),
    [
        (48, 128, "block_size 48 with int8 on tpu: expected a multiple of 32"),
        (64, 80, "head_dim 80"),
    ],
)
def test_reading_codes_of_other_shapes_is_refused(
    block_size: int, head_dim: int, message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        compile_read(CHIPS["v5e"], make_sealed("int8", block_size, head_dim))


def test_sealing_compiles_in_place() -> None:
    """The pools are aliased, and what the call needs beside them is the blocks it seals."""
    store = make_sealed("int8", 64, 128)
    kv = arrays((8, 2, 64, 256), jnp.float32)
    compiled = compile_for(
        CHIPS["v5e"],
        lambda store, layer, kv, ids: seal_blocks(store, layer, kv, ids, implementation="tpu"),
        store, arrays(()), kv, arrays((8,)), donate=(0,),
    )  # fmt: skip
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(store)
    assert memory.temp_size_in_bytes <= nbytes(kv)


LONG = pytest.mark.exhaustive
FEW_HEADS = {"num_kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("chip", "format", "options"),
    [
        # Both affine arrays have a lone row a block, of 128 numbers: half of what is stored is padding.
        ("v5e", "fp8_e4m3", FEW_HEADS),
        pytest.param("v5e", "fp8_e4m3", {}, marks=LONG),
        pytest.param("v5e", "int8", {}, marks=LONG),
        pytest.param("v5e", "int4", {}, marks=LONG),
        pytest.param("v5e", "int4", {"value_group": 128}, marks=LONG),
        pytest.param("v5e", "int4", {"value_group": 128, "symmetric_keys": True}, marks=LONG),
        pytest.param("v6e", "fp8_e4m3", {"block_size": 32}, marks=LONG),
        pytest.param("v5p", "int4", {"value_group": 128}, marks=LONG),
        pytest.param("v5e", "int8", FEW_HEADS, marks=LONG),
        pytest.param("v5e", "int8", FEW_HEADS | {"num_kv_heads": 3}, marks=LONG),
        pytest.param(
            "v5e", "fp8_e4m3", FEW_HEADS | {"num_kv_heads": 3, "block_size": 32}, marks=LONG
        ),
    ],
)
def test_decode_loop_over_codes_keeps_every_pool_in_place(
    chip: str, format: str, options: dict[str, Any]
) -> None:
    """Reserve, write, seal, read both parts, over layers in a scan over steps: alias all, temp at most 1 %.

    A pool of 20,000 blocks (5 to 11 GB): of a small one XLA hides copies in VMEM, where no one counts them.
    """
    rows, layers = 8, 4
    sizes = {"num_kv_heads": 8, "head_dim": 128, "block_size": 64} | options
    config = CacheConfig(
        num_layers=layers, num_blocks=20_000, max_seqs=rows, max_blocks_per_seq=64, format=format,
        as_bits=False, **sizes,
    )  # fmt: skip
    heads, dim = config.num_kv_heads, config.head_dim

    def loop(cache: Any, q: Any, k: Any, v: Any, steps: Any) -> Any:
        ids = jnp.arange(rows, dtype=jnp.int32)

        def step(_: Any, carry: Any) -> Any:
            cache, out = carry
            cache, view = reserve(config, cache, ids, jnp.ones(rows, jnp.int32), 1)

            def one_layer(carry: Any, layer: Any) -> Any:
                store, out = carry
                out, store = cached_attention(q + out, k, v, store, layer, view, scale=0.1)
                return (store, out), None

            index = jnp.arange(layers, dtype=jnp.int32)
            (store, out), _ = jax.lax.scan(one_layer, (cache.store, out), index)
            return dataclasses.replace(cache, store=store), out

        return jax.lax.fori_loop(0, steps, step, (cache, jnp.zeros_like(q)))

    cache = jax.eval_shape(lambda: init_cache(config))
    new = arrays((rows, 1, heads, dim), jnp.bfloat16)
    q = arrays((rows, 1, 4 * heads, dim), jnp.bfloat16)
    compiled = compile_for(CHIPS[chip], loop, cache, q, new, new, arrays(()), donate=(0,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(cache)
    assert memory.alias_size_in_bytes <= 1.05 * nbytes(cache)
    assert memory.temp_size_in_bytes <= 0.01 * nbytes(cache)
