"""The engine's device programs: place a request in a slot, feed rows, decode many steps, drop rows.

One rule moves every row.  A slot knows `num_tokens` tokens, its prompt and what it has generated; the cache holds the
first kv_len of them.  Feeding computes the next ones, and a row whose tokens are all computed gets one more:

    tokens   [ prompt ............ | generated .... | next ]        num_tokens
    cache    [ found  | fed, chunk by chunk ........ ]              kv_len = num_tokens - 1 between two steps

A preempted request is a longer prompt, so nothing here knows of preemption but `drop`.

Invariants:
  * Rows are slots of the cache.  A slot runs while num_tokens > 0 and `finish` is 0.
  * The n-th generated token of a row depends on its tokens, its key and n alone: not on its slot, its neighbours, the
    chunks it was fed in, or the drafts it was offered.
  * A row that ends makes its full blocks findable and gives them back in the same step; one whose logits are not
    finite only gives them back.
  * When a reserve fails its rows stay as they were, `status` says so, and decoding stops.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.admit import advance, register, with_prefix_reuse
from jaxkv.cache import PagedKVCache, clear_status, init_cache, release, reserve, truncate
from jaxkv.config import CacheConfig
from jaxkv.drafts import ngram_drafts
from jaxkv.eviction import Policy
from jaxkv.model import DecoderModel
from jaxkv.namespace import NUM_WORDS
from jaxkv.sampling import SamplingState, row_key, sample

Array = jax.Array

NO_TOKEN = -1
RUNNING, STOP, LENGTH, NOT_FINITE = range(4)  # values of `EngineState.finish`


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache", "sampling", "namespaces", "tokens", "logprobs", "num_tokens", "num_prompt", "max_len", "stop_ids",
        "finish", "num_drafted", "num_accepted",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything the engine keeps on the device.

    Attributes:
      cache: the paged cache, with prefix reuse.
      sampling: parameters and keys of the slots.
      namespaces: i32[seq, 8], what each slot's request may share with.
      tokens: i32[seq, max_seq_len], prompt and generated tokens; rubbish beyond num_tokens.
      logprobs: f32[seq, max_seq_len], of the generated tokens, under the model's own distribution.
      num_tokens: i32[seq]; 0 in a slot nobody uses.
      num_prompt: i32[seq], tokens of the request's prompt.
      max_len: i32[seq], num_tokens at which the row ends.
      stop_ids: i32[seq, stop], tokens that end the row; NO_TOKEN in unused places.
      finish: i32[seq], RUNNING, or why the row ended.
      num_drafted, num_accepted: i32[], drafted tokens that were checked, and those that were right.
    """

    cache: PagedKVCache
    sampling: SamplingState
    namespaces: Array
    tokens: Array
    logprobs: Array
    num_tokens: Array
    num_prompt: Array
    max_len: Array
    stop_ids: Array
    finish: Array
    num_drafted: Array
    num_accepted: Array

    @property
    def running(self) -> Array:
        """bool[seq]."""
        return (self.num_tokens > 0) & (self.finish == RUNNING)


class Placement(NamedTuple):
    """A request on its way into a slot; every field an array, so that one program places them all.

    Attributes:
      slot, num_tokens, num_prompt, max_len, top_k: i32[].
      tokens: i32[max_seq_len].
      stop_ids: i32[stop].
      namespace: i32[8].
      temperature, top_p, min_p: f32[].
      seed, sample_index: u32[].
    """

    slot: Array | np.ndarray
    tokens: Array | np.ndarray
    num_tokens: Array | np.ndarray
    num_prompt: Array | np.ndarray
    max_len: Array | np.ndarray
    stop_ids: Array | np.ndarray
    namespace: Array | np.ndarray
    temperature: Array | np.ndarray
    top_k: Array | np.ndarray
    top_p: Array | np.ndarray
    min_p: Array | np.ndarray
    seed: Array | np.ndarray
    sample_index: Array | np.ndarray


class Report(NamedTuple):
    """What the host learns from one dispatch, fetched at once.

    Attributes:
      tokens: i32[seq, width], new tokens of each slot; their logprobs: f32[seq, width].
      num_tokens, kv_lens, finish: i32[seq], after the dispatch.
      num_found: i32[seq], tokens that slots starting in this dispatch found in the cache.
      bits, need_blocks: the cache's status.
      num_free, num_cached: i32[], blocks.
      num_drafted, num_accepted: i32[], totals so far.
    """

    tokens: Array
    logprobs: Array
    num_tokens: Array
    kv_lens: Array
    finish: Array
    num_found: Array
    bits: Array
    need_blocks: Array
    num_free: Array
    num_cached: Array
    num_drafted: Array
    num_accepted: Array


