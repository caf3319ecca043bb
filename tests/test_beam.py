"""Beam search through the cache against lists of hypotheses that know no cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_model import dense_logits, fake_model
from oracles import beam as oracle

from jaxkv import CacheConfig, StatusBit, beam_loop, check_invariants, decode_loop
from jaxkv.beam import BeamResult, BeamSearcher, beam_search
from jaxkv.cache import clear_status, release, reserve
from jaxkv.sampling import SamplingParams, sampling_state

CONFIG = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    num_blocks=22,
    max_seqs=8,
    max_blocks_per_seq=6,
)
TINY = dataclasses.replace(CONFIG, num_layers=1, num_kv_heads=1, head_dim=1, max_seqs=9)
MODEL = fake_model()
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
BEAMS, NEW, EOS = 3, 9, 17


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Bigram:
    """A model whose next token depends on the last one alone: logits f32[last, next]."""

    table: Any

    def __call__(self, tokens: Any, store: Any, view: Any) -> Any:
        """See `jaxkv.model.DecoderModel`."""
        return jax.nn.one_hot(tokens, self.table.shape[0], dtype=jnp.float32), store

    def unembed(self, hidden: Any) -> Any:
        """See `jaxkv.model.DecoderModel`; no 0 * inf."""
        return self.table[jnp.argmax(hidden, axis=-1)]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """What the oracle asks."""
        return np.asarray(self.table, np.float64)[tokens[-1]]


@functools.cache
def dense(tokens: tuple[int, ...]) -> np.ndarray:
    """Returns the fake model's logits after a text, without a cache."""
    return dense_logits(MODEL, list(tokens))[-1]  # type: ignore[no-any-return]


_reserve = jax.jit(
    lambda cache, slots: reserve(CONFIG, cache, slots, jnp.full_like(slots, 24), 24),
)
_release = jax.jit(functools.partial(release, CONFIG))


def _cleared(state: beam_loop.BeamState) -> beam_loop.BeamState:
    run = dataclasses.replace(state.run, cache=clear_status(state.run.cache))
    return dataclasses.replace(state, run=run)


def _without_status(state: beam_loop.BeamState) -> list[Any]:
    """Returns all leaves but the status and the keys, which are no numbers."""
    run = dataclasses.replace(state.run, sampling=None)
    return jax.tree.leaves(_cleared(dataclasses.replace(state, run=run)))


_programs: dict[Any, dict[Any, Any]] = {}


def searcher(config: CacheConfig, model: Any, eos: Sequence[int] = (), **options: Any) -> Any:
    """Returns a searcher that shares its compiled programs with all tests, and checks the cache at every look."""
    options = {"prefill_chunk": 8, "observe": functools.partial(check_invariants, config)} | options
    made = BeamSearcher(model, config, eos_token_ids=eos, **options)
    made._programs = _programs.setdefault((config, jax.tree.structure(model)), {})
    return made


def check(
    result: BeamResult, expected: Sequence[Sequence[oracle.Scored]], atol: float = 2e-4
) -> None:
    """Asserts that every prompt has the oracle's hypotheses, in its order."""
    for mine, theirs in zip(result.hypotheses, expected, strict=True):
        assert [h.tokens for h in mine] == [tokens for _, tokens in theirs]
        np.testing.assert_allclose([h.score for h in mine], [s for s, _ in theirs], atol=atol)
        assert [h.sample_index for h in mine] == list(range(len(theirs)))


@pytest.mark.parametrize("steps", [1, 4])
def test_beam_search_over_a_model_matches_the_oracle(steps: int) -> None:
    """Two prompts of different lengths, end tokens, four length penalties; copies to the block; nothing stays behind."""
    run = searcher(CONFIG, MODEL, [EOS], steps_per_dispatch=steps)
    for length_penalty in (1.0, 0.0, -1.0, 2.5) if steps == 4 else (1.0,):
        found = [
            oracle.beam_search(
                lambda tokens: dense(tuple(tokens)), prompt, BEAMS, NEW, [EOS], length_penalty
            )
            for prompt in PROMPTS
        ]
        got = run.search(
            PROMPTS, num_beams=BEAMS, max_new_tokens=NEW, length_penalty=length_penalty,
            num_return=BEAMS,
        )  # fmt: skip
        check(got, [finished for finished, _ in found])
        reasons = {h.finish_reason for hs in got.hypotheses for h in hs}
        assert reasons <= {"stop", "length"}
        assert all((h.finish_reason == "stop") == (h.tokens[-1] == EOS) for h in got.hypotheses[0])
        copies = [
            oracle.expected_copies(len(prompt), CONFIG.block_size, history)
            for prompt, (_, history) in zip(PROMPTS, found, strict=True)
        ]
        assert got.copied_blocks == sum(copies) <= len(PROMPTS) * (BEAMS - 1) * got.num_steps
        assert got.copied_bytes == got.copied_blocks * CONFIG.layout.nbytes // CONFIG.num_blocks
        assert sum(copies) > 3
        assert run.stats.used_blocks == 0
    assert len(run._programs) == 3, "prefill, start and steps are traced once each"


