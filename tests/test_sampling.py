"""Choosing tokens: which ones may be drawn, how often they are, and on what a draw depends."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from jaxkv.sampling import SamplingParams, SamplingState, sample, sampling_state

VOCAB = 8
DRAWS = 4096
_sample = jax.jit(sample)
_many_keys = sampling_state([SamplingParams(seed=7)] * DRAWS, list(range(DRAWS)))


def draw(params: SamplingParams, logits: Any, token_index: int = 0) -> np.ndarray:
    """Returns DRAWS tokens for the same logits, each drawn with a key of its own."""
    state = SamplingState(
        temperature=jnp.full(DRAWS, params.temperature, jnp.float32),
        top_k=jnp.full(DRAWS, params.top_k, jnp.int32),
        top_p=jnp.full(DRAWS, params.top_p, jnp.float32),
        min_p=jnp.full(DRAWS, params.min_p, jnp.float32),
        key=_many_keys.key,
    )
    rows = np.broadcast_to(np.asarray(logits, np.float32), (DRAWS, len(logits)))
    return np.asarray(_sample(state, rows, np.full(DRAWS, token_index, np.int32)))


def probabilities(params: SamplingParams, logits: Any) -> tuple[np.ndarray, float]:
    """Returns the distribution by the definition, in float64, and how close top-p came to its edge.

    Temperature, then the k most likely, then the smallest head of those that reaches top_p, then what is
    at least min_p times as likely as the best; whatever ties with the last one kept is kept as well.
    """
    scaled = np.asarray(np.float32(logits), np.float64) / params.temperature
    head = sorted(scaled, reverse=True)[: params.top_k or None]
    weights = np.exp(np.array(head) - head[0])
    weights /= weights.sum()
    total, margin = 0.0, math.inf
    num_kept = 0
    while num_kept < len(head) and (params.top_p == 1 or total < params.top_p):
        total += weights[num_kept]
        num_kept += 1
        if params.top_p < 1:
            margin = min(margin, abs(total - params.top_p))
    kept = scaled >= head[num_kept - 1]
    if params.min_p > 0:
        kept &= scaled >= head[0] + math.log(params.min_p)
    result = np.where(kept, np.exp(scaled - head[0]), 0)
    return result / result.sum(), margin


def check_distribution(params: SamplingParams, logits: Any) -> None:
    """Asserts that DRAWS draws come from the defined distribution (chi-square, one in a million)."""
    want, _ = probabilities(params, logits)
    seen = np.bincount(draw(params, logits), minlength=len(want))
    assert not np.any(seen[want == 0]), "a token outside the kept set was drawn"
    expected = want * DRAWS
    rare = expected < 5
    groups = [(seen[~rare], expected[~rare])]
    if expected[rare].sum() > 0:
        groups.append((seen[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    observed, expected = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    statistic = np.sum((observed - expected) ** 2 / expected)
    assert statistic < stats.chi2.isf(1e-6, max(1, len(expected) - 1))


LOGITS = [1.0, 0.0, 2.0, -1.0, 2.5, 0.5, -3.0, 1.5]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_k=VOCAB),
        SamplingParams(temperature=1.0, top_k=10 * VOCAB),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=1.0, top_p=1e-30),
        SamplingParams(temperature=1.0, top_p=0.999999),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, min_p=1e-30),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1),
    ],
    ids=repr,
)
def test_sample_many_keys_follow_the_defined_distribution(params: SamplingParams) -> None:
    check_distribution(params, LOGITS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=1.0),
    ],
    ids=repr,
)
def test_sample_ties_at_the_edge_are_all_kept(params: SamplingParams) -> None:
    check_distribution(params, [2.0, 1.0, 2.0, 0.0, 2.0, 0.0, 1.0, 1.0])


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    logits=st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.35, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_sample_random_parameters_follow_the_defined_distribution(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = [x / 4 for x in logits]
    assume(
        probabilities(params, logits)[1] > 1e-4
    )  # float32 may decide a tie with top_p either way
    check_distribution(params, logits)


def test_sample_greedy_takes_the_first_of_the_best() -> None:
    assert set(draw(SamplingParams(), [1.0, 3.0, -1.0, 3.0])) == {1}


@pytest.mark.parametrize("place", [0, 1, 4])
def test_sample_greedy_of_a_row_with_nan_stays_in_the_vocabulary(place: int) -> None:
    """The loop refuses such a row; until then its token must be one.  One row: in many XLA:CPU's maximum may skip the NaN."""
    logits = np.array([[1.0, 2.0, 0.0, -1.0, 2.0]], np.float32)
    logits[0, place] = math.nan
    state = sampling_state([SamplingParams()], [0])
    assert int(_sample(state, logits, np.zeros(1, np.int32))[0]) in range(5)
    assert set(draw(SamplingParams(), [0.0, 1.0, math.inf])) == {2}
    assert set(draw(SamplingParams(), [-math.inf] * 3 + [-2.0])) == {3}


