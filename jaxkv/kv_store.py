"""The bytes of the cache: making them, and reading a sequence back.

Invariants:
  * The pool has a static shape and is updated in place when it is donated; nothing here copies it.
  * A slot that no sequence has written holds anything.
  * Quantised stores: blocks are shared, freed and reused by the same ids as plain ones; only open blocks are ever copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.config import CacheConfig
from pallas_kernels.block_copy import copy_blocks
from pallas_kernels.cached_attention import Store
from pallas_kernels.layout import KVLayout, KVStore, decode
from pallas_kernels.sealed import QuantisedLayout, QuantisedStore, SealedBlocks, SealedStore, unseal

Array = jax.Array


def init_store(config: CacheConfig) -> Store:
    """Returns a store of zeros."""
    layout = config.layout
    return _zeros(layout) if isinstance(layout, KVLayout) else _quantised_zeros(layout)


def _zeros(layout: KVLayout) -> KVStore:
    return KVStore(kv=jnp.zeros(layout.shape, layout.dtype), layout=layout)


def _quantised_zeros(layout: QuantisedLayout) -> QuantisedStore:
    sealed = layout.sealed
    return QuantisedStore(
        sealed=SealedStore(
            codes=jnp.zeros(sealed.codes_shape, sealed.codes_dtype),
            key_affine=jnp.zeros(sealed.key_affine_shape, sealed.affine_dtype),
            value_affine=jnp.zeros(sealed.value_affine_shape, sealed.affine_dtype),
            layout=sealed,
        ),
        open=_zeros(layout.open),
        wide=None if layout.wide is None else _zeros(layout.wide),
        layout=layout,
    )


def copy_pairs(store: KVStore, src: Array, dst: Array) -> KVStore:
    """Copies whole blocks of all layers, for the pairs whose `dst` lies in the pool (i32[n] each)."""
    real = dst < store.layout.num_blocks
    order = jnp.argsort(~real, stable=True)
    return copy_blocks(store, src[order], dst[order], jnp.sum(real, dtype=jnp.int32))


def gather_dense(
    store: Store, block_table: Array, kv_len: int, open_id: Array | int | None = None
) -> tuple[Array, Array]:
    """Reads the K and V of one sequence through its table, as attention reads them; for tests and export.

    Args:
      store: the store.
      block_table: i32[max_blocks].
      kv_len: tokens to read.
      open_id: i32[], the sequence's open block; needed by a quantised store unless kv_len is a multiple of block_size.

    Returns:
      k, v: f32[layer, token, kv_head, head_dim].

    Raises:
      ValueError: the last tokens are in an open block, and none is named.
    """
    layout = store.layout
    ids = jnp.minimum(block_table, layout.num_blocks - 1)
    if isinstance(store, KVStore):
        return _tokens(*_split(decode(store.layout, store.kv[:, ids])), kv_len)
    num_full, rest = divmod(kv_len, layout.block_size)
    sealed = store.sealed
    arrays = (sealed.codes, sealed.key_affine, sealed.value_affine)
    keys, values = unseal(sealed.layout, SealedBlocks(*(x[:, ids[:num_full]] for x in arrays)))
    if rest:
        if open_id is None:
            raise ValueError(
                f"open_id: expected the open block of the last {rest} tokens, got None"
            )
        tail = _split(decode(store.open.layout, store.open.kv[:, jnp.asarray(open_id)[None]]))
        keys, values = (jnp.concatenate(x, axis=1) for x in zip((keys, values), tail, strict=True))
    keys, values = _tokens(keys, values, kv_len)
    if store.wide is None:
        return keys, values
    n = store.layout.num_wide_layers
    wide = gather_dense(store.wide, block_table, kv_len)
    keys, values = (
        jnp.concatenate([w[:n], x, w[n:]]) for w, x in zip(wide, (keys, values), strict=True)
    )
    return keys, values


def _split(kv: Array) -> tuple[Array, Array]:
    """Returns the K and V halves of f32[..., 2 * head_dim]."""
    keys, values = jnp.split(kv, 2, axis=-1)
    return keys, values


def _tokens(keys: Array, values: Array, kv_len: int) -> tuple[Array, Array]:
    """Returns [layer, block, kv_head, slot, head_dim] as [layer, token, kv_head, head_dim]."""
    keys, values = (
        x.transpose(0, 1, 3, 2, 4).reshape(x.shape[0], -1, x.shape[2], x.shape[4])[:, :kv_len]
        for x in (keys, values)
    )
    return keys, values
