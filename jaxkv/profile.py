"""The memory profile of a live cache: what its arrays really take, and how much of that is in use.

Invariants:
  * Bytes are the `nbytes` of the arrays themselves; no element width is assumed anywhere.
  * The pool is counted whole in `kv_total_bytes`, bookkeeping (tables, ref counts, free stack, status) apart.
  * A block that several sequences share counts once.

References: doc 002 section 5.2 (weights / KV total / peak used / utilisation, and the profiler there that
took 4 bytes an element for granted); doc 000 section 1.3 (fragmentation) and 3.1 (saving from sharing).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv import device_bytes, ledger
from jaxkv.cache import PagedKVCache
from pallas_kernels.cached_attention import Store
from pallas_kernels.sealed import QuantisedStore


@dataclasses.dataclass(frozen=True)
class MemoryProfile:
    """Where the bytes of a cache and its model are.

    Attributes:
      kv_format: element format of the pool.
      platform: where the pool lies: "cpu", "gpu" or "tpu".
      block_size, num_blocks: the pool's sizes.
      used_blocks: live blocks now.
      peak_blocks: most blocks that were live at any time, as far as the caller knows.
      num_seqs: slots in use.
      num_tokens: tokens the slots hold; a shared token counts for each of its sequences.
      weights_bytes: the model's arrays; None where no model was given.
      kv_total_bytes: all bytes of K and V: codes, scales, open blocks.
      kv_open_bytes: the full-precision open blocks of quantised formats among them; 0 for plain ones.
      kv_used_bytes, kv_peak_bytes: the live part of the pool, and its live part at the peak (open blocks apart).
      shared_saved_bytes: what separate copies of the shared blocks would take on top.
      bookkeeping_bytes: all other arrays of the cache.
      kv_padded_bytes: the pool with the device's tiling padding; None where arrays are not padded.
      utilisation, peak_utilisation: used and peak blocks over all blocks, in [0, 1].
      fragmentation: free slots of the live blocks over their capacity, in [0, 1).
    """

    kv_format: str
    platform: str
    block_size: int
    num_blocks: int
    used_blocks: int
    peak_blocks: int
    num_seqs: int
    num_tokens: int
    weights_bytes: int | None
    kv_total_bytes: int
    kv_open_bytes: int
    kv_used_bytes: int
    kv_peak_bytes: int
    shared_saved_bytes: int
    bookkeeping_bytes: int
    kv_padded_bytes: int | None
    utilisation: float
    peak_utilisation: float
    fragmentation: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values only, ready for `json.dumps`; field names are the keys."""
        return dataclasses.asdict(self)


def arrays_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a pytree; an array that appears twice (tied weights) counts once."""
    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(tree)}.values())


def memory_profile(
    cache: PagedKVCache,
    *,
    model: Any = None,
    peak_blocks: int | None = None,
    platform: str | None = None,
) -> MemoryProfile:
    """Returns the profile of a cache; a host function, it waits for the device.

    Args:
      cache: a cache that has not been donated away.
      model: a pytree of weights, or None.
      peak_blocks: most live blocks so far, from whoever watched the run (`DecodeState.peak_blocks`); None
        means the blocks in use now.
      platform: where the arrays count as lying; None asks the pool.

    Raises:
      ValueError: `peak_blocks` lies below the blocks in use, or above the pool.
    """
    layout = cache.store.layout
    refs, tables, kv_lens = jax.device_get(
        (cache.pool.ref_counts, cache.tables.blocks, cache.tables.kv_lens)
    )
    used = int(np.count_nonzero(refs))  # cached blocks have no owner
    peak = used if peak_blocks is None else peak_blocks
    if not used <= peak <= layout.num_blocks:
        raise ValueError(
            f"peak_blocks: expected {used} (in use) to {layout.num_blocks} (the pool), got {peak}"
        )
    stores = [store for store in (cache.store, cache.draft_store) if store is not None]
    kv_total = arrays_bytes(stores)
    open_bytes = arrays_bytes([s.open for s in stores if isinstance(s, QuantisedStore)])
    block_bytes = (kv_total - open_bytes) // layout.num_blocks
    held = int(np.sum(-(-kv_lens // layout.block_size)))
    platform = platform or next(iter(jax.tree.leaves(cache.store)[0].devices())).platform
    return MemoryProfile(
        kv_format=_format_name(cache.store),
        platform=platform,
        block_size=layout.block_size,
        num_blocks=layout.num_blocks,
        used_blocks=used,
        peak_blocks=peak,
        num_seqs=int(np.count_nonzero(kv_lens)),
        num_tokens=int(kv_lens.sum()),
        weights_bytes=None if model is None else arrays_bytes(model),
        kv_total_bytes=kv_total,
        kv_open_bytes=open_bytes,
        kv_used_bytes=used * block_bytes,
        kv_peak_bytes=peak * block_bytes,
        shared_saved_bytes=max(0, held - used) * block_bytes,
        bookkeeping_bytes=arrays_bytes(cache) - kv_total,
        kv_padded_bytes=sum(map(padded_bytes, stores)) if platform == "tpu" else None,
        utilisation=used / layout.num_blocks,
        peak_utilisation=peak / layout.num_blocks,
        fragmentation=ledger.fragmentation(tables, kv_lens, layout.block_size),
    )


def _format_name(store: Store) -> str:
    if isinstance(store, QuantisedStore):
        return store.layout.sealed.format.name
    return store.layout.format.name


def padded_bytes(store: Store) -> int:
    """Returns the bytes of all arrays of a store as a TPU holds them, row-major."""
    return sum(
        device_bytes.tpu_array_bytes(leaf.shape, 8 * leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(store)
    )
