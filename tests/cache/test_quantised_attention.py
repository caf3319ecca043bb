"""Attention through a quantised cache against a float64 oracle, in any chunks, through the real transitions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles.attention import worst_row_error
from oracles.quantised import quantised_attention_oracle

from jaxkv import CacheConfig, StatusBit, check_invariants, init_cache, reserve
from jaxkv.cache import PagedKVCache, fork, release, truncate
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention

CONFIG = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    block_size=8,
    num_blocks=14,
    max_seqs=3,
    max_blocks_per_seq=5,
    format="int8",
    open_format="float32",
)
NUM_TOKENS, GROUP, SCALE = 29, 3, 0.3
ROWS = (2, 0)  # the slots of the two sequences
NO_KNOBS: dict[str, Any] = {"soft_cap": None, "window": None}


def variant(format: str, **options: Any) -> CacheConfig:
    """Returns CONFIG with another format; its other options are the format's own unless given."""
    fresh = {"symmetric_keys": None, "value_group": None}
    return dataclasses.replace(CONFIG, format=format, **(fresh | options))


def inputs(config: CacheConfig) -> tuple[np.ndarray, ...]:
    """Returns q, k, v f32[row, token, layer, head, head_dim]; a few K channels are hundreds of times the rest."""
    rng = np.random.default_rng(7)
    shape = (2, NUM_TOKENS, config.num_layers, config.num_kv_heads, config.head_dim)
    k, v = rng.normal(size=(2, *shape)).astype(np.float32)
    k[..., 3] += 40.0
    q = rng.normal(size=(*shape[:3], config.num_kv_heads * GROUP, config.head_dim))
    return q.astype(np.float32), k, v


@functools.lru_cache(maxsize=32)
def stepper(config: CacheConfig, query_len: int, soft_cap: float | None, window: int | None) -> Any:
    """Returns the jitted step: reserve, then every layer."""

    def step(cache: PagedKVCache, lens: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        cache, view = reserve(config, cache, jnp.array(ROWS, jnp.int32), lens, query_len)

        def one_layer(store: Any, layer: Any) -> tuple[Any, Any]:
            out, store = cached_attention(
                q[:, :, layer], k[:, :, layer], v[:, :, layer], store, layer, view,
                scale=SCALE, soft_cap=soft_cap, window=window,
            )  # fmt: skip
            return store, out

        store, out = jax.lax.scan(one_layer, cache.store, jnp.arange(config.num_layers))
        return dataclasses.replace(cache, store=store), jnp.moveaxis(out, 0, 2)

    return jax.jit(step)


def run(
    config: CacheConfig, chunks: list[tuple[int, int]], width: int, **knobs: Any
) -> tuple[PagedKVCache, np.ndarray]:
    """Feeds the two sequences in chunks (tokens of each row per call, at most `width`).

    Returns:
      The cache, and out f32[row, token, layer, q_head, head_dim].
    """
    step = stepper(config, width, **(NO_KNOBS | knobs))
    arrays = inputs(config)
    out = np.zeros(arrays[0].shape, np.float32)
    done = np.zeros(2, int)
    cache = init_cache(config)
    for lens in chunks:
        fed = [
            np.stack([np.resize(x[row, done[row] : done[row] + width], (width, *x.shape[2:]))
                      if done[row] < NUM_TOKENS else np.zeros((width, *x.shape[2:]), np.float32)
                      for row in range(2)])
            for x in arrays
        ]  # fmt: skip
        cache, got = step(cache, np.array(lens, np.int32), *fed)
        for row in range(2):
            out[row, done[row] : done[row] + lens[row]] = np.asarray(got)[row, : lens[row]]
        done += lens
        check_invariants(config, cache)
        assert int(cache.status.bits) == 0
    assert done.tolist() == [NUM_TOKENS, NUM_TOKENS]
    return cache, out


ONE_BY_ONE = [(1, 1)] * NUM_TOKENS
UNEVEN = [(5, 11), (11, 0), (0, 7), (7, 6), (1, 5), (5, 0)]


def expected(config: CacheConfig, cache: PagedKVCache, **knobs: Any) -> np.ndarray:
    """Returns the oracle's outputs, reading the codes of the cache."""
    q, k, v = inputs(config)
    wide, out = config.num_wide_layers, np.zeros(q.shape)
    rounded = np.dtype(getattr(ml_dtypes, config.open_format, config.open_format))
    for row, slot in enumerate(ROWS):
        table = np.asarray(cache.tables.blocks)[slot]
        for layer in range(config.num_layers):
            is_wide = not wide <= layer < config.num_layers - wide
            sealed = cache.store.sealed
            if is_wide:  # nothing sealed: one block as long as the sequence
                layout = dataclasses.replace(sealed.layout, block_size=NUM_TOKENS + 1)
                sealed = dataclasses.replace(sealed, layout=layout)
            out[row, :, layer] = quantised_attention_oracle(
                q[row, :, layer],
                *(x[row, :, layer].astype(rounded).astype(np.float64) for x in (k, v)),
                sealed, layer - wide, table, scale=SCALE, **(NO_KNOBS | knobs),
            )  # fmt: skip
    return out


CASES = {
    "int8": variant("int8"),
    "int8 symmetric bfloat16": variant("int8", symmetric_keys=True, open_format="bfloat16"),
    "fp8": variant("fp8_e4m3"),
    "fp8 not as bits": variant("fp8_e4m3", as_bits=False),
    "int4": variant("int4"),
    "int4 groups of 8, first and last layer wide": variant(
        "int4", value_group=8, num_layers=4, num_wide_layers=1
    ),
}


def sealed_blocks(config: CacheConfig, cache: PagedKVCache) -> list[bytes]:
    """Returns the bytes of every sealed block of both sequences, in the order of their tokens."""
    tables = np.asarray(cache.tables.blocks)
    arrays = [np.asarray(x) for x in jax.tree.leaves(cache.store.sealed)]
    return [
        b"".join(x[:, tables[slot, column]].tobytes() for x in arrays)
        for slot in ROWS
        for column in range(NUM_TOKENS // config.block_size)
    ]


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("int8", "fp8", "int4 groups of 8, first and last layer wide")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in CASES
    ],
)
def test_quantised_attention_any_chunks_match_the_oracle(name: str) -> None:
    """Token by token and in uneven chunks: the oracle's numbers, and the same codes bit for bit."""
    config = CASES[name]
    one, out_one = run(config, ONE_BY_ONE, 1)
    many, out_many = run(config, UNEVEN, 11)
    want = expected(config, one)
    assert worst_row_error(out_one, want) < 1e-5
    assert worst_row_error(out_many, want) < 1e-5
    assert sealed_blocks(config, one) == sealed_blocks(config, many)


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"window": 5}, marks=pytest.mark.exhaustive),
        {"soft_cap": 2.0, "window": 11},
    ],
)
def test_quantised_attention_window_and_soft_cap_match_the_oracle(knobs: dict[str, Any]) -> None:
    """Windows inside a block, across one edge and across several; K1 and M6 for codes."""
    one, out_one = run(CONFIG, ONE_BY_ONE, 1, **knobs)
    _, out_many = run(CONFIG, UNEVEN, 11, **knobs)
    want = expected(CONFIG, one, **knobs)
    assert worst_row_error(out_one, want) < 1e-5
    assert worst_row_error(out_many, want) < 1e-5


