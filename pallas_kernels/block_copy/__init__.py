"""The op that copies whole blocks inside the pool (copy-on-write), and its dispatch over implementations."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.block_copy.tpu import copy_blocks_tpu
from pallas_kernels.block_copy.xla import copy_blocks_xla
from pallas_kernels.layout import Array, KVStore

IMPLEMENTATIONS = {"tpu": copy_blocks_tpu, "xla": copy_blocks_xla}


def copy_blocks(
    store: KVStore, src: Array, dst: Array, count: Array, *, implementation: str = "auto"
) -> KVStore:
    """Copies the first `count` pairs of whole blocks, K and V of all layers.

    A call that copies nothing moves nothing.

    ALIASES: under jit with a donated store the pool is updated in place.
    REQUIRES: destinations are distinct, and none is another pair's source.

    Args:
      store: the pool.
      src, dst: i32[n]; the first `count` pairs name valid blocks.
      count: i32[], 0 <= count <= n.
      implementation: "tpu" (Mosaic), "xla" (anywhere); or "auto": tpu on TPU, xla elsewhere.

    Returns:
      The store with the copies made.

    Raises:
      ValueError: ids that are not int32 vectors of one length, or an unknown implementation.
      NotImplementedError: the named implementation, or the platform's own, does not support the pool.
    """
    dispatch.check_name(implementation, IMPLEMENTATIONS)
    for name, x in (("src", src), ("dst", dst)):
        if x.dtype != jnp.int32 or x.shape != (src.size,):
            raise ValueError(f"{name}: expected i32[{src.size}], got {x.dtype}{list(x.shape)}")
    return dispatch.run(
        implementation, IMPLEMENTATIONS, {"tpu": "tpu"}, "xla", *(store, src, dst, count)
    )
