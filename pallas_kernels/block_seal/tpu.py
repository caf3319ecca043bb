"""Sealing blocks on TPU (Mosaic): XLA quantises in one fused pass, the kernel copies what filled into the pool.

::

    seal(kv)  codes, key_affine, value_affine [n, ...]  --- three DMAs a block, inside HBM --->  pools[layer, id]

Invariants:
  * The pools are aliased operands; the copies never pass through VMEM.
  * Destinations are distinct, so all copies fly together; a block with an id outside the pool is skipped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array
from pallas_kernels.paged_attention.tpu_plan import check_codes_supported
from pallas_kernels.sealed import SealedStore, seal

NUM_POOLS = 3


def seal_blocks_tpu(
    store: SealedStore,
    layer: Array,
    kv: Array,
    ids: Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> SealedStore:
    """Returns the store with the blocks sealed; see `seal_blocks`.

    ALIASES: the pools are updated in place where the caller's program may give them up.

    Raises:
      NotImplementedError: the target cannot do this; the message says what it can.
    """
    check_codes_supported(store.layout)
    pools = (store.codes, store.key_affine, store.value_affine)
    blocks = seal(store.layout, kv)
    first = 2 + NUM_POOLS  # after the prefetched scalars and the blocks
    written = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (2 * NUM_POOLS),
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * NUM_POOLS,
            scratch_shapes=[pltpu.SemaphoreType.DMA((1,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={first + i: i for i in range(NUM_POOLS)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="seal_blocks",
    )(jnp.reshape(layer, (1,)), ids, *blocks, *pools)
    codes, key_affine, value_affine = written
    return dataclasses.replace(store, codes=codes, key_affine=key_affine, value_affine=value_affine)


def _kernel(
    # prefetch
    layer_ref: Any,  # i32[1]
    ids_ref: Any,  # i32[n]
    # in, out, scratch
    *refs: Any,  # HBM blocks [n, ...] of each pool, the pools [layer, block, ...], the same as outputs; DMA[1]
) -> None:
    """Starts every copy, then waits for all of them."""
    blocks, pools, sem_ref = refs[:NUM_POOLS], refs[2 * NUM_POOLS : -1], refs[-1]

    def for_full_blocks(action):
        @pl.loop(0, ids_ref.shape[0])
        def _(i):
            @pl.when((ids_ref[i] >= 0) & (ids_ref[i] < pools[0].shape[1]))
            def _():
                for source, pool in zip(blocks, pools, strict=True):
                    action(
                        pltpu.make_async_copy(
                            source.at[i], pool.at[layer_ref[0], ids_ref[i]], sem_ref.at[0]
                        )
                    )

    for_full_blocks(lambda copy: copy.start())
    for_full_blocks(lambda copy: copy.wait())