def test_quantised_attention_reference_equals_xla() -> None:
    """The reference implementation reads codes by another way and agrees."""
    _, want = run(CONFIG, UNEVEN, 11)
    cache, _ = run(CONFIG, ONE_BY_ONE, 1)
    q, k, v = inputs(CONFIG)
    begin = NUM_TOKENS - 1
    last = [x[:, begin:, 0] for x in (q, k, v)]
    slots = jnp.array(ROWS, jnp.int32)
    cache = truncate(CONFIG, cache, slots, jnp.full(2, begin, jnp.int32))
    cache, view = reserve(CONFIG, cache, slots, jnp.ones(2, jnp.int32), 1)
    attend = functools.partial(cached_attention, scale=SCALE, implementation="reference")
    out, _ = jax.jit(attend)(*last, cache.store, 0, view)
    assert worst_row_error(out, want[:, begin:, 0]) < 1e-5


def test_plain_ops_refuse_a_quantised_store() -> None:
    """`write_kv` and `paged_attention` name what they take, and the op that takes every kind."""
    cache, view = reserve(
        CONFIG, init_cache(CONFIG), jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32), 1
    )
    kv, q = jnp.zeros((1, 1, 2, 16)), jnp.zeros((1, 1, 6, 16))
    with pytest.raises(ValueError, match="store: expected a KVStore, got QuantisedStore"):
        write_kv(cache.store, 0, kv, kv, view)
    with pytest.raises(ValueError, match="store: expected a KVStore or a SealedStore, got"):
        paged_attention(q, cache.store, 0, view, scale=1.0)
    bare = dataclasses.replace(view, open_ids=None)
    with pytest.raises(ValueError, match="open_ids: expected"):
        cached_attention(q, kv, kv, cache.store, 0, bare, scale=1.0)


