"""A tiny decoder with random weights, and a dense float64 twin of it that knows no cache.

`FakeModel` follows the `DecoderModel` protocol: two layers, grouped query heads, learned positions, a scan
over stacked layers that carries the store.  `dense_logits` runs the same weights over a whole token list in
NumPy, one query at a time, and is what the cached model must reproduce.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cached_attention import Store, cached_attention
from pallas_kernels.layout import BatchView

Array = jax.Array

_WEIGHTS = ["embed", "position", "wq", "wk", "wv", "wo", "up", "down", "head"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=_WEIGHTS,
    meta_fields=["num_q_heads", "num_kv_heads", "window"],
)
@dataclasses.dataclass(frozen=True)
class FakeModel:
    """Weights of the decoder; layers are stacked on the first axis.

    Attributes:
      embed: f32[vocab, hidden].
      position: f32[max_len, hidden], added to the embedding.
      wq: f32[layer, hidden, q_head * head_dim]; wk and wv: f32[layer, hidden, kv_head * head_dim].
      wo: f32[layer, q_head * head_dim, hidden].
      up, down: f32[layer, hidden, 2 * hidden] and its transpose's shape.
      head: f32[hidden, vocab].
      window: sliding window of every layer, or None.
    """

    embed: Array
    position: Array
    wq: Array
    wk: Array
    wv: Array
    wo: Array
    up: Array
    down: Array
    head: Array
    num_q_heads: int
    num_kv_heads: int
    window: int | None = None

    def __call__(self, tokens: Array, store: Store, view: BatchView) -> tuple[Array, Store]:
        """See `jaxkv.model.DecoderModel`."""
        rows, query_len = tokens.shape
        hidden = self.embed[tokens] + self.position[view.positions]
        head_dim = self.wq.shape[-1] // self.num_q_heads

        def heads(x: Array, count: int) -> Array:
            return x.reshape(rows, query_len, count, head_dim)

        def one_layer(
            carry: tuple[Array, Store], weights: tuple[Array, ...]
        ) -> tuple[tuple[Array, Store], None]:
            hidden, store = carry
            layer, wq, wk, wv, wo, up, down = weights
            x = _normed(hidden, jnp)
            k, v = heads(x @ wk, self.num_kv_heads), heads(x @ wv, self.num_kv_heads)
            out, store = cached_attention(
                heads(x @ wq, self.num_q_heads),
                k,
                v,
                store,
                layer,
                view,
                scale=head_dim**-0.5,
                window=self.window,
            )
            hidden = hidden + out.reshape(rows, query_len, -1) @ wo
            return (hidden + jnp.tanh(_normed(hidden, jnp) @ up) @ down, store), None

        layers = jnp.arange(self.wq.shape[0], dtype=jnp.int32)
        stacked = (layers, self.wq, self.wk, self.wv, self.wo, self.up, self.down)
        (hidden, store), _ = jax.lax.scan(one_layer, (hidden, store), stacked)
        return _normed(hidden, jnp), store

    def unembed(self, hidden: Array) -> Array:
        """See `jaxkv.model.DecoderModel`."""
        return hidden @ self.head


def fake_model(
    *,
    num_layers: int = 2,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    hidden: int = 24,
    vocab: int = 31,
    max_len: int = 128,
    window: int | None = None,
    seed: int = 0,
) -> FakeModel:
    """Returns a model whose greedy continuations vary: every weight is random and none is small."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.float32)

    q_width, kv_width = num_q_heads * head_dim, num_kv_heads * head_dim
    return FakeModel(
        embed=normal(vocab, hidden) * vocab**0.5,
        position=normal(max_len, hidden) * max_len**0.5,
        wq=2 * normal(num_layers, hidden, q_width),
        wk=2 * normal(num_layers, hidden, kv_width),
        wv=normal(num_layers, hidden, kv_width),
        wo=normal(num_layers, q_width, hidden),
        up=normal(num_layers, hidden, 2 * hidden),
        down=normal(num_layers, 2 * hidden, hidden),
        head=4 * normal(hidden, vocab),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        window=window,
    )


def dense_logits(model: FakeModel, tokens: list[int]) -> np.ndarray:
    """Returns logits f64[token, vocab] of the whole list, attending by plain loops, without a cache."""
    w = {name: np.asarray(getattr(model, name), np.float64) for name in _WEIGHTS}
    hidden = w["embed"][tokens] + w["position"][: len(tokens)]
    group = model.num_q_heads // model.num_kv_heads
    head_dim = w["wq"].shape[-1] // model.num_q_heads
    for layer in range(w["wq"].shape[0]):
        x = _normed(hidden, np)
        q = (x @ w["wq"][layer]).reshape(len(tokens), model.num_q_heads, head_dim)
        k = (x @ w["wk"][layer]).reshape(len(tokens), model.num_kv_heads, head_dim)
        v = (x @ w["wv"][layer]).reshape(len(tokens), model.num_kv_heads, head_dim)
        out = np.zeros_like(q)
        for i in range(len(tokens)):
            first = 0 if model.window is None else max(0, i - model.window + 1)
            for h in range(model.num_q_heads):
                scores = k[first : i + 1, h // group] @ q[i, h] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[i, h] = weights @ v[first : i + 1, h // group] / weights.sum()
        hidden = hidden + out.reshape(len(tokens), -1) @ w["wo"][layer]
        hidden = hidden + np.tanh(_normed(hidden, np) @ w["up"][layer]) @ w["down"][layer]
    return _normed(hidden, np) @ w["head"]


def dense_greedy(
    model: FakeModel, prompt: list[int], max_new_tokens: int, eos: tuple[int, ...] = ()
) -> list[int]:
    """Returns the greedy continuation by rerunning `dense_logits` for every token.

    Raises:
      AssertionError: the two best logits of a step lie so close that float32 might choose differently.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        last = dense_logits(model, tokens)[-1]
        second, first = np.sort(last)[-2:]
        assert first - second > 1e-3, (
            "choose another seed: the two best logits are too close to call"
        )
        tokens.append(int(np.argmax(last)))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def _normed(x: Array, xp: object) -> Array:
    """Returns x over its root mean square along the last axis; `xp` is numpy or jax.numpy."""
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6)  # type: ignore[attr-defined]
