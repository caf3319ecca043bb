"""Beam search on the device: choose continuations, permute the beams' slots, run one token of each; pure functions.

Slots are beams: beam b of prompt p is slot p * num_beams + b.  One step, for all prompts together::

    scores[prompt, beam] + log_softmax(logits)[.., vocab]  --top k-->  candidates (score, parent, token)
    candidates that end, among the best num_beams   -> finished hypotheses, if better than those there
    the best num_beams that do not end              -> the next beams: `reorder` to their parents, feed their tokens

A score is a sum of log-probabilities; a finished hypothesis of n tokens (its end token counts) has score / n ** length_penalty.

Invariants:
  * A beam that does not exist has score -inf: it holds no blocks, is never written and never chosen.
  * A prompt that is done holds no blocks; what happens to the others does not change its hypotheses.
  * No K/V byte moves but for copy-on-write: of k beams with one parent k - 1 copy its open block, and only if it is not full.
  * When a reserve fails the loop stops with the state of the step before: nothing is lost.

References: transformers `GenerationMixin._beam_search` (same candidates, same stopping rules).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache import reserve
from jaxkv.config import CacheConfig
from jaxkv.copy_on_write import count_copies
from jaxkv.decode_loop import NO_TOKEN, DecodeState
from jaxkv.model import DecoderModel
from jaxkv.permute import reorder

Array = jax.Array
EarlyStopping = bool | str


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "run", "scores", "tokens", "finished_scores", "finished_tokens", "active", "num_steps",
        "length_penalty", "stops_when_full", "looks_ahead", "num_copies",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class BeamState:
    """Everything a search carries from dispatch to dispatch.

    Attributes:
      run: cache, last tokens and hidden states of the slots, end tokens.
      scores: f32[prompt, beam], best first; -inf where there is no beam.
      tokens: i32[prompt, beam, max_new], NO_TOKEN beyond num_steps.
      finished_scores: f32[prompt, beam], best first, length penalty applied; -inf where there is none.
      finished_tokens: i32[prompt, beam, max_new], NO_TOKEN beyond the end.
      active: bool[prompt], False where the search is over.
      num_steps: i32[], tokens chosen so far.
      length_penalty: f32[], above 0 favours long hypotheses.
      stops_when_full, looks_ahead: bool[], the rule of stopping; neither, or one of them (see `jaxkv.beam.beam_search`).
      num_copies: i32[2], blocks of the pool and open blocks that copy-on-write has copied while beams were decoded.
    """

    run: DecodeState
    scores: Array
    tokens: Array
    finished_scores: Array
    finished_tokens: Array
    active: Array
    num_steps: Array
    length_penalty: Array
    stops_when_full: Array
    looks_ahead: Array
    num_copies: Array


def init_beams(
    run: DecodeState,
    num_prompts: int,
    num_beams: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> BeamState:
    """Returns a search in which every prompt has one beam, the prompt itself in its first slot.

    Args:
      run: with the prompts prefilled, prompt p in slot p * num_beams; a token buffer of max_new columns.
      num_prompts, num_beams: num_prompts * num_beams slots are used.
      length_penalty, early_stopping: see `jaxkv.beam.beam_search`.
    """
    shape = num_prompts, num_beams
    first = jnp.arange(num_beams)[None, :] == 0
    none = jnp.full((*shape, run.tokens.shape[1]), NO_TOKEN, jnp.int32)
    return BeamState(
        run=run,
        scores=jnp.broadcast_to(jnp.where(first, 0.0, -jnp.inf), shape),
        tokens=none,
        finished_scores=jnp.full(shape, -jnp.inf, jnp.float32),
        finished_tokens=jnp.copy(none),  # one array in two leaves could not be donated
        active=jnp.ones(num_prompts, jnp.bool_),
        num_steps=jnp.int32(0),
        length_penalty=jnp.float32(length_penalty),
        stops_when_full=jnp.bool_(early_stopping is True),
        looks_ahead=jnp.bool_(early_stopping == "never"),
        num_copies=jnp.zeros(2, jnp.int32),
    )


def start(config: CacheConfig, model: DecoderModel, state: BeamState) -> BeamState:
    """Chooses the first token of every beam from the prompts' last hidden states.  DONATES under the caller's jit."""
    logits = model.unembed(state.run.last_hidden)
    return _advance(config, state, logits, jnp.bool_(True))


def steps(
    config: CacheConfig, model: DecoderModel, state: BeamState, num_steps: Array
) -> BeamState:
    """Runs up to `num_steps` (i32[], traced) steps in one dispatch, without the host.

    Stops early when every prompt is done, when logits are not finite, or when a reserve fails (the cache's status says so).

    Args:
      config: the cache's config.
      model: the model.
      state: after `start`.  DONATES under the caller's jit.
      num_steps: i32[].
    """
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)

    def goes_on(carry: tuple[Array, BeamState]) -> Array:
        step, state = carry
        fine = (state.run.cache.status.bits == 0) & ~jnp.any(state.run.not_finite)
        return (step < num_steps) & jnp.any(state.active) & fine

    def one_step(carry: tuple[Array, BeamState]) -> tuple[Array, BeamState]:
        step, state = carry
        run = state.run
        alive = state.active[:, None] & (state.scores > -jnp.inf)
        asked = _of_slots(config, alive.astype(jnp.int32), 0)
        before = run.cache
        cache, view = reserve(config, before, rows, asked, 1)
        copies = count_copies(config, before, cache, asked)
        hidden, store = model(run.last_token[:, None], cache.store, view)
        used = config.num_blocks - cache.pool.num_free
        run = dataclasses.replace(
            run,
            cache=dataclasses.replace(cache, store=store),
            peak_blocks=jnp.maximum(run.peak_blocks, used),
        )
        state = dataclasses.replace(state, run=run, num_copies=state.num_copies + copies)
        served = cache.status.bits == 0
        return step + 1, _advance(config, state, model.unembed(hidden[:, 0]), served)

    return jax.lax.while_loop(goes_on, one_step, (jnp.int32(0), state))[1]


class _Candidates(NamedTuple):
    """The best continuations of each prompt, best first; [prompt, k] each.

    Attributes:
      scores: f32, -inf where there are fewer.
      parents: i32, the beam it continues.
      tokens: i32.
      ends: bool, an end token, or the last token there is room for.
    """

    scores: Array
    parents: Array
    tokens: Array
    ends: Array


def _advance(config: CacheConfig, state: BeamState, logits: Array, served: Array) -> BeamState:
    """Chooses one more token of every beam and gives the beams their parents' slots.

    Args:
      config: the cache's config.
      state: the state; `num_steps` tokens are chosen.
      logits: f32[slot, vocab].
      served: bool[], False if the step's reserve failed: then nothing changes.
    """
    num_prompts, num_beams = state.scores.shape
    logits = logits[: num_prompts * num_beams].reshape(num_prompts, num_beams, -1)
    finite = jnp.all(~jnp.isnan(logits), axis=-1) & jnp.any(jnp.isfinite(logits), axis=-1)
    broken = state.active[:, None] & (state.scores > -jnp.inf) & ~finite & served
    going = state.active & served & ~jnp.any(broken)
    found = _best_continuations(state, logits.astype(jnp.float32))
    scores, tokens, parents, chosen = _next_beams(state, found)
    finished_scores, finished_tokens = _finish(state, found)
    active = _may_improve(state, found, scores, finished_scores)
    keeps = active[:, None] & (scores > -jnp.inf)
    source = _sources(config, jnp.where(keeps, parents, num_beams), going)

    def kept(new: Array, old: Array) -> Array:
        return jnp.where(going.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    last = _of_slots(config, kept(chosen, _of_beams(state, state.run.last_token)), 0)
    run = dataclasses.replace(
        state.run,
        cache=reorder(config, state.run.cache, source),
        last_token=last,
        not_finite=state.run.not_finite | _of_slots(config, broken, False),
    )
    return dataclasses.replace(
        state,
        run=run,
        scores=kept(scores, state.scores),
        tokens=kept(tokens, state.tokens),
        finished_scores=kept(finished_scores, state.finished_scores),
        finished_tokens=kept(finished_tokens, state.finished_tokens),
        active=kept(active, state.active),
        num_steps=state.num_steps + jnp.any(going),
    )


def _sources(config: CacheConfig, parents: Array, going: Array) -> Array:
    """Returns i32[slot], whose sequence every slot takes over, for `reorder`.

    Args:
      config: the cache's config.
      parents: i32[prompt, beam], num_beams for a beam that does not exist any more.
      going: bool[prompt]; the slots of other prompts, and those that are no beams, keep what they hold.
    """
    num_prompts, num_beams = parents.shape
    first = jnp.arange(num_prompts, dtype=jnp.int32)[:, None] * num_beams
    source = jnp.where(parents < num_beams, first + parents, config.no_seq)
    own = jnp.arange(config.max_seqs, dtype=jnp.int32)
    source = jnp.where(going[:, None], source, first + jnp.arange(num_beams, dtype=jnp.int32)[None])
    return own.at[: source.size].set(source.reshape(-1))


def _best_continuations(state: BeamState, logits: Array) -> _Candidates:
    """Returns the best continuations: enough of them that num_beams do not end, whatever the end tokens take.

    Args:
      state: the state.
      logits: f32[prompt, beam, vocab].
    """
    num_prompts, num_beams, vocab = logits.shape
    eos = state.run.eos_ids
    count = min(max(2, 1 + eos.shape[0]) * num_beams, num_beams * vocab)
    exists = (state.scores > -jnp.inf)[..., None]
    total = state.scores[..., None] + jax.nn.log_softmax(logits, axis=-1)
    total = jnp.where(exists, total, -jnp.inf)
    scores, place = jax.lax.top_k(total.reshape(num_prompts, -1), count)
    tokens = (place % vocab).astype(jnp.int32)
    is_last = state.num_steps + 1 >= state.tokens.shape[2]
    ends = jnp.any(tokens[..., None] == eos[None, None, :], axis=-1) | is_last
    return _Candidates(scores, (place // vocab).astype(jnp.int32), tokens, ends)


def _next_beams(state: BeamState, found: _Candidates) -> tuple[Array, Array, Array, Array]:
    """Returns the best candidates that do not end: scores, token buffers, parents and last tokens of the beams."""
    num_beams = state.scores.shape[1]
    scores, pick = jax.lax.top_k(jnp.where(found.ends, -jnp.inf, found.scores), num_beams)
    parents, chosen = (jnp.take_along_axis(x, pick, axis=1) for x in (found.parents, found.tokens))
    return scores, _continued(state, parents, chosen), parents, chosen


def _finish(state: BeamState, found: _Candidates) -> tuple[Array, Array]:
    """Returns scores and tokens of the best finished hypotheses, those of this step among them.

    Only a candidate among the best num_beams of its prompt finishes: one behind them would not have been a beam.
    """
    num_beams = state.scores.shape[1]
    scores, parents, tokens, ends = (x[:, :num_beams] for x in found)
    scores = scores / _penalty(state, state.num_steps + 1)
    closed = _is_full(state.finished_scores) & state.stops_when_full
    scores = jnp.where(ends & ~closed[:, None], scores, -jnp.inf)
    scores = jnp.concatenate([state.finished_scores, scores], axis=1)
    buffers = jnp.concatenate([state.finished_tokens, _continued(state, parents, tokens)], axis=1)
    best, pick = jax.lax.top_k(scores, num_beams)
    return best, jnp.take_along_axis(buffers, pick[..., None], axis=1)


def _may_improve(
    state: BeamState, found: _Candidates, scores: Array, finished_scores: Array
) -> Array:
    """Returns bool[prompt]: whether the search goes on after this step."""
    ahead = state.looks_ahead & (state.length_penalty > 0)
    length = jnp.where(ahead, state.tokens.shape[2], state.num_steps + 1)
    reachable = scores[:, 0] / _penalty(state, length)
    full = _is_full(finished_scores)
    better = (reachable > jnp.min(finished_scores, axis=1)) & ~state.stops_when_full
    goes_on = jnp.any(~found.ends & (found.scores > -jnp.inf), axis=1)
    return state.active & (~full | better) & goes_on


def _is_full(finished_scores: Array) -> Array:
    """Returns bool[prompt]: as many hypotheses are finished as there are beams."""
    return jnp.all(finished_scores > -jnp.inf, axis=1)


def _penalty(state: BeamState, length: Array) -> Array:
    """Returns f32[], what the score of a hypothesis of that many tokens is divided by."""
    return length.astype(jnp.float32) ** state.length_penalty


def _continued(state: BeamState, parents: Array, tokens: Array) -> Array:
    """Returns i32[prompt, n, max_new], the parents' tokens and one more; parents and tokens are i32[prompt, n]."""
    buffers = jnp.take_along_axis(state.tokens, parents[..., None], axis=1)
    column = jnp.arange(buffers.shape[2])[None, None, :]
    return jnp.where(column == state.num_steps, tokens[..., None], buffers)


def _of_beams(state: BeamState, x: Array) -> Array:
    """Returns [prompt, beam] of [slot]; inverse of `_of_slots`."""
    return x[: state.scores.size].reshape(state.scores.shape)


def _of_slots(config: CacheConfig, x: Array, fill: Array | int | bool) -> Array:
    """Returns [slot] for [prompt, beam]; slots that are no beams hold `fill`."""
    return jnp.full(config.max_seqs, fill, x.dtype).at[: x.size].set(x.reshape(-1))
