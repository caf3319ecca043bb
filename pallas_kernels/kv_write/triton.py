"""Writing new tokens on CUDA devices of compute capability 8.0 and later (Pallas, Triton backend).

One launch, in place.  A program takes `_PAIRS` consecutive (q_pos, kv_head) pairs of one row and moves just them::

    k[row, q_pos, kv_head, :] --cast, bits--> kv[layer, table[p // block_size], kv_head, p % block_size, :head_dim]
    v[row, q_pos, kv_head, :] --cast, bits--> kv[ same                                              , head_dim:]

Invariants:
  * Bytes moved: the new tokens once in, once out.  Nothing else of a block is read or written.
  * A padding token, or one whose table entry is not a block of the pool, writes nothing.
  * Distinct tokens have distinct slots (a block that is written has ref 1), so programs never race.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layout import Array, BatchView, KVLayout, KVStore

_PAIRS = 16
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def write_kv_triton(
    store: KVStore, layer: Array, k: Array, v: Array, view: BatchView, *, interpret: bool = False
) -> KVStore:
    """Returns the store with the new tokens written; see spec.py.

    ALIASES: the pool is an input and the output of the kernel; in place where the caller gave it up.

    Args:
      store, layer, k, v, view: see `write_kv`.
      interpret: run the kernel in the Pallas interpreter (any platform, slow).

    Raises:
      NotImplementedError: a dtype the kernel does not support; the message says what it does.
    """
    layout = store.layout
    for name, dtype in (("k", k.dtype), ("v", v.dtype), ("store", layout.format.dtype)):
        if dtype not in _FLOATS:
            raise NotImplementedError(
                f"triton write_kv supports float32, bfloat16 and float16, got {name} of {dtype}"
            )
    rows, query_len, num_kv_heads, _ = k.shape
    pairs = min(_PAIRS, _power_of_two(query_len * num_kv_heads))
    operands = (
        k, v, jnp.asarray(layer, jnp.int32).reshape(()), view.block_tables, view.kv_lens, view.q_lens,
        store.kv,
    )  # fmt: skip
    kv = pl.pallas_call(
        functools.partial(_write, layout=layout, query_len=query_len, pairs=pairs),
        grid=(pl.cdiv(query_len * num_kv_heads, pairs), rows),
        out_shape=jax.ShapeDtypeStruct(store.kv.shape, store.kv.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(*operands)
    return dataclasses.replace(store, kv=kv)


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _write(
    # in
    k_ref: Any,  # float[row, q_pos, kv_head, head_dim]
    v_ref: Any,  # float[row, q_pos, kv_head, head_dim]
    layer_ref: Any,  # i32[]
    tables_ref: Any,  # i32[row, column]
    kv_lens_ref: Any,  # i32[row]
    q_lens_ref: Any,  # i32[row]
    kv_in_ref: Any,  # the pool, aliased with kv_ref and not read
    # out
    kv_ref: Any,  # layout.dtype[layer, block, kv_head, slot, 2 * head_dim]
    *,
    layout: KVLayout,
    query_len: int,
    pairs: int,
) -> None:
    """Writes `pairs` (q_pos, kv_head) pairs of one row."""
    del kv_in_ref
    row, layer = pl.program_id(1), layer_ref[...]
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]
    pair = pl.program_id(0) * pairs + jnp.arange(pairs, dtype=jnp.int32)
    query, head = pair // layout.num_kv_heads, pair % layout.num_kv_heads
    position = kv_len - q_len + query
    column = position // layout.block_size
    valid = (
        (query < jnp.minimum(q_len, query_len)) & (position >= 0) & (column < tables_ref.shape[1])
    )
    block = plgpu.load(tables_ref.at[row, column], mask=valid, other=layout.no_block)
    valid = valid & (block >= 0) & (block < layout.num_blocks)

    width = max(16, _power_of_two(layout.head_dim))
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    mask = valid[:, None] & (columns < layout.head_dim)
    query, head, columns = jnp.broadcast_arrays(query[:, None], head[:, None], columns)
    block = jnp.broadcast_to(block[:, None], mask.shape)
    slot = jnp.broadcast_to((position % layout.block_size)[:, None], mask.shape)
    for ref, offset in ((k_ref, 0), (v_ref, layout.head_dim)):
        x = plgpu.load(ref.at[row, query, head, columns], mask=mask, other=0.0)
        x = x.astype(layout.format.dtype)
        if layout.dtype != layout.format.dtype:
            x = lax.bitcast_convert_type(x, layout.dtype)
        plgpu.store(kv_ref.at[layer, block, head, slot, columns + offset], x, mask=mask)
