"""The engine's device programs: feed rows, decode many steps, drop rows (`engine_state.place` puts a request in a slot).

One rule moves every row.  A slot knows `num_tokens` tokens, its prompt and what it has generated; the cache holds the
first kv_len of them.  Feeding computes the next ones, and a row whose tokens are all computed gets one more:

    tokens   [ prompt ............ | generated .... | next ]        num_tokens
    cache    [ found  | fed, chunk by chunk ........ ]              kv_len = num_tokens - 1 between two steps

A preempted request is a longer prompt, so nothing here knows of preemption but `drop`.

Invariants:
  * The n-th generated token of a row depends on its tokens, its key and n alone: not on its slot, its neighbours, the
    chunks it was fed in, or the drafts it was offered.
  * A token that is fed is fed to the draft model too, where there is one: its store holds what the target's holds.
  * A row that ends makes its full blocks findable and gives them back in the same step; one whose logits are not
    finite only gives them back.
  * When a reserve fails its rows stay as they were, `status` says so, and decoding stops.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkv.cache import PagedKVCache, clear_status, release, reserve
from jaxkv.config import CacheConfig
from jaxkv.draft_model import Models, propose, write_draft
from jaxkv.drafts import ngram_drafts
from jaxkv.engine_state import NOT_FINITE, RUNNING, EngineState, Report, report_of
from jaxkv.sharing import advance, register
from jaxkv.verify import accept
from pallas_kernels.dispatch import when

Array = jax.Array


def feed(
    config: CacheConfig, query_len: int, models: Models, state: EngineState, seq_ids: Array
) -> tuple[EngineState, Report]:
    """Computes up to `query_len` tokens of each row, and the next token of those that are then complete.

    Rows that hold nothing yet are admitted: what the cache knows of their tokens is not computed again.

    Args:
      config: the cache's config.
      query_len: static; tokens of a row in this call.
      models: the model, and the one that drafts.
      state: DONATES under the caller's jit.
      seq_ids: i32[row], running slots; `config.no_seq` marks a padding row.
    """
    before = state.num_tokens
    slot = jnp.minimum(seq_ids, config.max_seqs - 1)
    live = (seq_ids < config.max_seqs) & state.running[slot]
    num_tokens = jnp.where(live, state.num_tokens[slot], 0)
    cache, view, num_found = advance(
        config,
        state.cache,
        jnp.where(live, slot, config.no_seq),
        state.tokens[slot],
        num_tokens,
        state.namespaces[slot],
        query_len,
    )
    tokens = jnp.take_along_axis(state.tokens[slot], view.positions, axis=1)
    hidden, store = models.target(tokens, cache.store, view)
    cache = dataclasses.replace(cache, store=store)
    if models.draft is not None:
        cache = write_draft(models.draft, cache, tokens, view)
    last = jnp.take_along_axis(hidden, jnp.maximum(view.q_lens - 1, 0)[:, None, None], axis=1)
    state = dataclasses.replace(state, cache=cache)
    complete = (view.q_lens > 0) & (view.kv_lens == num_tokens)
    none = jnp.zeros((len(seq_ids), 0), jnp.int32)
    state, finish = accept(
        config, state, slot, complete, models.target.unembed(last), none, jnp.zeros_like(slot)
    )
    good = complete & (finish != NOT_FINITE)  # others may find the prompt from now on
    state = _end(config, state, slot, good, complete & (finish != RUNNING))
    found = jnp.zeros_like(before).at[seq_ids].set(num_found, mode="drop")
    return state, report_of(state, before, 1, found)


def decode(
    config: CacheConfig,
    max_steps: int,
    draft_len: int,
    models: Models,
    state: EngineState,
    seq_ids: Array,
    num_steps: Array,
) -> tuple[EngineState, Report]:
    """Takes up to `num_steps` steps with rows that lack one token, without the host.

    Every step gives a row one token, or up to 1 + draft_len where the draft model, or else the row's own text (prompt
    lookup), foretells them.  Stops early when all rows have ended or a reserve fails.

    Args:
      config: the cache's config.
      max_steps: static upper bound of num_steps; the width of the report.
      draft_len: static; drafted tokens of a step, 0 for none.
      models: the model, and the one that drafts.
      state: DONATES under the caller's jit.
      seq_ids: i32[row], running slots whose prompts are computed; `config.no_seq` marks a padding row.
      num_steps: i32[], traced.

    References:
      Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023 (verification; here a draft is
      right if it is what the row's own key draws, so sampled rows keep their tokens); Saxena, "Prompt Lookup
      Decoding", 2023 (drafts).
    """
    before = state.num_tokens
    slot = jnp.minimum(seq_ids, config.max_seqs - 1)
    real = seq_ids < config.max_seqs

    def goes_on(carry: tuple[Array, EngineState]) -> Array:
        step, state = carry
        alive = jnp.any(real & state.running[slot])
        return (step < num_steps) & alive & (state.cache.status.bits == 0)

    def one_step(carry: tuple[Array, EngineState]) -> tuple[Array, EngineState]:
        step, state = carry
        live = real & state.running[slot]
        drafts, draft_lens = _plan(config, draft_len, models, state, slot, live)
        if models.draft is not None or not draft_len:
            return step + 1, _step(config, models, state, slot, live, drafts, draft_lens)

        def turn(_: Array, state: EngineState, width: int) -> EngineState:
            return _step(config, models, state, slot, live, drafts[:, :width], draft_lens)

        # A step of 1 + draft_len tokens a row costs more than one of 1, used or not.
        foretold = jnp.any(draft_lens > 0)
        state = when(foretold, functools.partial(turn, width=draft_len), state)
        return step + 1, when(~foretold, functools.partial(turn, width=0), state)

    state = jax.lax.while_loop(goes_on, one_step, (jnp.int32(0), state))[1]
    return state, report_of(state, before, max_steps * (1 + draft_len), jnp.zeros_like(before))


def _step(
    config: CacheConfig,
    models: Models,
    state: EngineState,
    slot: Array,
    live: Array,
    drafts: Array,
    draft_lens: Array,
) -> EngineState:
    """Gives live rows (bool[row]) their next tokens: checks the first draft_lens of drafts i32[row, draft], ends rows."""
    last = jnp.take_along_axis(state.tokens[slot], state.num_tokens[slot][:, None] - 1, axis=1)
    asked = jnp.where(live, 1 + draft_lens, 0)
    ids = jnp.where(live, slot, config.no_seq)
    cache, view = reserve(config, state.cache, ids, asked, 1 + drafts.shape[1])
    if models.draft is not None:
        sampling = jax.tree.map(lambda x: x[slot], state.sampling)
        index = (state.num_tokens - state.num_prompt)[slot]
        cache, drafts = propose(config, models.draft, cache, view, sampling, last[:, 0], index)
    hidden, store = models.target(jnp.concatenate([last, drafts], axis=1), cache.store, view)
    state = dataclasses.replace(state, cache=dataclasses.replace(cache, store=store))
    live = view.q_lens > 0
    logits = models.target.unembed(hidden)
    state, finish = accept(config, state, slot, live, logits, drafts, draft_lens)
    ended = live & (finish != RUNNING)
    return _end(config, state, slot, ended & (finish != NOT_FINITE), ended)


def drop(config: CacheConfig, state: EngineState, seq_mask: Array) -> tuple[EngineState, Report]:
    """Empties slots, leaving what they computed findable, and clears the status.

    Args:
      config: the cache's config.
      state: DONATES under the caller's jit.
      seq_mask: bool[seq].
    """
    slot = jnp.arange(config.max_seqs, dtype=jnp.int32)
    before = state.num_tokens
    state = dataclasses.replace(state, cache=clear_status(state.cache))
    holds = seq_mask & (state.cache.tables.kv_lens > 0)
    state = _end(config, state, slot, holds, holds)
    num_tokens = jnp.where(seq_mask, 0, state.num_tokens)
    state = dataclasses.replace(state, num_tokens=num_tokens)
    return state, report_of(state, before, 1, jnp.zeros_like(before))


def _plan(
    config: CacheConfig,
    draft_len: int,
    models: Models,
    state: EngineState,
    slot: Array,
    live: Array,
) -> tuple[Array, Array]:
    """Returns drafts i32[row, draft_len] and how many each row should try, i32[row]; a draft model fills them in later.

    Rows that are not live (bool[row]) try none.
    """
    num_tokens = state.num_tokens[slot]
    drafts = jnp.zeros((len(slot), draft_len), jnp.int32)
    lens = jnp.full_like(slot, draft_len)
    if models.draft is None and draft_len:
        drafts, lens = ngram_drafts(state.tokens[slot], num_tokens, draft_len)
    lens = jnp.minimum(lens, state.max_len[slot] - num_tokens - 1)
    if config.is_quantised:
        # What is refused must not have filled a block: a sealed one cannot be cut.
        lens = jnp.minimum(lens, config.block_size - 1 - (num_tokens - 1) % config.block_size)
    return drafts, jnp.where(live, jnp.maximum(lens, 0), 0)


def _end(
    config: CacheConfig, state: EngineState, slot: Array, findable: Array, over: Array
) -> EngineState:
    """Makes the full blocks of some rows findable, then gives back those of the rows that are over (bool[row] both)."""
    ids = jnp.where(findable, slot, config.no_seq)
    mask = jnp.zeros(config.max_seqs, jnp.bool_)
    mask = mask.at[jnp.where(over, slot, config.no_seq)].set(True, mode="drop")

    def turn(_: Array, cache: PagedKVCache) -> PagedKVCache:
        return release(config, register(config, cache, ids, state.tokens[slot])[0], mask)

    return dataclasses.replace(state, cache=when(jnp.any(findable | over), turn, state.cache))