def test_beam_search_hypotheses_do_not_depend_on_the_other_prompts() -> None:
    run = searcher(CONFIG, MODEL, [EOS])
    how = {"num_beams": BEAMS, "max_new_tokens": NEW, "num_return": BEAMS}
    together = run.search(PROMPTS, **how)
    other = run.search([PROMPTS[1], [8, 8]], **how)
    assert [h.tokens for h in other.hypotheses[0]] == [h.tokens for h in together.hypotheses[1]]


def test_beam_search_over_random_tables_matches_the_oracle() -> None:
    """Field cases D5, D6, D7: end tokens at every place, both signs of the length penalty, all rules of stopping."""
    rng = np.random.default_rng(5)
    ends, ruled = set(), set()
    for length_penalty in (-1.0, 0.0, 0.7, 1.0, 1.0, 1.0, 2.0, 4.0):
        model = Bigram(jnp.asarray(2 * rng.normal(size=(6, 6)), jnp.float32))
        prompts = [[int(rng.integers(6))], [1, int(rng.integers(6))]]
        run = searcher(TINY, model, (2, 4))
        for early_stopping in (False, True, "never"):
            how = length_penalty, early_stopping
            got = run.search(
                prompts, num_beams=4, max_new_tokens=7, length_penalty=length_penalty,
                early_stopping=early_stopping, num_return=4,
            )  # fmt: skip
            found = [
                oracle.beam_search(model.logits, prompt, 4, 7, (2, 4), *how)[0]
                for prompt in prompts
            ]
            check(got, found)
            ends |= {len(h.tokens) for hs in got.hypotheses for h in hs}
            ruled.add((length_penalty, got.num_steps, str(found)))
    assert len(ends) >= 4
    assert len(ruled) >= 12, "the rules of stopping hardly ever differ"


def test_beam_oracle_wide_enough_finds_the_best_of_all() -> None:
    """9 beams hold every prefix of two tokens out of three: the oracle gives the exact order of all 27 texts."""
    model = Bigram(np.random.default_rng(2).normal(size=(3, 3)))
    found, _ = oracle.beam_search(model.logits, [1], 9, 3, (), 0.0)
    best = oracle.best_of_all(model.logits, [1], 3, 3, 9)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in best]


def test_beam_search_when_everything_ends_stops_cleanly() -> None:
    """Field case D6: no candidate but end tokens, at the first step and later; fewer hypotheses than beams."""
    table = np.full((6, 6), -np.inf)
    table[0, [1, 3]] = [0.0, 1.0]  # from 0 to 1 or 3
    table[1:, 4] = 0.0  # from anything else only to 4, which ends
    run = searcher(TINY, Bigram(jnp.asarray(table, jnp.float32)), (2, 4))
    got = run.search([[1], [0]], num_beams=4, max_new_tokens=7, num_return=4)
    assert [[h.tokens for h in hs] for hs in got.hypotheses] == [[[4]], [[3, 4], [1, 4]]]
    assert got.num_steps == 2
    assert run.stats.used_blocks == 0


