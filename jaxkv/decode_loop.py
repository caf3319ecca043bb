"""The generation loop on the device: prefill a chunk, start, decode many steps, all as pure functions.

Invariants:
  * Rows of the state are the slots of the cache: row r generates slot r.
  * A row that is done holds no blocks; its last step released them on the device.
  * When a reserve fails the loop stops with the state of the step before: nothing is lost.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxkv.cache import PagedKVCache, fork, init_cache, release, reserve
from jaxkv.config import CacheConfig
from jaxkv.mesh import device_config, mesh_of, spmd
from jaxkv.model import DecoderModel
from jaxkv.sampling import SamplingState, sample

Array = jax.Array

NO_TOKEN = -1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache", "sampling", "last_hidden", "last_token", "tokens", "num_tokens", "max_tokens",
        "eos_ids", "done", "not_finite", "peak_blocks",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a run carries from dispatch to dispatch.

    Attributes:
      cache: the paged cache.
      sampling: parameters and keys of the rows.
      last_hidden: float[seq, hidden], hidden state of each row's last prefilled token.
      last_token: i32[seq], the token each row feeds next.
      tokens: i32[seq, max_new], what each row has generated; NO_TOKEN beyond.
      num_tokens: i32[seq].
      max_tokens: i32[seq], where each row stops; 0 marks a row nobody uses.
      eos_ids: i32[num_eos], tokens that end a row.
      done: bool[seq].
      not_finite: bool[seq], the row stopped because its logits held NaN or no finite value.
      peak_blocks: i32[], most blocks in use at any step.
    """

    cache: PagedKVCache
    sampling: SamplingState
    last_hidden: Array
    last_token: Array
    tokens: Array
    num_tokens: Array
    max_tokens: Array
    eos_ids: Array
    done: Array
    not_finite: Array
    peak_blocks: Array


def init_state(
    config: CacheConfig,
    model: DecoderModel,
    sampling: SamplingState,
    max_tokens: Array,
    eos_ids: Array,
    max_new: int,
) -> DecodeState:
    """Returns a state with an empty cache.

    Args:
      config: the cache's config; its max_seqs is the number of rows.
      model: the model; only shapes are taken from it.
      sampling: one entry per row.
      max_tokens: i32[seq], 0 for rows nobody uses.
      eos_ids: i32[num_eos].
      max_new: static width of the token buffer.
    """
    rows = config.max_seqs
    hidden = jax.eval_shape(functools.partial(_hidden_of_one_token, config), model)
    return DecodeState(
        cache=init_cache(config),
        sampling=sampling,
        last_hidden=jnp.zeros((rows, hidden.shape[-1]), hidden.dtype),
        last_token=jnp.zeros(rows, jnp.int32),
        tokens=jnp.full((rows, max_new), NO_TOKEN, jnp.int32),
        num_tokens=jnp.zeros(rows, jnp.int32),
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        done=max_tokens == 0,
        not_finite=jnp.zeros(rows, jnp.bool_),
        peak_blocks=jnp.int32(0),
    )


def _hidden_of_one_token(config: CacheConfig, model: DecoderModel) -> Array:
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)
    cache, view = reserve(config, init_cache(config), rows, jnp.zeros_like(rows), 1)
    return model(jnp.zeros((config.max_seqs, 1), jnp.int32), cache.store, view)[0]


def vocab_size(config: CacheConfig, model: DecoderModel) -> int:
    """Returns the width of the model's logits, from shapes alone; a host function."""
    mesh = mesh_of(model)

    def logits(model: DecoderModel) -> Array:
        return model.unembed(_hidden_of_one_token(device_config(config, mesh), model))

    return jax.eval_shape(spmd(logits, mesh, (model,), PartitionSpec()), model).shape[-1]


