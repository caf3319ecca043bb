"""Writing new tokens: the maths and the checks every implementation shares.

Token j of row r (0 <= j < q_len) has position p = kv_len - q_len + j and goes to::

    kv[layer, table[r, p // block_size], :, p % block_size, :head_dim] = k[r, j]
    kv[layer, table[r, p // block_size], :, p % block_size, head_dim:] = v[r, j]

Nothing else changes.  Padding tokens and positions whose table entry is NO_BLOCK are dropped.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.paged_attention.spec import check_view


def check_inputs(store: KVStore, k: Array, v: Array, view: BatchView) -> None:
    """Checks everything that is known at trace time.

    Raises:
      ValueError: a shape or dtype is not what the op expects; the message names both.
    """
    if not isinstance(store, KVStore):
        raise ValueError(
            f"store: expected a KVStore, got {type(store).__name__} (cached_attention writes every kind)"
        )
    layout = store.layout
    rows = view.kv_lens.shape[0]
    expected = (rows, view.query_len, layout.num_kv_heads, layout.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.shape != expected:
            raise ValueError(
                f"{name}: expected [row, q_pos, kv_head, head_dim] = {expected}, got {x.shape}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}: expected a float dtype, got {x.dtype}")
    check_view(view, rows)
