"""Reading sealed blocks, and attention over a quantised cache, as float64 NumPy loops; shares no code with the product."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np


def read_block(sealed, layer: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns k, v f64[kv_head, token, head_dim] of one sealed block, number by number."""
    layout = sealed.layout
    heads, tokens, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
    codes = np.asarray(sealed.codes)[layer, block]
    key_affine = _rows(sealed.key_affine[layer, block], layout.num_key_rows, heads * dim)
    value_affine = _rows(
        sealed.value_affine[layer, block], dim // layout.value_group, heads * tokens
    )
    k, v = np.zeros((heads, tokens, dim)), np.zeros((heads, tokens, dim))
    for head in range(heads):
        for token in range(tokens):
            for column in range(2 * dim):
                number = _code(layout.format.name, codes[head], token, column, tokens)
                channel = column % dim
                if column < dim:
                    place = head * dim + channel
                    scale = key_affine[0, place]
                    if layout.symmetric_keys:
                        k[head, token, channel] = number * scale
                    else:
                        k[head, token, channel] = (number + 0.5) * scale + key_affine[1, place]
                else:
                    group = channel // layout.value_group
                    scale = value_affine[group, head * tokens + token]
                    v[head, token, channel] = number * scale
    return k, v


def _code(name: str, codes: np.ndarray, token: int, column: int, tokens: int) -> float:
    if name == "int8":
        return float(codes[token, column])
    if name == "fp8_e4m3":
        return float(codes[token, column].view(ml_dtypes.float8_e4m3fn))
    byte = int(codes[token % (tokens // 2), column])
    nibble = byte >> 4 if token >= tokens // 2 else byte & 15
    return float(nibble - 16 if nibble > 7 else nibble)


def _rows(x, num_rows: int, width: int) -> np.ndarray:
    """Returns a block's scales as whole rows: however the array is shaped, they have equal shares of it, padding behind."""
    x = np.asarray(x).reshape(-1)
    x = (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)
    return x.reshape(num_rows, -1)[:, :width]


def quantised_attention_oracle(
    q, k, v, sealed, layer, table, *, scale, soft_cap, window
) -> np.ndarray:
    """Returns out f64[token, q_head, head_dim] of one whole sequence, every token a query.

    Args:
      q: number[token, q_head, head_dim].
      k, v: number[token, kv_head, head_dim], as the open format rounds them.
      sealed: the store that holds the codes of the sequence's full blocks.
      layer: int, counted in `sealed`.
      table: int[block], ids of the sequence's blocks.
      scale, soft_cap, window: numbers; the last two may be None.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    size = sealed.layout.block_size
    blocks = [read_block(sealed, layer, int(table[b])) for b in range(len(q) // size)]
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape)
    for p in range(len(q)):
        for head in range(q.shape[1]):
            keys, values = [], []
            for i in range(0 if window is None else max(0, p - window + 1), p + 1):
                if i // size < p // size:
                    keys.append(blocks[i // size][0][head // group, i % size])
                    values.append(blocks[i // size][1][head // group, i % size])
                else:
                    keys.append(k[i, head // group])
                    values.append(v[i, head // group])
            scores = [scale * float(key @ q[p, head]) for key in keys]
            if soft_cap is not None:
                scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
            weights = np.exp(np.array(scores) - max(scores))
            out[p, head] = weights @ np.array(values) / weights.sum()
    return out


def sealed_attention_oracle(
    q, sealed, layer, block_tables, kv_lens, q_lens, *, scale, soft_cap, window
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out f64[row, q_pos, q_head, head_dim], lse f64[row, q_pos, q_head]) over the blocks before each query's own.

    Arguments as in `oracles.attention.paged_attention_oracle`, with the sealed store for its pool.
    """
    q = np.asarray(q).astype(np.float64)
    size, heads = sealed.layout.block_size, sealed.layout.num_kv_heads
    out, lse, blocks = np.zeros(q.shape), np.full(q.shape[:3], -np.inf), {}
    for row in range(len(q)):
        for j in range(int(q_lens[row])):
            p = int(kv_lens[row]) - int(q_lens[row]) + j
            begin = 0 if window is None else max(0, p - window + 1)
            keys = range(begin, p // size * size)
            if not keys:
                continue
            for i in {i // size for i in keys}:
                name = int(block_tables[row][i])
                if name not in blocks:
                    blocks[name] = read_block(sealed, layer, name)
            for head in range(q.shape[2]):
                h = head * heads // q.shape[2]
                k = np.array(
                    [blocks[int(block_tables[row][i // size])][0][h, i % size] for i in keys]
                )
                v = np.array(
                    [blocks[int(block_tables[row][i // size])][1][h, i % size] for i in keys]
                )
                scores = scale * (k @ q[row, j, head])
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out[row, j, head] = weights @ v / weights.sum()
                lse[row, j, head] = scores.max() + math.log(weights.sum())
    return out, lse
