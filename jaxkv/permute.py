"""Permuting sequences among slots: what beam search does to its cache after every step.

Invariants:
  * No K/V byte moves; tables, lengths, ref counts and open block ids do (and blocks nobody keeps are freed).
  * The work follows the blocks of the slots whose sequence changes; slots that keep theirs cost nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.cache import PagedKVCache, check_rows, share_slots, slots
from jaxkv.config import CacheConfig
from jaxkv.status import StatusBit, flag

Array = jax.Array


def reorder(config: CacheConfig, cache: PagedKVCache, source: Array) -> PagedKVCache:
    """Lets every slot i hold the sequence that slot source[i] holds now, all slots at once.

    A slot named twice is shared, as by `fork`: its blocks gain owners, and an open block is copied when somebody
    writes it. One that is not named loses its sequence, as by `release`.

    Args:
      config: the cache's config.
      cache: the cache.  DONATES under the caller's jit.
      source: i32[max_seqs], slots; `config.no_seq`, or a slot that holds nothing, leaves the slot empty.

    Returns:
      The cache; on failure unchanged but for `status`.

    Raises:
      ValueError: source is no integer vector with an entry for every slot.

    Status:
      INVALID_SEQ.

    References:
      seeds/000 section 3.2; Kwon et al. 2023 section 4.4 (beam search on shared blocks).
    """
    (source,) = check_rows(("source", source))
    if source.shape != (config.max_seqs,):
        raise ValueError(
            f"source: expected an entry for each of {config.max_seqs} slots, got {source.shape[0]}"
        )
    real, _ = slots(config, source)
    bits = flag(StatusBit.INVALID_SEQ, jnp.any(~real & (source != config.no_seq)))
    slot = jnp.arange(config.max_seqs, dtype=jnp.int32)
    return share_slots(config, cache, bits, source, slot, source != slot)
