"""Paged attention: the maths, what is supported, and the checks every implementation shares.

For query j of row r (0 <= j < q_len) at position p = kv_len - q_len + j, head h, kv head g = h // group::

    s_i   = soft_cap * tanh(scale * (q_j . k_i) / soft_cap)      (without soft_cap: scale * (q_j . k_i))
    seen  = { i : max(0, p - window + 1) <= i <= p }              (without window: 0 <= i <= p)
    out_j = sum_{i in seen} softmax(s)_i v_i,   lse_j = log sum_{i in seen} exp(s_i)

Key i lives in block ``table[i // block_size]``, slot ``i % block_size``.  A query that sees nothing (padding,
q_len 0, kv_len 0) gives zeros and lse = -inf.  Slots at and past kv_len, and blocks outside the tables, may
hold NaN or Inf and must not change a bit of the output: scores and V are both selected, never multiplied by
a mask.

Over a `SealedStore` a query reads codes, and only of the blocks before its own::

    seen  = { i : max(0, p - window + 1) <= i < p // block_size * block_size }

Its own block it reads in full precision from the open store, whether or not the same call fills it; so what a query sees does
not depend on how a prompt was cut into chunks.  `cached_attention` merges the two parts by their lse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Array, BatchView, KVStore
from pallas_kernels.sealed import SealedStore


def check_inputs(
    q: Array,
    store: KVStore | SealedStore,
    view: BatchView,
    soft_cap: Array | float | None,
    window: Array | int | None,
) -> None:
    """Checks everything that is known at trace time.

    Raises:
      ValueError: a shape, dtype or value is not what the op expects; the message names both.
    """
    if not isinstance(store, (KVStore, SealedStore)):
        raise ValueError(
            f"store: expected a KVStore or a SealedStore, got {type(store).__name__} "
            "(cached_attention reads every kind)"
        )
    layout = store.layout
    if q.ndim != 4:
        raise ValueError(f"q: expected [row, q_pos, q_head, head_dim], got shape {q.shape}")
    rows, query_len, num_q_heads, head_dim = q.shape
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q: expected a float dtype, got {q.dtype}")
    if head_dim != layout.head_dim:
        raise ValueError(f"q: expected head_dim {layout.head_dim} of the cache, got {head_dim}")
    if num_q_heads % layout.num_kv_heads:
        raise ValueError(
            f"q: expected a number of q heads that the {layout.num_kv_heads} kv heads divide, got {num_q_heads}"
        )
    if view.positions.shape != (rows, query_len):
        raise ValueError(
            f"view.positions: expected shape {(rows, query_len)}, got {view.positions.shape}"
        )
    check_view(view, rows)
    if isinstance(soft_cap, (int, float)) and soft_cap <= 0:
        raise ValueError(f"soft_cap: expected a positive number or None, got {soft_cap}")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window: expected an integer >= 1 or None, got {window}")


def check_view(view: BatchView, rows: int) -> None:
    """Checks the shapes and the integer width of a batch view.

    Raises:
      ValueError: a leaf is not int32, or its shape does not belong to `rows` rows.
    """
    for name in ("block_tables", "kv_lens", "q_lens", "positions"):
        leaf = getattr(view, name)
        if leaf.dtype != jnp.int32:
            raise ValueError(f"view.{name}: expected int32, got {leaf.dtype}")
        if leaf.shape[0] != rows:
            raise ValueError(f"view.{name}: expected {rows} rows, got shape {leaf.shape}")


def query_valid(view: BatchView) -> jax.Array:
    """Returns bool[row, q_pos]: True for real queries, False for padding."""
    return jnp.arange(view.query_len, dtype=jnp.int32)[None, :] < view.q_lens[:, None]


def last_seen(store: KVStore | SealedStore, view: BatchView) -> jax.Array:
    """Returns i32[row, q_pos]: the last key each query may see in this store; -1 for none."""
    last = view.positions
    if isinstance(store, SealedStore):
        last = last // store.layout.block_size * store.layout.block_size - 1
    return jnp.where(query_valid(view), last, -1)
