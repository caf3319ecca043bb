"""The op that seals blocks: quantises those that filled, in one pass, into the pool; and its dispatch."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.block_seal.tpu import seal_blocks_tpu
from pallas_kernels.block_seal.xla import seal_blocks_xla
from pallas_kernels.layout import Array
from pallas_kernels.sealed import SealedStore

IMPLEMENTATIONS = {"tpu": seal_blocks_tpu, "xla": seal_blocks_xla}


def seal_blocks(
    store: SealedStore,
    layer: Array | int,
    kv: Array,
    ids: Array,
    *,
    implementation: str = "auto",
) -> SealedStore:
    """Quantises blocks of one layer and writes their codes and scales.

    ALIASES: under jit with a donated store the pool is updated in place.
    REQUIRES: ids inside the pool are distinct, and their owners write them no more.

    Args:
      store: the sealed blocks.
      layer: i32[], which quantised layer; may be traced.
      kv: float[n, kv_head, block_size, 2 * head_dim], the tokens of n blocks.
      ids: i32[n], where each block goes; NO_BLOCK for those that are not full yet.
      implementation: "tpu" (Mosaic), "xla" (anywhere); or "auto": tpu on TPU, xla elsewhere.

    Returns:
      The store; only the named blocks of the layer differ.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an unknown implementation.
      NotImplementedError: the named implementation, or the platform's own, does not support the layout.
    """
    dispatch.check_name(implementation, IMPLEMENTATIONS)
    layout = store.layout
    expected = (layout.num_kv_heads, layout.block_size, 2 * layout.head_dim)
    if kv.ndim != 4 or kv.shape[1:] != expected:
        raise ValueError(f"kv: expected [n, {', '.join(map(str, expected))}], got {kv.shape}")
    if ids.dtype != jnp.int32 or ids.shape != kv.shape[:1]:
        raise ValueError(f"ids: expected i32[{kv.shape[0]}], got {ids.dtype}{list(ids.shape)}")
    operands = (store, jnp.asarray(layer, jnp.int32), kv, ids)
    return dispatch.run(implementation, IMPLEMENTATIONS, {"tpu": "tpu"}, "xla", *operands)
