"""A model on several devices: the tokens of one device, the books equal on all, the bytes divided, nothing of a block sent."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import SHIPPED
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxkv import CacheConfig, Engine, Request, decode_loop, init_cache, reserve
from jaxkv.beam import beam_search
from jaxkv.cache import PagedKVCache
from jaxkv.draft_model import DraftModel
from jaxkv.generate import Generator
from jaxkv.mesh import device_config, init_on, make_mesh, mesh_of, mesh_shape, specs_of, spmd
from jaxkv.sampling import SamplingParams, sampling_state
from models.qwen import Qwen, QwenConfig, random_model, shard
from pallas_kernels.cached_attention import cached_attention, rows_to_read
from pallas_kernels.layout import BatchView

# An odd vocabulary, a head of its own, biases, q and k norms: everything that is divided, or must not be.
QWEN = QwenConfig.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "attention_bias": True,
        "tie_word_embeddings": False,
    }
)
PROMPTS = [[5, 7, 100, 3, 9, 11, 2], [8, 1], [4] * 13, [99, 98, 97, 4]]
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4)]


@functools.cache
def model() -> Qwen:
    """A model whose biases are not zero and whose logits differ enough to be ordered."""
    plain = random_model(QWEN, jax.random.key(3))
    leaves, tree = jax.tree.flatten(plain)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, noisy)


def cache_config(format: str = "float32", **sizes: int) -> CacheConfig:
    return CacheConfig(
        num_layers=QWEN.num_layers,
        num_kv_heads=QWEN.num_kv_heads,
        head_dim=QWEN.head_dim,
        format=format,
        **({"block_size": 8, "num_blocks": 40, "max_seqs": 8, "max_blocks_per_seq": 5} | sizes),
    )


# The same tokens ----------------------------------------------------------------------------------

SAMPLING = [SamplingParams(temperature=t, seed=s) for t, s in ((0, 0), (0.9, 1), (0, 2), (0.7, 3))]


@functools.cache
def generated(format: str, heads: int, rows: int, spread: bool) -> list[list[int]]:
    """Two samples of each prompt; on one device for heads 0."""
    weights = model().spread() if spread else model()
    if heads:
        weights = shard(weights, make_mesh(heads, rows))
    generator = Generator(weights, cache_config(format), prefill_chunk=5, steps_per_dispatch=7)
    found = generator.generate(PROMPTS, max_new_tokens=20, sampling=SAMPLING, num_samples=2)
    return [completion.tokens for completion in found]


CASES = [("float32", *mesh, False) for mesh in MESHES]
CASES += [("float32", 2, 2, True), ("int8", 2, 2, False), ("int4", 1, 2, True)]
CASES += [
    pytest.param(*case, marks=pytest.mark.exhaustive)
    for case in (("bfloat16", 1, 4, False), ("fp8_e4m3", 2, 1, False), ("int4", 2, 2, False))
]


@pytest.mark.parametrize(("format", "heads", "rows", "spread"), CASES)
def test_generation_on_a_mesh_gives_the_tokens_of_one_device(
    format: str, heads: int, rows: int, spread: bool
) -> None:
    """Greedy and sampled rows, prompts in chunks, samples that share a prompt by fork."""
    assert generated(format, heads, rows, spread) == generated(format, 0, 0, False)


def served(weights: Qwen, draft: DraftModel | None = None) -> tuple[list[list[int]], Any]:
    """Six requests with a common beginning on three slots, one of them preempted, the text itself or a model drafting."""
    config = cache_config(num_blocks=16, max_seqs=3)
    shapes = [(1, 16), (3, 4)]
    engine = Engine(weights, config, draft_len=2, draft=draft, prefill_shapes=shapes)
    common = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
    handles = [engine.submit(Request([*common, i], max_tokens=12)) for i in range(6)]
    engine.step()
    engine.preempt(handles[0])
    engine.run_until_idle()
    return [handle.outputs[0].tokens for handle in handles], engine.stats


def test_engine_on_a_mesh_serves_the_tokens_and_the_hits_of_one_device() -> None:
    """Prefix hits, evictions, preemption and drafts are decided on every device alike."""
    tokens, stats = served(model())
    on_mesh, mesh_stats = served(shard(model(), make_mesh(2, 2)))
    assert on_mesh == tokens
    for name in ("found_tokens", "num_preemptions", "num_accepted", "num_free", "num_cached"):
        assert getattr(mesh_stats, name) == getattr(stats, name), name
    assert stats.found_tokens > 0
    assert stats.num_preemptions > 0


def test_draft_model_on_the_mesh_of_its_target() -> None:
    def draft_of(weights: Qwen) -> DraftModel:
        return DraftModel(weights, QWEN.num_layers, QWEN.num_kv_heads, QWEN.head_dim)

    target = shard(model(), make_mesh(2, 1))
    tokens, stats = served(target, draft_of(target))
    assert tokens == served(model())[0]
    assert stats.num_accepted == stats.num_drafted > 0  # it is the target itself
    with pytest.raises(ValueError, match=r"weights: expected all \d+ arrays on one mesh"):
        served(target, draft_of(model()))


def test_beams_on_a_mesh_are_those_of_one_device() -> None:
    config = cache_config(max_seqs=6)
    options = {"num_beams": 3, "max_new_tokens": 10, "prefill_chunk": 8}
    one = beam_search(model(), config, PROMPTS[:2], **options)
    many = beam_search(shard(model(), make_mesh(1, 2)), config, PROMPTS[:2], **options)
    assert [[h.tokens for h in found] for found in many.hypotheses] == [
        [h.tokens for h in found] for found in one.hypotheses
    ]
    assert (many.copied_blocks, many.copied_bytes) == (one.copied_blocks, one.copied_bytes)


# The books and the bytes --------------------------------------------------------------------------


def test_every_device_keeps_the_same_books_and_its_own_part_of_the_bytes() -> None:
    seen: list[PagedKVCache] = []

    def look(cache: PagedKVCache) -> None:
        def copies(x: jax.Array) -> tuple[np.ndarray, ...]:
            return tuple(np.asarray(shard_.data) for shard_ in x.addressable_shards)

        assert cache.store.kv.shape == (2, 40, 2, 8, 32)  # over the mesh
        seen.append(jax.tree.map(copies, cache))

    weights = shard(model(), make_mesh(2, 2))
    config = cache_config()
    generator = Generator(weights, config, observe=look, steps_per_dispatch=4)
    generator.generate(PROMPTS, max_new_tokens=12, sampling=SAMPLING)
    assert len(seen) > 2
    for cache in seen:
        kv = cache.store.kv
        # [layer, block, kv_head, block_size, K|V]: one of two heads
        assert kv[0].shape == (2, 40, 1, 8, 32)
        np.testing.assert_array_equal(kv[0], kv[1])  # devices 0 and 1 hold the same head
        np.testing.assert_array_equal(kv[2], kv[3])
        assert not np.array_equal(kv[0], kv[2])
        for parts in jax.tree.leaves(
            dataclasses.replace(cache, store=None), is_leaf=lambda x: type(x) is tuple
        ):
            for part in parts[1:]:
                np.testing.assert_array_equal(part, parts[0])

    layers = weights.layers
    matrices = [getattr(layers, f"{name}_proj")[...] for name in ("q", "k", "v", "o", "up", "down")]
    for matrix in (*matrices, weights.embed[...], weights.lm_head[...]):
        sizes = [part.data.nbytes for part in matrix.addressable_shards]
        assert sizes == [matrix.nbytes / 4] * 4


def decode_program(mesh: Mesh, config: CacheConfig) -> tuple[Any, Any]:
    """Returns the decode loop, compiled as users get it, and its state."""
    weights = shard(model(), mesh)
    local = device_config(config, mesh)

    def init(weights: Qwen, sampling: Any) -> Any:
        limits, eos = jnp.full(8, 32, jnp.int32), jnp.zeros(1, jnp.int32)
        return decode_loop.init_state(local, weights, sampling, limits, eos, 32)

    state = init_on(mesh, init, weights, sampling_state([SamplingParams()] * 8, [0] * 8))
    args = weights, state, jnp.int32(4)
    step = spmd(functools.partial(decode_loop.decode, local), mesh, args, specs_of(state))
    return jax.jit(step, donate_argnums=1).lower(*args).compile(SHIPPED), state


ONE_LAYER = ["all-reduce"] * 2  # after o and down; the program text has one layer
ONCE = ["all-gather", "all-reduce"]  # the logits, the embedding
SHARED = [
    "all-gather",
    "reduce-scatter",
]  # a layer's q, k and v, and what the rows' devices attended to


@pytest.mark.parametrize(
    ("format", "rows", "sent"),
    [("float32", 1, ONE_LAYER + ONCE), ("int8", 2, ONE_LAYER + ONCE + SHARED)],
)
def test_decode_on_a_mesh_is_in_place_and_sends_activations_only(
    format: str, rows: int, sent: list[str]
) -> None:
    """64 MB of pool stay where they are."""
    config = cache_config(format, num_blocks=32_768, block_size=16)
    compiled, state = decode_program(make_mesh(2, rows), config)
    mine = sum(
        shard_.data.nbytes
        for leaf in jax.tree.leaves(state)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for shard_ in leaf.addressable_shards
        if shard_.device == jax.devices()[0]
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == mine + 8 * 2 * 4  # and a key of two words for each row
    assert memory.temp_size_in_bytes <= 0.02 * config.layout.nbytes / 2
    text = compiled.as_text()
    names = re.findall(r" = \S+ (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", text)
    assert sorted(names) == sorted(sent)


# Who reads which rows -----------------------------------------------------------------------------


def attention(store: Any, view: BatchView, qkv: Any, is_shared: bool) -> tuple[Any, Any]:
    """One layer with a window and a soft cap: out [device, row, ...] of one device, or of four that share the rows."""

    def one_device(store: Any, view: BatchView, qkv: Any) -> tuple[Any, Any]:
        read = rows_to_read(view, store, "rows") if is_shared else None
        how = {"scale": 0.3, "window": 11, "soft_cap": 4.0}
        out, store = cached_attention(*qkv, store, 1, view, read=read, **how)
        return out[None], store

    if not is_shared:
        return jax.jit(one_device)(store, view, qkv)
    specs = {"in_specs": PartitionSpec(), "out_specs": (PartitionSpec("rows"), PartitionSpec())}
    shared = jax.shard_map(one_device, mesh=make_mesh(1, 4), check_vma=False, **specs)
    return jax.jit(shared)(store, view, qkv)


@pytest.mark.parametrize("format", ["float32", "int8"])
def test_attention_of_devices_with_the_same_heads_adds_up_to_that_of_one(format: str) -> None:
    """Calls of up to 5, 1, 9 and 1 tokens on uneven rows, one of which stays empty."""
    config, rng = cache_config(format), np.random.default_rng(5)
    rows = jnp.arange(8, dtype=jnp.int32)
    caches = [init_cache(config)] * 2
    for width in (5, 1, 9, 1):
        lens = rng.integers(0, width + 1, 8).astype(np.int32)
        lens[7] = 0
        q = rng.normal(size=(8, width, 4, 16)).astype(np.float32)
        k, v = rng.normal(size=(2, 8, width, 2, 16)).astype(np.float32)
        outs = []
        for i in range(2):
            cache, view = reserve(config, caches[i], rows, jnp.asarray(lens), width)
            out, store = attention(cache.store, view, (q, k, v), is_shared=i == 1)
            caches[i] = dataclasses.replace(cache, store=store)
            outs.append(np.asarray(out))
        writers = np.count_nonzero(np.abs(outs[1]).sum(axis=(2, 3, 4)), axis=0)
        np.testing.assert_array_equal(writers, lens > 0)  # the other devices' rows are zero
        np.testing.assert_array_equal(outs[1].sum(axis=0), outs[0][0])
        for mine, theirs in zip(*(jax.tree.leaves(c.store) for c in caches), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@settings(deadline=None, max_examples=60)
@given(lens=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=6, max_size=6))
def test_every_row_is_read_by_one_device_and_each_reads_about_as_much(
    lens: list[tuple[int, int]],
) -> None:
    kv_lens = np.array([max(kv, q) for kv, q in lens], np.int32)
    q_lens = np.array([q for _, q in lens], np.int32)
    parts = jax.tree.map(np.asarray, reading()(kv_lens, q_lens))
    owner = (parts.q_lens > 0).sum(axis=0)
    np.testing.assert_array_equal(owner, q_lens > 0)
    work = kv_lens.astype(int) * q_lens
    for part in range(4):
        mine = parts.q_lens[part] > 0
        np.testing.assert_array_equal(parts.kv_lens[part][mine], kv_lens[mine])
        np.testing.assert_array_equal(parts.q_lens[part], np.where(mine, q_lens, 0))
        others = ~mine & (q_lens > 0)
        for x, empty in ((parts.kv_lens, 0), (parts.positions, 0), (parts.block_tables, 40)):
            assert (x[part][others] == empty).all()
        assert work[mine].sum() <= work.sum() / 4 + work.max()


def test_equal_rows_are_divided_equally() -> None:
    lens = np.full(8, 1024, np.int32)
    parts = reading()(lens, np.ones(8, np.int32))
    np.testing.assert_array_equal(parts.q_lens, np.kron(np.eye(4), np.ones(2)))


@functools.cache
def reading() -> Any:
    """Returns the jitted function (kv_lens, q_lens) -> the views of four devices, stacked."""
    store = init_cache(cache_config()).store

    def one_device(kv_lens: Any, q_lens: Any) -> Any:
        column = jnp.arange(5, dtype=jnp.int32)[None, :]
        tables = jnp.where(column * 8 < kv_lens[:, None], column, 40)
        positions = jnp.where(
            jnp.arange(3)[None, :] < q_lens[:, None],
            (kv_lens - q_lens)[:, None] + jnp.arange(3)[None, :],
            0,
        )
        view = BatchView(tables, kv_lens, q_lens, positions)
        return jax.tree.map(lambda x: x[None], rows_to_read(view, store, "rows"))

    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec("rows")}
    return jax.jit(jax.shard_map(one_device, mesh=make_mesh(1, 4), check_vma=False, **specs))


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_kv_heads", "num_devices", "shape"),
    [
        (3, 2, (1, 2)),
        (8, 4, (4, 1)),
        (2, 4, (2, 2)),
        (4, 8, (4, 2)),
        (6, 4, (2, 2)),
        (1, 4, (1, 4)),
    ],
)
def test_heads_are_divided_as_far_as_they_go(
    num_kv_heads: int, num_devices: int, shape: tuple[int, int]
) -> None:
    """Field case M8: 2 heads on 4 devices are one head each, twice."""
    assert mesh_shape(num_kv_heads, num_devices) == shape


def test_bad_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices: expected at least 8 \* 1, got 4"):
        make_mesh(8)
    with pytest.raises(ValueError, match=r"num_row_shards: expected at least 1, got 0"):
        make_mesh(2, 0)
    with pytest.raises(
        ValueError, match=r"num_kv_heads: expected a multiple of 4 for this mesh, got 2"
    ):
        shard(model(), make_mesh(4))
    narrow = random_model(dataclasses.replace(QWEN, intermediate_size=49), jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"intermediate_size: expected a multiple of 2 for this mesh, got 49"
    ):
        shard(narrow, make_mesh(1, 2))
    with pytest.raises(
        ValueError, match=r"mesh: expected the axes \('heads', 'rows'\), got \('x',\)"
    ):
        shard(model(), Mesh(np.array(jax.devices()[:2]), ("x",)))
    divided = shard(model(), make_mesh(1, 2))
    with pytest.raises(ValueError, match="model: expected one on a single device"):
        shard(divided, make_mesh(1, 2))
    with pytest.raises(
        ValueError, match=r"num_kv_heads: expected a multiple of the mesh's 2 head shards, got 3"
    ):
        device_config(dataclasses.replace(cache_config(), num_kv_heads=3), make_mesh(2))
    assert mesh_of(model()) is None
    assert mesh_of(divided) == make_mesh(1, 2)
    with pytest.raises(
        ValueError, match=r"weights: expected all \d+ arrays on one mesh, got \d+ on 1"
    ):
        mesh_of((divided, model()))
    with pytest.raises(ValueError, match=r"weights: .* on 2"):
        mesh_of((divided, shard(model(), make_mesh(2, 1))))