def prefill(
    config: CacheConfig, model: DecoderModel, state: DecodeState, tokens: Array, q_lens: Array
) -> DecodeState:
    """Runs the next chunk of each row's prompt.

    Args:
      config: the cache's config.
      model: the model.
      state: DONATES under the caller's jit.
      tokens: i32[seq, chunk], padded with any valid id.
      q_lens: i32[seq], prompt tokens of each row in this chunk; 0 leaves the row alone.
    """
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)
    cache, view = reserve(config, state.cache, rows, q_lens, tokens.shape[1])
    hidden, store = model(tokens, cache.store, view)
    last = jnp.take_along_axis(hidden, jnp.maximum(view.q_lens - 1, 0)[:, None, None], axis=1)[:, 0]
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, store=store),
        last_hidden=jnp.where((view.q_lens > 0)[:, None], last, state.last_hidden),
        peak_blocks=_peak(config, state, cache),
    )


def start(
    config: CacheConfig, model: DecoderModel, state: DecodeState, source: Array
) -> DecodeState:
    """Shares each prompt with the rows that sample from it, and chooses every row's first token.

    Args:
      config: the cache's config.
      model: the model.
      state: DONATES under the caller's jit.
      source: i32[seq], the row whose prompt the row continues (its own index where it prefilled itself).
    """
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)
    copies = (source != rows) & ~state.done
    cache = fork(config, state.cache, source, jnp.where(copies, rows, config.no_seq))
    state = dataclasses.replace(state, cache=cache, last_hidden=state.last_hidden[source])
    return _accept(config, state, model.unembed(state.last_hidden), ~state.done)


def decode(
    config: CacheConfig, model: DecoderModel, state: DecodeState, num_steps: Array
) -> DecodeState:
    """Generates up to `num_steps` tokens per row in one dispatch, without the host.

    Stops early when every row is done, or when a reserve fails (the cache's status says so).

    Args:
      config: the cache's config.
      model: the model.
      state: DONATES under the caller's jit.
      num_steps: i32[]; traced, so that one compile serves every K.
    """
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)

    def goes_on(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        return (step < num_steps) & ~jnp.all(state.done) & (state.cache.status.bits == 0)

    def one_step(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        asked = jnp.where(state.done, 0, 1).astype(jnp.int32)
        cache, view = reserve(config, state.cache, rows, asked, 1)
        hidden, store = model(state.last_token[:, None], cache.store, view)
        peak = _peak(config, state, cache)
        state = dataclasses.replace(
            state, cache=dataclasses.replace(cache, store=store), peak_blocks=peak
        )
        return step + 1, _accept(config, state, model.unembed(hidden[:, 0]), view.q_lens > 0)

    return jax.lax.while_loop(goes_on, one_step, (jnp.int32(0), state))[1]


def _accept(config: CacheConfig, state: DecodeState, logits: Array, running: Array) -> DecodeState:
    """Chooses the next token of each running row, records it, and releases the rows that end."""
    finite = jnp.all(~jnp.isnan(logits), axis=-1) & jnp.any(jnp.isfinite(logits), axis=-1)
    chosen = sample(state.sampling, logits, state.num_tokens)
    broken = running & ~finite
    accepted = running & finite
    width = state.tokens.shape[1]
    column = jnp.where(accepted, state.num_tokens, width)
    row = jnp.arange(config.max_seqs, dtype=jnp.int32)
    num_tokens = state.num_tokens + accepted
    is_eos = jnp.any(chosen[:, None] == state.eos_ids[None, :], axis=-1)
    ended = broken | (accepted & (is_eos | (num_tokens >= state.max_tokens)))
    return dataclasses.replace(
        state,
        cache=release(config, state.cache, ended),
        last_token=jnp.where(accepted, chosen, state.last_token),
        tokens=state.tokens.at[row, column].set(chosen, mode="drop"),
        num_tokens=num_tokens,
        done=state.done | ended,
        not_finite=state.not_finite | broken,
    )


def _peak(config: CacheConfig, state: DecodeState, cache: PagedKVCache) -> Array:
    return jnp.maximum(state.peak_blocks, config.num_blocks - cache.pool.num_free)