def test_nan_token_stays_in_its_own_sequence() -> None:
    """A NaN in one sequence's K and V spoils that sequence and no bit of the other, sealed or open."""
    _, clean = run(CONFIG, ONE_BY_ONE, 1)
    step, arrays = stepper(CONFIG, 1, None, None), inputs(CONFIG)
    cache, out = init_cache(CONFIG), []
    for p in range(NUM_TOKENS):
        q, k, v = (x[:, p : p + 1].copy() for x in arrays)
        if p == 3:
            k[0], v[0] = np.nan, np.inf
        cache, got = step(cache, np.ones(2, np.int32), q, k, v)
        out.append(np.asarray(got)[:, 0])
    got = np.stack(out, 1)
    np.testing.assert_array_equal(got[1], clean[1])
    np.testing.assert_array_equal(got[0, :3], clean[0, :3])
    assert np.isnan(got[0, 3:]).any(axis=(-1, -2, -3)).all()


def test_truncate_into_a_sealed_block_is_refused_and_its_edge_is_not() -> None:
    """Codes are never cut in two; the last block can be cut, also just when it has filled."""
    cache, _ = run(CONFIG, UNEVEN, 11)  # 29 tokens: blocks of 8 full up to 24

    def cut(cache: PagedKVCache, length: int) -> tuple[PagedKVCache, StatusBit]:
        ids, lens = jnp.array([2], jnp.int32), jnp.array([length], jnp.int32)
        after = truncate(CONFIG, cache, ids, lens)
        check_invariants(CONFIG, after)
        return after, StatusBit(int(after.status.bits))

    refused, bits = cut(cache, 20)
    assert bits == StatusBit.SEALED_BLOCK
    same = jax.tree.map(
        lambda a, b: bool((a == b).all()),
        (cache.pool, cache.tables, cache.open_blocks),
        (refused.pool, refused.tables, refused.open_blocks),
    )
    assert all(jax.tree.leaves(same))
    assert cut(cache, 26)[1] == StatusBit(0)
    at_edge, bits = cut(cache, 16)
    assert bits == StatusBit(0)
    assert cut(at_edge, 12)[1] == StatusBit.SEALED_BLOCK


def test_decode_after_rollback_of_a_block_that_just_filled_seals_the_new_tokens() -> None:
    """Speculative tokens that were rejected leave no trace in the codes: the block is sealed anew."""
    arrays, step = inputs(CONFIG), stepper(CONFIG, 1, None, None)

    def feed(cache: PagedKVCache, tokens: list[int]) -> PagedKVCache:
        for p in tokens:
            cache, _ = step(cache, np.ones(2, np.int32), *(x[:, p : p + 1] for x in arrays))
        return cache

    straight = feed(init_cache(CONFIG), list(range(8)))
    rolled = feed(init_cache(CONFIG), [*range(6), 20, 21])
    slots = jnp.array(ROWS, jnp.int32)
    rolled = truncate(CONFIG, rolled, slots, jnp.full(2, 6, jnp.int32))
    rolled = feed(rolled, [6, 7])
    for slot in ROWS:
        ids = [int(c.tables.blocks[slot, 0]) for c in (straight, rolled)]
        for a, b in zip(
            *(jax.tree.leaves(c.store.sealed) for c in (straight, rolled)), strict=True
        ):
            np.testing.assert_array_equal(a[:, ids[0]], b[:, ids[1]])


def test_fork_at_a_full_block_then_rollback_leaves_the_sibling_sealed() -> None:
    """A sibling's sealed block keeps its bytes when the other goes back into it and writes other tokens."""
    arrays, step = inputs(CONFIG), stepper(CONFIG, 1, None, None)
    cache = init_cache(CONFIG)
    for p in range(8):
        cache, _ = step(cache, np.array([1, 0], np.int32), *(x[:, p : p + 1] for x in arrays))
    cache = fork(CONFIG, cache, jnp.array([2], jnp.int32), jnp.array([0], jnp.int32))
    block = int(cache.tables.blocks[0, 0])
    before = [np.asarray(x)[:, block] for x in jax.tree.leaves(cache.store.sealed)]
    cache = truncate(CONFIG, cache, jnp.array([2], jnp.int32), jnp.array([5], jnp.int32))
    for p in (20, 21, 22):
        cache, _ = step(cache, np.array([1, 0], np.int32), *(x[:, p : p + 1] for x in arrays))
        check_invariants(CONFIG, cache)
    assert int(cache.tables.blocks[2, 0]) != block
    for was, now in zip(before, jax.tree.leaves(cache.store.sealed), strict=True):
        np.testing.assert_array_equal(was, np.asarray(now)[:, block])
    cache = release(CONFIG, cache, jnp.array([True, False, True]))
    check_invariants(CONFIG, cache)
    assert int(cache.pool.num_free) == CONFIG.num_blocks
    assert int(cache.open_blocks.pool.num_free) == CONFIG.max_seqs
