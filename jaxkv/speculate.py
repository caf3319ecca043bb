"""How many draft tokens a call may write so that all of them can be taken back.

Speculation needs nothing else of the cache: `reserve` and write the draft in one call, `truncate` to what was accepted.  Both
are exact: blocks, sharing and bytes in reach are those of decoding the accepted tokens one by one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv.config import CacheConfig

Array = jax.Array


def max_draft_lens(config: CacheConfig, kv_lens: Array) -> Array:
    """Returns how many tokens can be written after `kv_lens` so that `truncate` can cut back to any length since.

    Without quantisation that is all that fits the sequence.  A quantised block is sealed when it fills and
    cannot be cut in two once the next one has begun, so a draft ends at the block's edge at the latest: 1 to
    block_size tokens.  A longer draft loses nothing either: if its rejected part begins in a sealed block, `truncate` says
    SEALED_BLOCK and changes nothing; truncating to the edge before and running the accepted tokens after it again is exact.

    Args:
      config: the cache's config.
      kv_lens: i32[...], lengths before the draft.

    Returns:
      i32[...], 0 where the sequence is full.
    """
    room = config.max_seq_len - kv_lens
    if not config.is_quantised:
        return room
    return jnp.minimum(room, config.block_size - kv_lens % config.block_size)
