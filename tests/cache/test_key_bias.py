"""Keys with a few channels hundreds of times the rest, as Qwen2's key biases make them: what each scheme loses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import CacheConfig, init_cache, reserve
from pallas_kernels import quantiser
from pallas_kernels.cached_attention import cached_attention

CONFIG = CacheConfig(
    num_layers=1,
    num_kv_heads=2,
    head_dim=64,
    block_size=64,
    num_blocks=17,
    max_seqs=1,
    max_blocks_per_seq=17,
    format="int8",
    open_format="float32",
)
NUM_TOKENS, NUM_QUERIES = 1025, 8
BIAS = {3: 300.0, 17: -220.0, 40: 150.0}


def tensors() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns q[query, q_head, head_dim], k and v [token, kv_head, head_dim]; the last queries attend to all tokens."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, NUM_TOKENS, 2, 64)).astype(np.float32)
    for channel, bias in BIAS.items():
        k[..., channel] += bias
    v += rng.normal(size=(1, 2, 64)).astype(
        np.float32
    )  # values of one head have a direction in common
    return rng.normal(size=(NUM_QUERIES, 4, 64)).astype(np.float32), k, v


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns out f64[q_head, head_dim] of one query over all tokens."""
    k, v = (np.repeat(x.astype(np.float64), 2, axis=1) for x in (k, v))
    scores = np.einsum("hd,khd->hk", q.astype(np.float64), k) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(-1, keepdims=True), v)


def row_error(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the largest error of an output row, as a share of its length."""
    return float(np.max(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)))


def through_cache(config: CacheConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns out of the last token, whose query is `q`, all tokens written in one chunk but that one."""

    @functools.partial(jax.jit, static_argnums=4)
    def step(cache, q, k, v, query_len):
        lens = jnp.full(1, query_len, jnp.int32)
        cache, view = reserve(config, cache, jnp.zeros(1, jnp.int32), lens, query_len)
        out, store = cached_attention(q, k, v, cache.store, 0, view, scale=1 / 8)
        return dataclasses.replace(cache, store=store), out

    cache, _ = step(
        init_cache(config), np.zeros((1, NUM_TOKENS - 1, 4, 64), np.float32),
        k[None, :-1], v[None, :-1], NUM_TOKENS - 1,
    )  # fmt: skip
    return np.stack(
        [np.asarray(step(cache, x[None, None], k[None, -1:], v[None, -1:], 1)[1])[0, 0] for x in q]
    )


def per_token(x: np.ndarray, bits: int) -> np.ndarray:
    """Returns x quantised per token and head (asymmetric, float32 scales) and read back."""
    quantised = quantiser.quantize_groups(
        jnp.asarray(x), -1, bits=bits, symmetric=False, scale_dtype=jnp.float32
    )
    return np.asarray(quantiser.dequantize_groups(quantised))


@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("int4", 4)])
def test_key_bias_output_error_is_small_per_channel_and_large_per_token(
    format: str, bits: int, record_property
) -> None:
    """Field case L7: at most 2 % per row with scales per channel; per token and head the attention is lost."""
    q, k, v = tensors()
    want = np.stack([attention(x, k, v) for x in q])
    config = dataclasses.replace(CONFIG, format=format, symmetric_keys=None, value_group=None)
    ours = row_error(through_cache(config, q, k, v), want)
    control = row_error(
        np.stack([attention(x, per_token(k, bits), per_token(v, bits)) for x in q]), want
    )
    record_property("per_channel", ours)
    record_property("per_token", control)
    print(f"{format}: per channel {ours:.4f}, per token and head {control:.4f}")
    assert ours <= 0.02
    assert control > 3 * ours
