"""Copying whole blocks on TPU (Mosaic): one strided copy inside HBM per block, all layers at once.

::

    kv[:, src]  [layer, kv_head, block_size, 2 * head_dim]  --- one DMA --->  kv[:, dst]

Invariants:
  * The pool is an aliased operand; the copies never pass through VMEM.
  * No destination is another pair's source, so all copies fly together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array, KVStore
from pallas_kernels.paged_attention.tpu_plan import check_supported


def copy_blocks_tpu(
    store: KVStore,
    src: Array,
    dst: Array,
    count: Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> KVStore:
    """Copies the first `count` pairs of whole blocks, K and V of all layers.

    ALIASES: the pool is updated in place where the caller's program may give it up.
    REQUIRES: destinations are distinct, and none is a source.

    Args:
      store: the pool.
      src, dst: i32[n], block ids; a pair with an id outside the pool is skipped.
      count: i32[], 0 <= count <= n.
      interpret: False, or how to interpret the kernel on another platform.

    Returns:
      The store with the copies made.

    Raises:
      NotImplementedError: the target cannot do this; the message says what it can.
    """
    check_supported(store.layout)
    kv = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA((1,))],
        ),
        out_shape=jax.ShapeDtypeStruct(store.kv.shape, store.kv.dtype),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="copy_blocks",
    )(src, dst, jnp.reshape(jnp.clip(count, 0, src.shape[0]), (1,)), store.kv)
    return dataclasses.replace(store, kv=kv)


def _kernel(
    # prefetch
    src_ref: Any,  # i32[n]
    dst_ref: Any,  # i32[n]
    count_ref: Any,  # i32[1]
    # in
    old_kv_ref: Any,  # HBM dtype[layer, block, kv_head, block_size, 2 * head_dim]
    # out
    new_kv_ref: Any,  # HBM: the same pool
    # scratch
    sem_ref: Any,  # DMA[1]
) -> None:
    """Starts every copy, then waits for all of them.

    Reads through the operand, so that the kernel has none it never reads (field case R2).
    """
    num_blocks = old_kv_ref.shape[1]

    def is_inside(block):
        return (block >= 0) & (block < num_blocks)

    def for_pairs(action):
        @pl.loop(0, count_ref[0])
        def _(i):
            @pl.when(is_inside(src_ref[i]) & is_inside(dst_ref[i]))
            def _():
                action(
                    pltpu.make_async_copy(
                        old_kv_ref.at[:, src_ref[i]], new_kv_ref.at[:, dst_ref[i]], sem_ref.at[0]
                    )
                )

    for_pairs(lambda copy: copy.start())
    for_pairs(lambda copy: copy.wait())
