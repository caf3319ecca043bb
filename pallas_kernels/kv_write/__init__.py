"""The op that writes new tokens into the pool, and its dispatch over implementations."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kv_write.reference import write_kv_reference
from pallas_kernels.kv_write.spec import check_inputs
from pallas_kernels.kv_write.tpu import write_kv_tpu
from pallas_kernels.kv_write.triton import write_kv_triton
from pallas_kernels.kv_write.xla import write_kv_xla
from pallas_kernels.layout import Array, BatchView, KVStore

IMPLEMENTATIONS = {
    "tpu": write_kv_tpu,
    "triton": write_kv_triton,
    "hopper": write_kv_triton,  # a scatter has no use for wgmma; so that one name serves all ops of `cached_attention`
    "xla": write_kv_xla,
    "reference": write_kv_reference,
}


def write_kv(
    store: KVStore,
    layer: Array | int,
    k: Array,
    v: Array,
    view: BatchView,
    *,
    implementation: str = "auto",
) -> KVStore:
    """Writes the K and V of the new tokens of each row into the blocks its table names.

    ALIASES: under jit with a donated store the pool is updated in place.
    REQUIRES: blocks that receive tokens have ref 1 (`reserve` has made the copies).

    Args:
      store: the pool.
      layer: i32[], which layer to write; may be traced.
      k, v: float[row, q_pos, kv_head, head_dim].  Cast to the store's format; padding (j >= q_len) is dropped.
      view: tables, lengths and positions of the rows.
      implementation: "tpu" (Mosaic), "triton" (CUDA, sm_80 and later), "hopper" (another name for triton's),
        "xla" (anywhere), "reference"; or "auto": tpu, triton or xla, by the platform the program is lowered for.

    Returns:
      The store with the same structure and dtype; only the named slots differ.

    Raises:
      ValueError: shapes, dtypes or names that do not fit; the message names the value and what was expected.
      NotImplementedError: the named implementation, or the platform's own, does not support the call.
    """
    dispatch.check_name(implementation, IMPLEMENTATIONS)
    check_inputs(store, k, v, view)
    by_platform = {"tpu": "tpu", "cuda": "triton"}
    operands = (store, jnp.asarray(layer, jnp.int32), k, v, view)
    return dispatch.run(implementation, IMPLEMENTATIONS, by_platform, "xla", *operands)
