"""The memory profile counts the bytes of the real arrays."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from fake_model import fake_model

from jaxkv import CacheConfig, PagedKVCache, fork, init_cache, memory_profile, release, reserve
from jaxkv.generate import Generator
from jaxkv.profile import MemoryProfile, arrays_bytes


def _config(format: str = "float32", **sizes: int) -> CacheConfig:
    defaults = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}
    defaults |= {"num_blocks": 10, "max_seqs": 3, "max_blocks_per_seq": 5}
    return CacheConfig(**(defaults | sizes), format=format)


def _filled(config: CacheConfig, lens: list[int]) -> PagedKVCache:
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)
    cache, _ = reserve(config, init_cache(config), rows, jnp.array(lens, jnp.int32), max(lens))
    return cache


@pytest.mark.parametrize(("format", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_profile_of_each_format_counts_its_real_width(format: str, itemsize: int) -> None:
    config = _config(format)
    profile = memory_profile(_filled(config, [5, 0, 9]))
    block_bytes = 3 * 2 * 4 * (2 * 16) * itemsize
    assert profile.kv_total_bytes == 10 * block_bytes
    assert profile.kv_used_bytes == profile.kv_peak_bytes == (2 + 3) * block_bytes
    assert (profile.used_blocks, profile.num_seqs, profile.num_tokens) == (5, 2, 14)
    assert math.isclose(profile.utilisation, 0.5)
    assert math.isclose(profile.fragmentation, 6 / 20)
    assert profile.kv_format == format
    assert profile.kv_padded_bytes is None


def test_profile_bookkeeping_is_everything_but_the_pool() -> None:
    config = _config()
    cache = init_cache(config)
    # ref counts, free stack and num_free; tables and kv_lens; bits and need_blocks: all int32
    expected = 4 * (10 + 10 + 1 + 3 * 5 + 3 + 1 + 1)
    profile = memory_profile(cache)
    assert profile.bookkeeping_bytes == expected
    assert profile.bookkeeping_bytes + profile.kv_total_bytes == cache.nbytes


def test_profile_shared_blocks_count_once_and_name_the_saving() -> None:
    config = _config()
    cache = fork(config, _filled(config, [9, 0, 0]), jnp.array([0, 0]), jnp.array([1, 2]))
    profile = memory_profile(cache)
    block_bytes = profile.kv_total_bytes // 10
    assert profile.used_blocks == 3
    assert profile.num_tokens == 27
    assert profile.shared_saved_bytes == 2 * 3 * block_bytes
    assert math.isclose(profile.fragmentation, 3 / 12)


def test_profile_of_an_empty_cache_uses_nothing() -> None:
    config = _config()
    cache = release(config, _filled(config, [5, 1, 0]), jnp.array([True, True, False]))
    profile = memory_profile(cache, peak_blocks=3)
    assert (profile.used_blocks, profile.kv_used_bytes, profile.fragmentation) == (0, 0, 0.0)
    assert profile.kv_peak_bytes == 3 * profile.kv_total_bytes // 10


@pytest.mark.parametrize("peak", [4, 11, -1])
def test_profile_impossible_peak_raises(peak: int) -> None:
    cache = _filled(_config(), [5, 0, 9])
    with pytest.raises(ValueError, match=r"peak_blocks: expected 5 .* to 10 .*, got "):
        memory_profile(cache, peak_blocks=peak)


@pytest.mark.parametrize(
    ("format", "padded_rows", "itemsize"), [("float32", 4, 4), ("bfloat16", 4, 2)]
)
def test_profile_on_tpu_adds_the_padding(format: str, padded_rows: int, itemsize: int) -> None:
    profile = memory_profile(init_cache(_config(format)), platform="tpu")
    assert profile.kv_padded_bytes == 3 * 10 * 2 * padded_rows * 128 * itemsize
    assert (
        profile.kv_padded_bytes == 4 * profile.kv_total_bytes
    )  # width 32 fills a quarter of 128 lanes


def test_profile_of_codes_on_tpu_adds_the_padding() -> None:
    """int4, 2 heads of 32, blocks of 8: codes [2, 4, 64], K's affine [2, 128], V's [2, 128], open [2, 8, 64]."""
    config = _config("int4", head_dim=32, block_size=8)
    profile = memory_profile(init_cache(config), platform="tpu")
    sealed = 2 * 4 * 128 + 2 * 128 * 2 + 2 * 128 * 2
    assert profile.kv_padded_bytes == 3 * (10 * sealed + config.max_seqs * 2 * 8 * 128 * 2)


def test_profile_weights_are_the_arrays_and_tied_ones_count_once() -> None:
    table = jnp.zeros((7, 5), jnp.float32)
    weights = {"embed": table, "head": table, "norm": jnp.ones(5, jnp.bfloat16)}
    assert arrays_bytes(weights) == 7 * 5 * 4 + 5 * 2
    profile = memory_profile(init_cache(_config()), model=weights)
    assert profile.weights_bytes == 150
    assert memory_profile(init_cache(_config())).weights_bytes is None


def test_profile_to_dict_is_json_and_complete() -> None:
    profile = memory_profile(_filled(_config(), [5, 0, 9]))
    assert MemoryProfile(**json.loads(json.dumps(profile.to_dict()))) == profile
    assert set(profile.to_dict()) == {field.name for field in dataclasses.fields(profile)}


def test_generator_observe_sees_the_cache_at_every_look() -> None:
    model = fake_model(num_layers=1)
    config = _config(num_layers=1, head_dim=8, num_blocks=12, max_seqs=2)
    seen: list[MemoryProfile] = []

    def look(cache: PagedKVCache) -> None:
        peak = generator.stats.peak_blocks
        seen.append(memory_profile(cache, model=model, peak_blocks=peak))
        assert generator.stats.used_blocks == seen[-1].used_blocks

    generator = Generator(model, config, steps_per_dispatch=3, observe=look)
    generator.generate([[1, 2, 3, 4, 5], [6]], max_new_tokens=10)
    assert [profile.num_tokens for profile in seen] == [
        6,
        12,
        18,
        0,
    ]  # 9 fed back: after 0, 3, 6 steps
    assert [profile.used_blocks for profile in seen] == [3, 3, 5, 0]
    assert seen[-1].peak_blocks == generator.stats.peak_blocks == 4 + 3
    assert seen[0].weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model))
