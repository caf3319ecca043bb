"""Paged attention as plain float64 NumPy loops: one row, one query, one head at a time.

Shares no code with the kernels or their references and has no defaults.
"""

from __future__ import annotations

import math

import numpy as np

# Largest error of one output row (a row, query position and head) relative to the row's largest number.
# float32: 2^-24 times the few dozen roundings of a dot product, a softmax and a sum, with room.
# bfloat16: inputs are exact in the oracle too; what is left is rounding the weights (2^-9 each) and the
# result (2^-9), and the odd tie between them.  float16: the same at 2^-11, the weights kept in float32.
TOLERANCES = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}


def paged_attention_oracle(
    q, kv, layer, block_tables, kv_lens, q_lens, *, scale, soft_cap, window
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out f64[row, q_pos, q_head, head_dim], lse f64[row, q_pos, q_head]).

    Args:
      q: number[row, q_pos, q_head, head_dim].
      kv: number[layer, block, kv_head, block_size, 2 * head_dim].
      layer: int.
      block_tables, kv_lens, q_lens: int[row, max_blocks], int[row], int[row].
      scale, soft_cap, window: numbers; the last two may be None.
    """
    q = np.asarray(q).astype(np.float64)
    num_rows, _, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:3], -np.inf)
    for row in range(num_rows):
        kv_len, q_len = int(kv_lens[row]), int(q_lens[row])
        for j in range(q_len):
            position = kv_len - q_len + j
            oldest = 0 if window is None else max(0, position - window + 1)
            for head in range(num_q_heads):
                kv_head = head * num_kv_heads // num_q_heads
                scores, values = [], []
                for key in range(oldest, position + 1):
                    block = block_tables[row][key // block_size]
                    token = kv[layer, block, kv_head, key % block_size].astype(np.float64)
                    score = scale * float(np.dot(q[row, j, head], token[:head_dim]))
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    scores.append(score)
                    values.append(token[head_dim:])
                peak = max(scores)
                weights = [math.exp(score - peak) for score in scores]
                total = sum(weights)
                out[row, j, head] = sum(
                    w / total * value for w, value in zip(weights, values, strict=True)
                )
                lse[row, j, head] = peak + math.log(total)
    return out, lse


def worst_row_error(got, expected) -> float:
    """Returns the largest error of any last-axis row of `got`, relative to the row's largest number.

    NaN or Inf in `got` gives infinity; a row that should be zero must be exactly zero.
    """
    got = np.asarray(got).astype(np.float64)
    expected = np.asarray(expected).astype(np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if not np.all(np.isfinite(got)):
        return math.inf
    error = np.max(np.abs(got - expected), axis=-1)
    size = np.max(np.abs(expected), axis=-1)
    relative = np.where(
        size > 0, error / np.where(size > 0, size, 1), np.where(error > 0, np.inf, 0)
    )
    return float(np.max(relative))
