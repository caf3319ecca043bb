"""Guessing the next tokens of a row from its own text, on the device.

Invariant: a draft is a guess; whoever uses it checks every token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

NGRAMS = (3, 2)  # lengths of the match, the best first


def ngram_drafts(tokens: Array, num_tokens: Array, draft_len: int) -> tuple[Array, Array]:
    """Returns what followed the latest earlier place at which a row's last tokens stand already.

    Args:
      tokens: i32[row, width], rubbish beyond num_tokens.
      num_tokens: i32[row].
      draft_len: static.

    Returns:
      drafts: i32[row, draft_len].
      lens: i32[row], how many of them are drafts; 0 where the last tokens are new.

    References:
      Saxena, "Prompt Lookup Decoding", 2023.
    """
    width = tokens.shape[1]
    start = jnp.full_like(num_tokens, -1)  # of the continuation
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    for n in sorted(NGRAMS):  # a longer match overrides a shorter one
        ends_here = place + n < num_tokens[:, None]
        for i in range(n):
            tail = jnp.maximum(num_tokens - n + i, 0)[:, None]
            wanted = jnp.take_along_axis(tokens, tail, axis=1)
            ends_here &= jnp.roll(tokens, -i, axis=1) == wanted
        latest = jnp.max(jnp.where(ends_here & (num_tokens[:, None] >= n), place, -1), axis=1)
        start = jnp.where(latest >= 0, latest + n, start)
    column = start[:, None] + jnp.arange(draft_len, dtype=jnp.int32)[None, :]
    drafts = jnp.take_along_axis(tokens, jnp.clip(column, 0, width - 1), axis=1)
    lens = jnp.where(start < 0, 0, jnp.minimum(draft_len, num_tokens - start))
    return drafts, lens
