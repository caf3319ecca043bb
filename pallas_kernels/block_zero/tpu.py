"""Zeroing whole blocks on TPU (Mosaic): one strided copy inside HBM per block and array, all layers at once.

::

    zeros [layer, ...]  --- one DMA --->  pool[:, id]      for each array of the store

Invariants:
  * The pools are aliased operands; the copies never pass through VMEM.
  * All copies fly together: they write the same zeros, so an id named twice does no harm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array, KVStore
from pallas_kernels.paged_attention.tpu_plan import check_codes_supported, check_supported
from pallas_kernels.sealed import SealedStore


def zero_blocks_tpu(
    store: KVStore | SealedStore,
    ids: Array,
    count: Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> KVStore | SealedStore:
    """Sets the first `count` blocks named to 0 in all layers.

    ALIASES: the pools are updated in place where the caller's program may give them up.

    Args:
      store: the pool, plain or sealed.
      ids: i32[n], block ids; one outside the pool is skipped.
      count: i32[], 0 <= count <= n.
      interpret: False, or how to interpret the kernel on another platform.

    Returns:
      The store with the blocks zeroed.

    Raises:
      NotImplementedError: the target cannot do this; the message says what it can.
    """
    if isinstance(store, KVStore):
        check_supported(store.layout)
    else:
        check_codes_supported(store.layout)
    pools, structure = jax.tree.flatten(store)
    zeros = [jnp.zeros((x.shape[0], *x.shape[2:]), x.dtype) for x in pools]
    first = 2 + len(zeros)  # after the prefetched scalars and the zeros
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (2 * len(pools)),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(pools),
            scratch_shapes=[pltpu.SemaphoreType.DMA((1,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={first + i: i for i in range(len(pools))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="zero_blocks",
    )(ids, jnp.reshape(jnp.clip(count, 0, ids.shape[0]), (1,)), *zeros, *pools)
    return jax.tree.unflatten(structure, written)


def _kernel(
    # prefetch
    ids_ref: Any,  # i32[n]
    count_ref: Any,  # i32[1]
    # in, out, scratch
    *refs: Any,  # HBM zeros [layer, ...] of each pool, the pools [layer, block, ...], the same as outputs; DMA[1]
) -> None:
    """Starts every copy, then waits for all of them."""
    num_pools = (len(refs) - 1) // 3
    zeros, pools, sem_ref = refs[:num_pools], refs[2 * num_pools : -1], refs[-1]
    num_blocks = pools[0].shape[1]

    def for_blocks(action):
        @pl.loop(0, count_ref[0])
        def _(i):
            @pl.when((ids_ref[i] >= 0) & (ids_ref[i] < num_blocks))
            def _():
                for source, pool in zip(zeros, pools, strict=True):
                    action(pltpu.make_async_copy(source, pool.at[:, ids_ref[i]], sem_ref.at[0]))

    for_blocks(lambda copy: copy.start())
    for_blocks(lambda copy: copy.wait())
