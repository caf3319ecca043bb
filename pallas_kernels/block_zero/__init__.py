"""The op that zeroes whole blocks of a pool (scrubbing what was freed), and its dispatch over implementations."""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.block_zero.tpu import zero_blocks_tpu
from pallas_kernels.block_zero.xla import zero_blocks_xla
from pallas_kernels.layout import Array, KVStore
from pallas_kernels.sealed import SealedStore

IMPLEMENTATIONS = {"tpu": zero_blocks_tpu, "xla": zero_blocks_xla}
Pool = TypeVar("Pool", KVStore, SealedStore)


def zero_blocks(store: Pool, ids: Array, count: Array, *, implementation: str = "auto") -> Pool:
    """Sets every bit of the first `count` blocks named to 0, in all layers: K and V, or codes and scales.

    A call that names nothing moves nothing.

    ALIASES: under jit with a donated store the pool is updated in place.

    Args:
      store: the pool, plain or sealed.
      ids: i32[n]; the first `count` name valid blocks.
      count: i32[], 0 <= count <= n.
      implementation: "tpu" (Mosaic), "xla" (anywhere); or "auto": tpu on TPU, xla elsewhere.

    Returns:
      The store; only the named blocks differ.

    Raises:
      ValueError: ids that are no int32 vector, or an unknown implementation.
      NotImplementedError: the named implementation, or the platform's own, does not support the pool.
    """
    dispatch.check_name(implementation, IMPLEMENTATIONS)
    if ids.dtype != jnp.int32 or ids.ndim != 1:
        raise ValueError(f"ids: expected an int32 vector, got {ids.dtype}{list(ids.shape)}")
    return dispatch.run(
        implementation, IMPLEMENTATIONS, {"tpu": "tpu"}, "xla", *(store, ids, count)
    )
