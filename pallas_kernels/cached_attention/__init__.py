"""What a layer of a model calls: keep the K and V of the new tokens, and attend over everything the rows hold.

One op over both kinds of store, so that a model is written once::

    KVStore          write_kv, then paged_attention
    QuantisedStore   open blocks are written and read in full precision, blocks that fill are sealed,
                     sealed blocks are read as codes; the two reads are merged by their log-sum-exp
"""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp

from pallas_kernels.cached_attention.quantised import quantised_attention
from pallas_kernels.cached_attention.shared_rows import rows_to_read
from pallas_kernels.kv_write import write_kv
from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sealed import QuantisedStore

__all__ = ["Store", "cached_attention", "rows_to_read"]

Store = KVStore | QuantisedStore


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    store: Store,
    layer: Array | int,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None = None,
    window: Array | int | None = None,
    implementation: str = "auto",
    read: BatchView | None = None,
) -> tuple[Array, Store]:
    """Writes new tokens into the cache and returns their causal attention over all tokens of their rows.

    ALIASES: under jit with a donated store every pool is updated in place.
    REQUIRES: `view` comes from `reserve`: the rows have room, and blocks that receive tokens have ref 1.

    Args:
      q: float[row, q_pos, q_head, head_dim].
      k, v: float[row, q_pos, kv_head, head_dim].
      store: the bytes of the cache.
      layer: i32[], counted over all layers of the model; may be traced.
      view: tables, lengths and positions of the rows.
      scale, soft_cap, window, implementation: as in `paged_attention`; `implementation` is that of every op called.
      read: the view with the rows empty that are not to be attended for (`rows_to_read`), where several devices hold the same
        heads and share the reading; None: `view`.

    Returns:
      out q.dtype[row, q_pos, q_head, head_dim], zero in rows that `read` leaves out, and the store.

    Raises:
      ValueError: shapes, dtypes or names that do not fit; the message names the value and what was expected.
      NotImplementedError: the named implementation, or the platform's own, does not support the call.
    """
    layer = jnp.asarray(layer, jnp.int32)
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "window": window}
    read = view if read is None else read
    if isinstance(store, QuantisedStore):
        return quantised_attention(q, k, v, store, layer, view, read, options, implementation)
    store = write_kv(store, layer, k, v, view, implementation=implementation)
    out = paged_attention(q, store, layer, read, **options, implementation=implementation)
    return cast(Array, out), store