def test_beam_search_out_of_blocks_loses_nothing() -> None:
    """Two idle sequences hog the pool: the search stops as it was, and goes on when they are gone."""
    run = searcher(CONFIG, MODEL, [EOS])
    whole = run.search(PROMPTS, num_beams=BEAMS, max_new_tokens=NEW, num_return=BEAMS)
    rows = CONFIG.max_seqs
    state = decode_loop.init_state(
        CONFIG, MODEL, sampling_state([SamplingParams()] * rows, [0] * rows),
        jnp.full(rows, NEW, jnp.int32), jnp.array([EOS], jnp.int32), NEW,
    )  # fmt: skip
    state = run._prefill(state, PROMPTS, BEAMS)
    hogs = jnp.array([6, 7], jnp.int32)
    hogged, _ = _reserve(state.cache, hogs)
    beams = beam_loop.init_beams(
        dataclasses.replace(state, cache=hogged), 2, BEAMS, 1.0, early_stopping=False
    )
    many = jnp.int32(50)
    stopped = run._timed(
        "decode_s", beam_loop.steps, run._timed("decode_s", beam_loop.start, beams), many
    )
    assert int(stopped.run.cache.status.bits) == StatusBit.OUT_OF_BLOCKS
    check_invariants(CONFIG, stopped.run.cache)
    for hypothesis in run._result(stopped, BEAMS).hypotheses[0]:
        assert hypothesis.finish_reason == "out_of_blocks" or hypothesis.tokens[-1] == EOS
        texts = [*PROMPTS[0], *hypothesis.tokens]
        logps = [
            oracle.log_softmax(dense(tuple(texts[:at])))[texts[at]]
            for at in range(len(PROMPTS[0]), len(texts))
        ]
        assert hypothesis.score == pytest.approx(np.mean(logps), abs=2e-4)

    before = jax.tree.map(np.asarray, _without_status(stopped))
    again = run._timed("decode_s", beam_loop.steps, _cleared(stopped), many)
    assert int(again.run.cache.status.bits) == StatusBit.OUT_OF_BLOCKS
    jax.tree.map(np.testing.assert_array_equal, before, _without_status(again))
    cache = _release(again.run.cache, jnp.arange(rows) >= 6)
    again = _cleared(dataclasses.replace(again, run=dataclasses.replace(again.run, cache=cache)))
    done = run._result(run._timed("decode_s", beam_loop.steps, again, many), BEAMS)
    assert done == whole


def test_beam_search_int8_beams_share_open_blocks() -> None:
    """A hypothesis is rated as if its text had run alone; copies are of open blocks, sealed ones move nothing."""
    config = dataclasses.replace(CONFIG, format="int8", open_format="float32")
    run = searcher(config, MODEL, [EOS], prefill_chunk=1)
    got = run.search(PROMPTS[:1], num_beams=BEAMS, max_new_tokens=NEW, num_return=BEAMS)
    assert 0 < got.copied_blocks <= (BEAMS - 1) * got.num_steps
    assert got.copied_bytes == got.copied_blocks * config.layout.open.nbytes // config.max_seqs
    rows = config.max_seqs
    texts = [[*PROMPTS[0], *h.tokens] for h in got.hypotheses[0]]
    state = decode_loop.init_state(
        config, MODEL, sampling_state([SamplingParams()] * rows, [0] * rows),
        jnp.full(rows, NEW, jnp.int32), jnp.array([EOS], jnp.int32), NEW,
    )  # fmt: skip
    scores = np.zeros(BEAMS)
    for at in range(max(map(len, texts))):
        tokens, q_lens = np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32)
        if at >= len(PROMPTS[0]):
            logps = np.asarray(jax.nn.log_softmax(MODEL.unembed(state.last_hidden)))
            scores += [
                logps[row, text[at]] if at < len(text) else 0 for row, text in enumerate(texts)
            ]
        for row, text in enumerate(texts):
            if at < len(text):
                tokens[row, 0], q_lens[row] = text[at], 1
        state = run._timed(
            "decode_s", decode_loop.prefill, state, jnp.asarray(tokens), jnp.asarray(q_lens)
        )
    lengths = [len(h.tokens) for h in got.hypotheses[0]]
    want = [h.score for h in got.hypotheses[0]]
    np.testing.assert_allclose(scores / lengths, want, atol=1e-4)


@pytest.mark.exhaustive
def test_beam_search_one_beam_is_greedy() -> None:
    got = searcher(CONFIG, MODEL).search(PROMPTS[:1], num_beams=1, max_new_tokens=4)
    tokens = list(PROMPTS[0])
    for _ in range(4):
        tokens.append(int(np.argmax(dense(tuple(tokens)))))
    assert got.hypotheses[0][0].tokens == tokens[-4:]
    assert got.copied_blocks == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_beams": 0}, "num_beams: expected at least 1, got 0"),
        ({"num_return": 4}, "num_return: expected 1 to the 3 of num_beams, got 4"),
        ({"length_penalty": float("nan")}, "length_penalty: expected a finite number, got nan"),
        ({"early_stopping": "soon"}, "early_stopping: expected False, True or 'never', got 'soon'"),
        ({"prompts": [[]]}, r"prompts\[0\]: expected at least one token"),
    ],
)
def test_beam_search_bad_arguments_raise(change: dict[str, Any], message: str) -> None:
    arguments = {"prompts": [[1]], "num_beams": 3, "max_new_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        beam_search(MODEL, CONFIG, **arguments)


def test_beam_search_logits_that_are_not_finite_raise() -> None:
    model = Bigram(jnp.full((6, 6), jnp.nan))
    with pytest.raises(FloatingPointError, match="prompt 0, token 0: the model's logits are not"):
        searcher(TINY, model, (2, 4)).search([[1], [2]], num_beams=4, max_new_tokens=7)
