"""What the engine keeps on the device, what it is given for a request, and what it tells after a dispatch.

Invariants:
  * Rows are slots of the cache.  A slot runs while num_tokens > 0 and `finish` is RUNNING.
  * Whatever the host learns is in a `Report`, fetched at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import PagedKVCache, init_cache
from jaxkv.config import CacheConfig
from jaxkv.draft_model import DraftModel, with_draft_store
from jaxkv.eviction import Policy
from jaxkv.namespace import NUM_WORDS
from jaxkv.sampling import SamplingState, row_key
from jaxkv.sharing import with_prefix_reuse

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


def init_engine_state(
    config: CacheConfig, policy: Policy, num_stop_ids: int, draft: DraftModel | None = None
) -> EngineState:
    """Returns a state without requests; a request may have up to `num_stop_ids` end tokens."""
    rows, width = config.max_seqs, config.max_seq_len
    zeros = functools.partial(jnp.zeros, rows)
    seeds = jnp.zeros(rows, jnp.uint32)
    return EngineState(
        cache=with_draft_store(
            config, with_prefix_reuse(config, init_cache(config), policy), draft
        ),
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


def report_of(state: EngineState, before: Array, width: int, num_found: Array) -> Report:
    """Returns the report of a dispatch.

    Args:
      state: after the dispatch.
      before: i32[seq], num_tokens before it.
      width: static; new tokens of a slot at most.
      num_found: i32[seq], see `Report`.
    """
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
