"""Which rows a device attends for, where several devices hold the same K and V."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.layout import BatchView, KVStore
from pallas_kernels.sealed import QuantisedLayout, QuantisedStore


def rows_to_read(
    view: BatchView, store: KVStore | QuantisedStore, row_axis: str | None
) -> BatchView:
    """Returns the view with the rows of other devices empty, so that ops skip them and their output is zero.

    Every row belongs to one device; neighbouring rows go together, and each device gets about the same number of keys times
    queries.  All devices compute this from the same lengths and come to the same answer.

    Args:
      view: of all rows.
      store: whose sentinels mark a table entry as unused.
      row_axis: name of the mesh axis along which devices hold the same K and V; None: this device reads everything.
    """
    if row_axis is None:
        return view
    num_devices = jax.lax.axis_size(row_axis)
    work = view.kv_lens.astype(jnp.float32) * view.q_lens.astype(jnp.float32)
    end = jnp.cumsum(work)
    middle = (end - work / 2) / jnp.maximum(end[-1], 1.0)
    owner = jnp.minimum((middle * num_devices).astype(jnp.int32), num_devices - 1)
    mine = owner == jax.lax.axis_index(row_axis)
    layout, open_ids = store.layout, view.open_ids
    if isinstance(layout, QuantisedLayout):
        no_block = layout.sealed.no_block
        open_ids = jnp.where(mine, open_ids, layout.open.no_block)
    else:
        no_block = layout.no_block
    return dataclasses.replace(
        view,
        block_tables=jnp.where(mine[:, None], view.block_tables, no_block),
        kv_lens=jnp.where(mine, view.kv_lens, 0),
        q_lens=jnp.where(mine, view.q_lens, 0),
        positions=jnp.where(mine[:, None], view.positions, 0),
        open_ids=open_ids,
    )