def init_engine_state(config: CacheConfig, policy: Policy, num_stop_ids: int) -> EngineState:
    """Returns a state without requests; a request may have up to `num_stop_ids` end tokens."""
    rows, width = config.max_seqs, config.max_seq_len
    zeros = functools.partial(jnp.zeros, rows)
    seeds = jnp.zeros(rows, jnp.uint32)
    return EngineState(
        cache=with_prefix_reuse(config, init_cache(config), policy),
        sampling=SamplingState(
            temperature=zeros(jnp.float32),
            top_k=zeros(jnp.int32),
            top_p=jnp.ones(rows, jnp.float32),
            min_p=zeros(jnp.float32),
            key=jax.vmap(row_key)(seeds, seeds),
        ),
        namespaces=jnp.zeros((rows, NUM_WORDS), jnp.int32),
        tokens=jnp.zeros((rows, width), jnp.int32),
        logprobs=jnp.zeros((rows, width), jnp.float32),
        num_tokens=zeros(jnp.int32),
        num_prompt=zeros(jnp.int32),
        max_len=zeros(jnp.int32),
        stop_ids=jnp.full((rows, num_stop_ids), NO_TOKEN, jnp.int32),
        finish=zeros(jnp.int32),
        num_drafted=jnp.int32(0),
        num_accepted=jnp.int32(0),
    )


def place(state: EngineState, new: Placement) -> EngineState:
    """Puts a request into a slot that nobody uses; its first `feed` looks for its prefix.

    Args:
      state: DONATES under the caller's jit.
      new: the request.
    """
    slot, sampling = new.slot, state.sampling
    return dataclasses.replace(
        state,
        sampling=SamplingState(
            temperature=sampling.temperature.at[slot].set(new.temperature),
            top_k=sampling.top_k.at[slot].set(new.top_k),
            top_p=sampling.top_p.at[slot].set(new.top_p),
            min_p=sampling.min_p.at[slot].set(new.min_p),
            key=sampling.key.at[slot].set(
                row_key(jnp.asarray(new.seed), jnp.asarray(new.sample_index))
            ),
        ),
        namespaces=state.namespaces.at[slot].set(new.namespace),
        tokens=state.tokens.at[slot].set(new.tokens),
        num_tokens=state.num_tokens.at[slot].set(new.num_tokens),
        num_prompt=state.num_prompt.at[slot].set(new.num_prompt),
        max_len=state.max_len.at[slot].set(new.max_len),
        stop_ids=state.stop_ids.at[slot].set(new.stop_ids),
        finish=state.finish.at[slot].set(RUNNING),
    )


