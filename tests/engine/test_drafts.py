"""Prompt lookup against a plain search."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jaxkv.drafts import NGRAMS, ngram_drafts

WIDTH, DRAFT = 20, 4
_drafts = jax.jit(ngram_drafts, static_argnums=2)


def _plain(tokens: list[int]) -> list[int]:
    """What followed the latest earlier place of the longest of the last n-grams."""
    for n in sorted(NGRAMS, reverse=True):
        for place in range(len(tokens) - n - 1, -1, -1):
            if len(tokens) >= n and tokens[place : place + n] == tokens[-n:]:
                return tokens[place + n : place + n + DRAFT]
    return []


@hypothesis.settings(deadline=None)
@hypothesis.given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
    rubbish=st.integers(0, 2),
)
def test_drafts_equal_a_plain_search(rows: list[list[int]], rubbish: int) -> None:
    tokens = np.full((3, WIDTH), rubbish, np.int32)
    for row, mine in zip(tokens, rows, strict=True):
        row[: len(mine)] = mine
    lens = jnp.array([len(mine) for mine in rows], jnp.int32)
    drafts, counts = jax.device_get(_drafts(jnp.asarray(tokens), lens, DRAFT))
    found = [row[:n].tolist() for row, n in zip(drafts, counts, strict=True)]
    assert found == [_plain(mine) for mine in rows]