def test_sample_minus_infinity_is_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0]
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1e30),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.99),
    ):
        assert set(draw(params, logits)) == {1, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 2e-38, 1e-42])
def test_sample_tiny_temperature_is_greedy(temperature: float) -> None:
    """Scores over a tiny temperature overflow; the best token must still win."""
    assert set(draw(SamplingParams(temperature=temperature), [10.0, 30.0, 20.0, -40.0])) == {1}


def test_sample_huge_temperature_is_uniform() -> None:
    seen = np.bincount(draw(SamplingParams(temperature=1e30), LOGITS), minlength=VOCAB)
    assert stats.chisquare(seen).pvalue > 1e-6


def test_sample_row_does_not_depend_on_the_batch() -> None:
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=3, seed=1),
        SamplingParams(temperature=1.3, top_p=0.8, seed=2),
    ]
    index = [0, 0, 1, 5]
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    for token in range(6):
        tokens = np.full(4, token, np.int32)
        together = np.asarray(_sample(sampling_state(params, index), logits, tokens))
        alone = [
            int(_sample(sampling_state([p], [i]), logits[r : r + 1], tokens[:1])[0])
            for r, (p, i) in enumerate(zip(params, index, strict=True))
        ]
        assert together.tolist() == alone


def test_sample_draws_differ_by_seed_sample_and_token() -> None:
    """Nothing is drawn with a key that something else was drawn with."""
    params = SamplingParams(temperature=1.0)
    logits = np.zeros((1, 10_000), np.float32)

    def one(seed: int, index: int, token: int) -> int:
        state = sampling_state([SamplingParams(temperature=1.0, seed=seed)], [index])
        return int(_sample(state, logits, np.array([token], np.int32))[0])

    draws = [one(s, i, t) for s in range(3) for i in range(3) for t in range(3)]
    assert len(set(draws)) >= len(draws) - 1  # two equal numbers of 10,000 would be chance
    assert params.seed == 0


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", math.inf, "a finite number >= 0"),
        ("temperature", math.nan, "a finite number >= 0"),
        ("temperature", 1e39, "a finite number >= 0"),
        ("temperature", "hot", "a finite number >= 0"),
        ("top_k", -1, "an integer >= 0"),
        ("top_k", 2.5, "an integer >= 0"),
        ("top_k", 2**31, "an integer >= 0"),
        ("top_k", None, "an integer >= 0"),
        ("top_p", 0, r"a number in \(0, 1\]"),
        ("top_p", 1.01, r"a number in \(0, 1\]"),
        ("top_p", math.nan, r"a number in \(0, 1\]"),
        ("min_p", -0.1, r"a number in \[0, 1\]"),
        ("min_p", 1.01, r"a number in \[0, 1\]"),
        ("seed", -1, r"an integer in \[0, 2\*\*32\)"),
        ("seed", 2**32, r"an integer in \[0, 2\*\*32\)"),
        ("seed", 0.5, r"an integer in \[0, 2\*\*32\)"),
    ],
)
def test_sampling_params_out_of_range_raise(field: str, value: Any, expected: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{field}: expected {expected}.*, got {re.escape(repr(value))}$"
    ):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("number", [np.int64(3), np.float32(0.5), 2**32 - 1])
def test_sampling_params_numpy_numbers_are_taken(number: Any) -> None:
    field = "temperature" if isinstance(number, np.floating) else "seed"
    assert getattr(SamplingParams(**{field: number}), field) == number
