"""Choosing the next tokens of rows, and keeping of their drafts what is right.

Invariants:
  * The n-th generated token of a row is what its own key draws from the target's logits; a draft is kept only if it is
    that token, so drafts change how many tokens a step brings and never which.
  * Afterwards the cache holds all tokens of a row but its last.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.cache import truncate
from jaxkv.config import CacheConfig
from jaxkv.engine_state import LENGTH, NOT_FINITE, RUNNING, STOP, EngineState
from jaxkv.sampling import sample

Array = jax.Array


def accept(
    config: CacheConfig,
    state: EngineState,
    slot: Array,
    live: Array,
    logits: Array,
    drafts: Array,
    draft_lens: Array,
) -> tuple[EngineState, Array]:
    """Chooses the next tokens of live rows and takes back the cache behind wrong drafts.

    Args:
      slot: i32[row]; live: bool[row].
      logits: f32[row, 1 + draft, vocab], of the last known token and of every draft.
      drafts: i32[row, draft], the first draft_lens of which were fed.

    Returns:
      The state, and i32[row] whether and why each row has ended; RUNNING where it is not live.
    """
    rows, width, vocab = logits.shape
    row_slots = jnp.repeat(slot, width)
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    num_tokens = state.num_tokens[slot]
    index = (num_tokens - state.num_prompt[slot])[:, None] + offset
    sampling = jax.tree.map(lambda x: x[row_slots], state.sampling)
    chosen = sample(sampling, logits.reshape(-1, vocab), index.reshape(-1)).reshape(rows, width)
    finite = jnp.all(~jnp.isnan(logits), axis=-1) & jnp.any(jnp.isfinite(logits), axis=-1)

    right = (offset[:, :-1] < draft_lens[:, None]) & (chosen[:, :-1] == drafts)
    num_right = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
    is_stop = jnp.any(chosen[..., None] == state.stop_ids[slot][:, None, :], axis=-1)
    until_stop = 1 + _first(is_stop)
    room = state.max_len[slot] - num_tokens
    wanted = jnp.minimum(jnp.minimum(num_right + 1, until_stop), room)
    num_new = jnp.where(live, jnp.minimum(wanted, _first(~finite)), 0)
    broken = live & (num_new < wanted)

    column = jnp.where(offset < num_new[:, None], num_tokens[:, None] + offset, config.max_seq_len)
    scores = jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    logprobs = scores - jax.nn.logsumexp(logits, axis=-1)
    ended = live & ((num_new == until_stop) | (num_new == room))
    finish = jnp.where(num_new == until_stop, STOP, LENGTH)
    finish = jnp.where(broken, NOT_FINITE, jnp.where(ended, finish, RUNNING))
    written = jnp.where(live, slot, config.no_seq)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[slot[:, None], column].set(chosen, mode="drop"),
        logprobs=state.logprobs.at[slot[:, None], column].set(logprobs, mode="drop"),
        num_tokens=state.num_tokens.at[written].add(num_new, mode="drop"),
        finish=state.finish.at[written].set(finish, mode="drop"),
        num_drafted=state.num_drafted + jnp.sum(jnp.where(live, draft_lens, 0)),
        num_accepted=state.num_accepted + jnp.sum(jnp.where(live, num_right, 0)),
    )
    if width > 1:
        kept = live & ~broken
        ids = jnp.where(kept, slot, config.no_seq)
        lens = jnp.where(kept, state.num_tokens[slot] - 1, 0)
        state = dataclasses.replace(state, cache=truncate(config, state.cache, ids, lens))
    return state, finish


def _first(condition: Array) -> Array:
    """Returns i32[row]: the first place along the last axis where it holds, or the width."""
    width = condition.shape[-1]
    return jnp.where(jnp.any(condition, axis=-1), jnp.argmax(condition, axis=-1), width)
