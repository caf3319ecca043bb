"""The bytes of the cache: making them, and reading a sequence back.

Invariants:
  * The pool has a static shape and is updated in place when it is donated; nothing here copies it.
  * A slot that no sequence has written holds anything.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.config import CacheConfig
from pallas_kernels.layout import KVStore, decode

Array = jax.Array


def init_store(config: CacheConfig) -> KVStore:
    """Returns a store of zeros."""
    layout = config.layout
    return KVStore(kv=jnp.zeros(layout.shape, layout.dtype), layout=layout)


def gather_dense(store: KVStore, block_table: Array, kv_len: int) -> tuple[Array, Array]:
    """Reads the K and V of one sequence through its table, for tests and export.

    Args:
      store: the store.
      block_table: i32[max_blocks].
      kv_len: tokens to read.

    Returns:
      k, v: f32[layer, token, kv_head, head_dim].
    """
    layout = store.layout
    ids = jnp.minimum(block_table, layout.num_blocks - 1)
    kv = decode(layout, store.kv[:, ids]).transpose(0, 1, 3, 2, 4)
    kv = kv.reshape(layout.num_layers, -1, layout.num_kv_heads, 2 * layout.head_dim)[:, :kv_len]
    return kv[..., : layout.head_dim], kv[..., layout.head_dim :]