def feed(
    config: CacheConfig, query_len: int, model: DecoderModel, state: EngineState, seq_ids: Array
) -> tuple[EngineState, Report]:
    """Computes up to `query_len` tokens of each row, and the next token of those that are then complete.

    Rows that hold nothing yet are admitted: what the cache knows of their tokens is not computed again.

    Args:
      config: the cache's config.
      query_len: static; tokens of a row in this call.
      model: the model.
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
    hidden, store = model(tokens, cache.store, view)
    last = jnp.take_along_axis(hidden, jnp.maximum(view.q_lens - 1, 0)[:, None, None], axis=1)
    state = dataclasses.replace(state, cache=dataclasses.replace(cache, store=store))
    complete = (view.q_lens > 0) & (view.kv_lens == num_tokens)
    none = jnp.zeros((len(seq_ids), 0), jnp.int32)
    state, finish = _accept(
        config, state, slot, complete, model.unembed(last), none, jnp.zeros_like(slot)
    )
    good = complete & (finish != NOT_FINITE)  # others may find the prompt from now on
    state = _end(config, state, slot, good, complete & (finish != RUNNING))
    found = jnp.zeros_like(before).at[seq_ids].set(num_found, mode="drop")
    return state, _report(state, before, 1, found)


def decode(
    config: CacheConfig,
    max_steps: int,
    draft_len: int,
    model: DecoderModel,
    state: EngineState,
    seq_ids: Array,
    num_steps: Array,
) -> tuple[EngineState, Report]:
    """Takes up to `num_steps` steps with rows that lack one token, without the host.

    Every step gives a row one token, or up to 1 + draft_len where its own text foretells them (prompt lookup).  Stops
    early when all rows have ended or a reserve fails.

    Args:
      config: the cache's config.
      max_steps: static upper bound of num_steps; the width of the report.
      draft_len: static; drafted tokens of a step, 0 for none.
      model: the model.
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
        last = jnp.take_along_axis(state.tokens[slot], state.num_tokens[slot][:, None] - 1, axis=1)
        drafts, draft_lens = _drafts(config, draft_len, state, slot)
        asked = jnp.where(live, 1 + draft_lens, 0)
        ids = jnp.where(live, slot, config.no_seq)
        cache, view = reserve(config, state.cache, ids, asked, 1 + draft_len)
        hidden, store = model(jnp.concatenate([last, drafts], axis=1), cache.store, view)
        state = dataclasses.replace(state, cache=dataclasses.replace(cache, store=store))
        live = view.q_lens > 0
        logits = model.unembed(hidden)
        state, finish = _accept(config, state, slot, live, logits, drafts, draft_lens)
        ended = live & (finish != RUNNING)
        return step + 1, _end(config, state, slot, ended & (finish != NOT_FINITE), ended)

    state = jax.lax.while_loop(goes_on, one_step, (jnp.int32(0), state))[1]
    return state, _report(state, before, max_steps * (1 + draft_len), jnp.zeros_like(before))


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
    return state, _report(state, before, 1, jnp.zeros_like(before))


def _drafts(
    config: CacheConfig, draft_len: int, state: EngineState, slot: Array
) -> tuple[Array, Array]:
    """Returns drafts i32[row, draft_len] and how many of them each row should try, i32[row]."""
    if draft_len == 0:
        return jnp.zeros((len(slot), 0), jnp.int32), jnp.zeros_like(slot)
    num_tokens = state.num_tokens[slot]
    drafts, lens = ngram_drafts(state.tokens[slot], num_tokens, draft_len)
    lens = jnp.minimum(lens, state.max_len[slot] - num_tokens - 1)
    if (
        config.is_quantised
    ):  # what is refused must not have filled a block: a sealed one cannot be cut
        lens = jnp.minimum(lens, config.block_size - 1 - (num_tokens - 1) % config.block_size)
    return drafts, jnp.maximum(lens, 0)


def _accept(
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


def _end(
    config: CacheConfig, state: EngineState, slot: Array, findable: Array, over: Array
) -> EngineState:
    """Makes the full blocks of some rows findable, then gives back those of the rows that are over (bool[row] both).

    A loop of one turn or none where nothing is to do: XLA:GPU would copy what passes through a branch.
    """
    ids = jnp.where(findable, slot, config.no_seq)
    mask = jnp.zeros(config.max_seqs, jnp.bool_)
    mask = mask.at[jnp.where(over, slot, config.no_seq)].set(True, mode="drop")

    def turn(_: Array, cache: PagedKVCache) -> PagedKVCache:
        return release(config, register(config, cache, ids, state.tokens[slot])[0], mask)

    some = jnp.any(findable | over).astype(jnp.int32)
    return dataclasses.replace(state, cache=jax.lax.fori_loop(0, some, turn, state.cache))


def _first(condition: Array) -> Array:
    """Returns i32[row]: the first place along the last axis where it holds, or the width."""
    width = condition.shape[-1]
    return jnp.where(jnp.any(condition, axis=-1), jnp.argmax(condition, axis=-1), width)


def _report(state: EngineState, before: Array, width: int, num_found: Array) -> Report:
    column = before[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    column = jnp.minimum(column, state.tokens.shape[1] - 1)
    cache = state.cache
    assert cache.reuse is not None
    return Report(
        tokens=jnp.take_along_axis(state.tokens, column, axis=1),
        logprobs=jnp.take_along_axis(state.logprobs, column, axis=1),
        num_tokens=state.num_tokens,
        kv_lens=cache.tables.kv_lens,
        finish=state.finish,
        num_found=num_found,
        bits=cache.status.bits,
        need_blocks=cache.status.need_blocks,
        num_free=cache.pool.num_free,
        num_cached=cache.reuse.num_cached,
        num_drafted=state.num_drafted,
        num_accepted=state.num_accepted,
    )
