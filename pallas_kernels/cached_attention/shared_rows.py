"""Which rows a device attends for, where several devices hold the same K and V."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.layout import BatchView, KVStore
from pallas_kernels.sealed import QuantisedStore


def rows_to_read(view: BatchView, store: KVStore | QuantisedStore, axis: str) -> BatchView:
    """Returns the view with the rows of other devices empty: ops skip them, and their output is zero.

    Every row belongs to one device; neighbouring rows go together, and each device gets about the same number of keys times
    queries.  All devices compute this from the same lengths and come to the same answer.

    Args:
      view: of all rows.
      store: whose sentinels mark a table entry as unused.
      axis: of the mesh (inside `jax.shard_map`); devices along it hold the same K and V.
    """
    num_devices = jax.lax.axis_size(axis)
    work = view.kv_lens.astype(jnp.float32) * view.q_lens.astype(jnp.float32)
    end = jnp.cumsum(work)
    middle = (end - work / 2) / jnp.maximum(end[-1], 1.0)
    owner = jnp.minimum((middle * num_devices).astype(jnp.int32), num_devices - 1)
    mine = owner == jax.lax.axis_index(axis)
    open_ids = view.open_ids
    if isinstance(store, QuantisedStore):
        no_block = store.layout.sealed.no_block
        if open_ids is not None:
            open_ids = jnp.where(mine, open_ids, store.layout.open.no_block)
    else:
        no_block = store.layout.no_block
    return dataclasses.replace(
        view,
        block_tables=jnp.where(mine[:, None], view.block_tables, no_block),
        kv_lens=jnp.where(mine, view.kv_lens, 0),
        q_lens=jnp.where(mine, view.q_lens, 0),
        positions=jnp.where(mine[:, None], view.positions, 0),
        open_ids=open_ids,
    )
