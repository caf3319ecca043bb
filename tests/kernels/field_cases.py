"""Field cases of one query whose answer is known by hand, for every kernel: scores and values given key by key.

Scores are laid out along the first axis of K and q, and all numbers of a token's V are the same, so that the output is
one number.  Blocks lie in reversed order in the pool, NaN in every slot without a key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import BatchView, KVLayout, KVStore, encode, kv_format

COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class FieldCase:
    """Scores and values of keys 0, 1, ... of one sequence, its knobs, and what its last token must get."""

    name: str
    scores: tuple[float, ...]
    values: tuple[float, ...]
    expected: float
    soft_cap: float | None = None
    window: int | None = None


def capped(cap: float) -> float:
    """The weight of a key of score 0.3 beside one of score 2 under a soft cap."""
    low, high = (math.exp(cap * math.tanh(score / cap)) for score in (0.3, 2.0))
    return low / (low + high)


FIELD_CASES = (
    FieldCase("E5 keys up to the length count, no more", (0.0,) * 5, (1, 2, 3, 4, 5), 3.0),
    FieldCase("E7 scores of -6e4 are no mask", (-6e4,) * 3, (0, 1, 2), 1.0),
    FieldCase("E7 scores of -1e30 are no mask", (-1e30,) * 3, (0, 1, 2), 1.0),
    FieldCase("E8 a key of zeros is a key", (0.0,), (7,), 7.0),
    FieldCase("K1 a window of 4 sees keys 6 to 9", (0.0,) * 10, tuple(range(10)), 7.5, window=4),
    FieldCase("K3 a window longer than the context", (0.0,) * 10, tuple(range(10)), 4.5, window=99),
    FieldCase("M6 the cap comes before the mask", (0.3, 2.0), (1, 0), 0.33789, soft_cap=1.0),
    FieldCase("M7 a cap of 5", (0.3, 2.0), (1, 0), capped(5.0), soft_cap=5.0),
    FieldCase("M7 a cap of 50", (0.3, 2.0), (1, 0), capped(50.0), soft_cap=50.0),
    FieldCase("M7 no cap", (0.3, 2.0), (1, 0), 1 / (1 + math.exp(1.7))),
)


def wrong_answers(
    attend: Callable[..., Any], *, format: str, block_size: int, head_dim: int
) -> list[str]:
    """Returns the cases a kernel gets wrong, with what it said.

    Args:
      attend: (q, store, layer, view, soft_cap, window) -> out; soft_cap is None or a number, window always a
        number, so that two compiled programs serve all cases.
      format, block_size, head_dim: of the pool; two blocks hold the longest case.
    """
    layout = KVLayout(1, COLUMNS, 1, block_size, head_dim, kv_format(format), False)
    tolerance = {"float32": 1e-5, "bfloat16": 8e-3}[format]
    wrong = []
    for case in FIELD_CASES:
        kv = np.full(layout.shape, np.nan, np.float32)
        for key, (score, value) in enumerate(zip(case.scores, case.values, strict=True)):
            slot = kv[0, COLUMNS - 1 - key // block_size, 0, key % block_size]
            slot[:head_dim], slot[head_dim:], slot[0] = 0, value, score
        tokens = len(case.scores)
        table = np.arange(COLUMNS)[::-1][None]
        lens = jnp.array([tokens], jnp.int32), jnp.array([1], jnp.int32)
        view = BatchView(jnp.asarray(table, jnp.int32), *lens, lens[0][:, None] - 1)
        store = KVStore(encode(layout, jnp.asarray(kv)), layout)
        q = jnp.zeros((1, 1, 1, head_dim), layout.format.dtype).at[..., 0].set(1)
        out = attend(q, store, jnp.int32(0), view, case.soft_cap, case.window or 1000)
        out = np.asarray(out.astype(jnp.float32))
        if not np.allclose(out, case.expected, rtol=tolerance, atol=0):
            wrong.append(f"{case.name}: expected {case.expected}, got {out[0, 0, 0, :2]}")
    return wrong
