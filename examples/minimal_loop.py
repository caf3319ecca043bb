"""The paged KV cache inside somebody else's model and somebody else's jitted loop.

The model is one attention head written by hand: it looks for an earlier place where its token occurred and
answers with what followed there (an "induction head").  It can only do so through the cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jaxkv
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention

PROMPTS, NUM_NEW = ["abcab", "tick tock, t", "123456789-1"], 24
CONFIG = jaxkv.CacheConfig(
    num_layers=1, num_kv_heads=1, head_dim=128,
    block_size=4, num_blocks=32, max_seqs=3, max_blocks_per_seq=16,
)  # fmt: skip
ROWS = jnp.arange(CONFIG.max_seqs, dtype=jnp.int32)


def model(embed, before, tokens, q_lens, cache):
    """Returns each row's next token; `before` holds the token in front of each of `tokens`."""
    cache, view = jaxkv.reserve(CONFIG, cache, ROWS, q_lens, tokens.shape[1])  # room for new tokens
    q, k, v = (
        embed[ids][:, :, None] for ids in (tokens, before, tokens)
    )  # [row, q_pos, head, dim]
    store = write_kv(cache.store, 0, k, v, view)  # layer 0
    out = paged_attention(q, store, 0, view, scale=20.0)[ROWS, q_lens - 1, 0]
    return jnp.argmax(out, -1).astype(jnp.int32), dataclasses.replace(cache, store=store)


@functools.partial(jax.jit, donate_argnames="cache")
def generate(embed, prompts, q_lens, cache):
    """Prefills all prompts, generates NUM_NEW tokens for each without the host, releases the blocks."""

    def step(carry):
        i, last, token, texts, cache = carry
        texts = texts.at[:, i].set(token)
        following, cache = model(embed, last[:, None], token[:, None], jnp.ones_like(q_lens), cache)
        return i + 1, token, following, texts, cache

    before = jnp.pad(prompts[:, :-1], ((0, 0), (1, 0)))
    token, cache = model(embed, before, prompts, q_lens, cache)
    texts = jnp.zeros((len(prompts), NUM_NEW), jnp.int32)
    carry = (jnp.int32(0), prompts[ROWS, q_lens - 1], token, texts, cache)
    *_, texts, cache = jax.lax.while_loop(lambda carry: carry[0] < NUM_NEW, step, carry)
    used = CONFIG.num_blocks - cache.pool.num_free
    return texts, used, jaxkv.release(CONFIG, cache, jnp.ones(CONFIG.max_seqs, bool))


q_lens = jnp.array([len(text) for text in PROMPTS], jnp.int32)
padded = jnp.array([[*text.encode().ljust(max(q_lens), b"\0")] for text in PROMPTS], jnp.int32)
texts, used, cache = generate(jnp.eye(128), padded, q_lens, jaxkv.init_cache(CONFIG))
jaxkv.raise_for_status(cache)
for prompt, tokens in zip(PROMPTS, texts.tolist(), strict=True):
    print(f"{prompt} -> {bytes(tokens).decode()}")
print(f"{used} of {CONFIG.num_blocks} blocks were in use, {cache.pool.num_free} are free again")
