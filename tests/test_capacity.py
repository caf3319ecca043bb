"""Capacity plans: the budget, what fits in it, shards, and the plot's series."""

import dataclasses
import json
from typing import Any

import jax
import pytest

from jaxkv import capacity, format_bytes
from jaxkv.cache import init_cache
from jaxkv.capacity import CapacityPlan, kv_series, plan_capacity
from jaxkv.config import CacheConfig
from jaxkv.format_bytes import KVOptions
from jaxkv.model_shape import ModelShape, model_shape
from jaxkv.profile import arrays_bytes

GIB = 2**30
ALL_FORMATS = [*format_bytes.KV_FORMATS, *format_bytes.QUANTISED_FORMATS]
ALL_OPTIONS = KVOptions(symmetric_keys=True, value_group=4, num_wide_layers=1)
QWEN_05B = model_shape(
    24,
    14,
    2,
    64,
    hidden_size=896,
    intermediate_size=4864,
    vocab_size=151_936,
    tied_embeddings=True,
    qkv_bias=True,
    max_context_len=32_768,
)


def plan(shape: ModelShape = QWEN_05B, **options: Any) -> CapacityPlan:
    return plan_capacity(shape, **{"free_bytes": 16 * GIB, "context_len": 2048, **options})


# Budget -------------------------------------------------------------------------------------------


def test_kv_budget_bytes_used_device_counts_free_memory_only() -> None:
    """Field case Q5: 100 in all, 20 in use."""
    free = capacity.device_free_bytes(100, 20)
    assert capacity.kv_budget_bytes(free) == 80
    assert capacity.kv_budget_bytes(free, weights_bytes=30, reserve_fraction=0.25) == 30


def test_kv_budget_bytes_weights_too_large_says_need_and_free() -> None:
    with pytest.raises(ValueError, match="more than weights 70 B \\+ reserve 10 B, got 80 B"):
        capacity.kv_budget_bytes(80, weights_bytes=70, reserve_fraction=0.125)
    with pytest.raises(ValueError, match="used_bytes: expected at most total_bytes 100, got 101"):
        capacity.device_free_bytes(100, 101)
    with pytest.raises(ValueError, match="reserve_fraction: expected 0 <= fraction < 1, got 1"):
        capacity.kv_budget_bytes(80, reserve_fraction=1.0)


def test_bookkeeping_bytes_any_format_is_int32() -> None:
    """Field case Q4: side arrays at their own width, not the pool's."""
    # ref_counts and free_stack [10], tables [3, 4], kv_lens [3], num_free, status [2]: 38 int32.
    assert capacity.bookkeeping_bytes(10, 3, 4) == 4 * 38
    half, full = plan(kv_format="float16"), plan(kv_format="float32")
    for made in (half, full):
        assert made.bookkeeping_bytes == capacity.bookkeeping_bytes(
            made.num_blocks, made.concurrency, 128
        )


@pytest.mark.parametrize(
    ("kv_format", "options"),
    [*((name, KVOptions()) for name in ALL_FORMATS), ("int4", ALL_OPTIONS), ("int8", ALL_OPTIONS)],
)
def test_capacity_bytes_real_cache_are_the_same(kv_format: str, options: KVOptions) -> None:
    config = CacheConfig(3, 3, 8, 4, 10, 3, 4, format=kv_format, **dataclasses.asdict(options))
    cache = init_cache(config)
    shape = model_shape(3, 6, 3, 8)
    sizes = capacity.shard_shape(shape, num_blocks=10, block_size=4)
    pool = capacity.pool_bytes(sizes, kv_format, kv_options=options)
    open_block = shape.open_block_bytes(kv_format, block_size=4, kv_options=options)
    assert capacity.open_block_bytes(sizes, kv_format, kv_options=options) == open_block
    stored = pool + 3 * open_block
    assert arrays_bytes(cache.store) == stored
    assert cache.nbytes == stored + capacity.bookkeeping_bytes(10, 3, 4, kv_format)


# Plan ---------------------------------------------------------------------------------------------


def test_plan_qwen25_05b_16_gib_counts_everything() -> None:
    made = plan(reserve_fraction=0.0)
    assert made.weights_bytes == 2 * 494_032_768
    assert made.budget_bytes == 16 * GIB - made.weights_bytes
    assert made.bytes_per_token == 12_288
    assert made.block_bytes == 16 * 12_288
    assert made.sequence_bytes == made.sequence_block_bytes == 24 * 2**20
    assert made.num_blocks == (made.budget_bytes - 12) // (made.block_bytes + 16)
    assert made.num_tokens == 16 * made.num_blocks
    assert made.concurrency == made.num_blocks // 128
    assert made.kv_to_weights == made.pool_bytes / made.weights_bytes
    assert made.kv_to_weights == pytest.approx(16.3, abs=0.1)


@pytest.mark.parametrize("reserve", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("context_len", [1, 100, 2048, 32_768])
@pytest.mark.parametrize("target", ["dense", "tpu"])
def test_plan_any_budget_pool_fits_and_is_not_wasteful(
    reserve: float, context_len: int, target: str
) -> None:
    made = plan(reserve_fraction=reserve, context_len=context_len, target=target)
    used = made.pool_bytes + made.bookkeeping_bytes
    assert used <= made.budget_bytes
    assert made.budget_bytes + made.weights_bytes + made.reserve_bytes == made.free_bytes
    assert made.budget_bytes - used < 2 * made.block_bytes + 16 * made.num_blocks


def test_plan_weights_loaded_are_not_subtracted_again() -> None:
    before = plan(reserve_fraction=0.0)
    after = plan(
        free_bytes=16 * GIB - before.weights_bytes, weights_loaded=True, reserve_fraction=0.0
    )
    assert after.num_blocks == before.num_blocks
    assert after.kv_to_weights == before.kv_to_weights


def test_plan_sequence_longer_than_the_pool_warns_with_need() -> None:
    made = plan(free_bytes=5 * GIB // 4, context_len=32_768)
    assert made.concurrency == 0
    assert any("one sequence needs 2048 blocks" in text for text in made.warnings)


def test_plan_no_room_beside_the_weights_raises() -> None:
    with pytest.raises(ValueError, match="free_bytes: expected more than weights 988065536 B"):
        plan(free_bytes=GIB // 2)


def test_plan_tail_rounding_counts_whole_blocks() -> None:
    made = plan(context_len=17)
    assert made.blocks_per_sequence == 2
    assert made.sequence_bytes == 17 * 12_288
    assert made.sequence_block_bytes == 32 * 12_288


def test_plan_unknown_weights_need_their_bytes() -> None:
    bare = model_shape(24, 14, 2, 64)
    with pytest.raises(NotImplementedError, match="hidden_size"):
        plan(bare)
    assert plan(bare, model_weights_bytes=GIB).weights_bytes == GIB
    assert plan(bare, model_weights_bytes=0).kv_to_weights is None


def test_plan_sliding_and_mla_warn_what_the_cache_does() -> None:
    slides = model_shape(4, 4, 2, 64, sliding_window=128, sliding_layers=(2, 3))
    made = plan(slides, model_weights_bytes=0)
    assert made.reachable_bytes == (2 * 2048 + 2 * 128) * 512
    assert made.sequence_bytes == 4 * 2048 * 512
    assert any("sliding_layers: 2 layers" in text for text in made.warnings)
    latent = model_shape(4, 8, 8, 128, kv_lora_rank=512, qk_rope_head_dim=64)
    made = plan(latent, model_weights_bytes=0, tensor_parallel=4)
    assert made.bytes_per_token == 4 * 576 * 2
    assert any("kv_lora_rank" in text for text in made.warnings)


# Quantised formats --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_format", "options"),
    [*((name, KVOptions()) for name in format_bytes.QUANTISED_FORMATS), ("int4", ALL_OPTIONS)],
)
@pytest.mark.parametrize("context_len", [1, 64, 2048, 5000])
def test_plan_quantised_counts_an_open_block_for_each_sequence(
    kv_format: str, options: KVOptions, context_len: int
) -> None:
    """The plan's pool, built as a cache, fits the budget; one block more (or the sequence it completes) does not."""
    shape = model_shape(3, 4, 2, 64)
    made = plan(shape, kv_format=kv_format, context_len=context_len, free_bytes=40 * 2**20,
                model_weights_bytes=0, reserve_fraction=0.0, kv_options=options)  # fmt: skip
    own = dataclasses.asdict(options)

    def whole_bytes(num_blocks: int) -> int:
        """Counts by CacheConfig's own layout and by the arrays of an empty cache's bookkeeping."""
        seqs, per_seq = num_blocks // made.blocks_per_sequence, made.blocks_per_sequence
        sizes = (made.block_size, num_blocks, seqs, per_seq)
        config = CacheConfig(3, 2, 64, *sizes, format=kv_format, **own)
        cache = jax.eval_shape(lambda: init_cache(config))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    assert made.block_size == format_bytes.default_block_size(kv_format)
    assert made.concurrency == made.num_blocks // made.blocks_per_sequence > 0
    used = made.pool_bytes + made.open_bytes + made.bookkeeping_bytes
    assert whole_bytes(made.num_blocks) == used <= made.budget_bytes
    # Bookkeeping is bounded per block, 16 bytes: a handful of blocks may be left unused.
    slack = 1 + 16 * made.num_blocks // made.block_bytes
    assert whole_bytes(made.num_blocks + 1 + slack) > made.budget_bytes
    assert made.sequence_block_bytes == (
        made.blocks_per_sequence * made.block_bytes + made.open_block_bytes
    )
    layers = 3 - 2 * options.num_wide_layers
    assert made.open_bytes == made.concurrency * layers * 2 * made.block_size * 128 * 2


def test_plan_quantised_holds_more_and_is_json() -> None:
    """Qwen2.5-0.5B in 16 GiB at 2,048 tokens: 12,288 bytes a token against 6,528, 6,528 and 3,456."""
    plans = {name: plan(kv_format=name) for name in ("bfloat16", *format_bytes.QUANTISED_FORMATS)}
    assert [p.bytes_per_token for p in plans.values()] == [12_288, 6_528, 6_528, 3_456]
    gain = {name: p.num_tokens / plans["bfloat16"].num_tokens for name, p in plans.items()}
    # One open block beside 32 sealed ones costs some of what the codes save.
    for name in ("int8", "fp8_e4m3"):
        assert gain[name] == pytest.approx(2048 * 12_288 / (2048 * 6528 + 64 * 12_288), rel=1e-3)
    assert gain["int4"] == pytest.approx(2048 * 12_288 / (2048 * 3456 + 64 * 12_288), rel=1e-3)
    made = plans["int4"]
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
    assert made.reachable_bytes == made.sequence_bytes == 2048 * 3456
    series = kv_series(QWEN_05B, [2048], num_sequences=3, kv_format="int4")
    assert series.kv_bytes == (3 * (2048 * 3456 + 64 * 12_288),)
    assert made.kv_to_weights == (made.pool_bytes + made.open_bytes) / made.weights_bytes
    # Scales of one head take what those of two heads take: two rows of 128 numbers for K and for V.
    half = plan(kv_format="int8", tensor_parallel=2)
    assert 2 * half.block_bytes == plans["int8"].block_bytes + 24 * 1024
    assert half.open_block_bytes == 64 * 12_288 // 2
    assert plan(kv_format="int8", block_size=32).bytes_per_token == 24 * (2 * (128 + 8) + 512 // 32)


def test_plan_large_quantised_pool_warns_by_its_codes() -> None:
    """Field case F1: a pool of 2^31 elements is 2^31 int8 codes, but half as many bytes of int4."""
    shape = model_shape(1, 16, 16, 128)
    sizes = {"model_weights_bytes": 0, "free_bytes": 2_600_000_000, "reserve_fraction": 0.0}
    assert any("past 2^31" in text for text in plan(shape, kv_format="int8", **sizes).warnings)
    four = plan(shape, kv_format="int4", **{**sizes, "free_bytes": 2_000_000_000})
    assert four.num_tokens * 16 * 256 > 2**31
    assert four.warnings == ()


def test_plan_quantised_refuses_what_is_not_known() -> None:
    latent = model_shape(4, 8, 8, 128, kv_lora_rank=512, qk_rope_head_dim=64)
    for call in (
        lambda: plan(latent, kv_format="int8", model_weights_bytes=0),
        lambda: kv_series(latent, [64], kv_format="int8"),
        lambda: latent.bytes_per_token("int4"),
    ):
        with pytest.raises(NotImplementedError, match=r"MLA \(kv_lora_rank 512\), got 'int[48]'"):
            call()
    with pytest.raises(ValueError, match="block_size: expected an even number for int4, got 7"):
        plan(kv_format="int4", block_size=7)
    with pytest.raises(ValueError, match="float32, float16, bfloat16; got 'int8'"):
        plan(weights_format="int8")
    short = plan(kv_format="int8", free_bytes=5 * GIB // 4, context_len=2**20)
    assert any("blocks and an open block" in text for text in short.warnings)


# Shards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_heads", "shards", "held"), [(2, 4, 1), (4, 8, 1), (8, 4, 2)])
def test_plan_shards_count_replicated_heads(kv_heads: int, shards: int, held: int) -> None:
    """Field case M8: one device's memory, with the replicated head counted on each."""
    shape = model_shape(2, 16, kv_heads, 64)
    made = plan(shape, model_weights_bytes=8 * 2**20, tensor_parallel=shards)
    assert made.bytes_per_token == 2 * held * 2 * 64 * 2
    assert made.weights_bytes == 8 * 2**20 // shards
    assert made.reachable_bytes == made.sequence_bytes == 2048 * made.bytes_per_token


def test_plan_kv_heads_not_sharding_are_rejected() -> None:
    with pytest.raises(ValueError, match="divisor or a multiple of 6 kv heads, got 4"):
        plan(model_shape(2, 12, 6, 64), model_weights_bytes=0, tensor_parallel=4)
    with pytest.raises(ValueError, match="divisor of 14 query heads, got 4"):
        plan(tensor_parallel=4)
    with pytest.raises(ValueError, match="tensor_parallel: expected an integer >= 1, got 0"):
        plan(tensor_parallel=0)


# Integer width and padding ------------------------------------------------------------------------


def test_plan_large_pool_warns_about_64_bit_offsets() -> None:
    """Field cases F1 and F2: a flat offset into the stacked pool passes int32."""
    small = plan(free_bytes=2 * GIB)
    assert small.warnings == ()
    large = plan(free_bytes=16 * GIB)
    assert any("past 2^31; a flat offset needs 64 bits" in text for text in large.warnings)


def test_plan_more_blocks_than_int32_ids_raises() -> None:
    tiny = model_shape(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"num_blocks: .*use a larger block_size"):
        plan(tiny, free_bytes=2**40, model_weights_bytes=0, block_size=1)


def test_plan_tpu_narrow_rows_count_padding() -> None:
    shape = model_shape(2, 8, 2, 80)
    dense, tpu = (plan(shape, model_weights_bytes=0, target=t) for t in ("dense", "tpu"))
    assert tpu.block_bytes == dense.block_bytes * 256 // 160
    assert any("pool: 16 rows by width 160 do not fill whole" in text for text in tpu.warnings)
    assert plan(target="tpu").block_bytes == plan().block_bytes
    # Of int4 with three groups V's three rows take those of four; codes of whole lanes and K's rows fill their tiles.
    odd = {"kv_format": "int4", "model_weights_bytes": 0}
    dense, tpu = (
        plan(model_shape(2, 8, 2, 192), **odd, kv_options=KVOptions(value_group=64), target=t)
        for t in ("dense", "tpu")
    )
    assert tpu.block_bytes == dense.block_bytes + 2 * 128 * 2
    assert tpu.open_block_bytes == dense.open_block_bytes
    padded = [text.split(" do not")[0] for text in tpu.warnings if "whole TPU tiles" in text]
    assert padded == ["value_affine: 3 rows by width 128"]
    assert plan(kv_format="int8", target="tpu").block_bytes == plan(kv_format="int8").block_bytes
    with pytest.raises(ValueError, match="target: expected one of dense, tpu; got 'gpu'"):
        plan(target="gpu")


# Output -------------------------------------------------------------------------------------------


def test_plan_to_dict_round_trips_through_json() -> None:
    made = plan()
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
    assert made.to_dict()["num_blocks"] == made.num_blocks


def test_kv_series_document_case_crosses_the_weights() -> None:
    series = kv_series(QWEN_05B, [2048, 8192], num_sequences=32, kv_format="float16")
    assert series.kv_bytes == (768 * 2**20, 3 * GIB)
    assert series.weights_bytes == 988_065_536
    assert json.loads(json.dumps(series.to_dict())) == series.to_dict()


def test_kv_series_default_lengths_end_at_the_context() -> None:
    assert kv_series(QWEN_05B).context_lens == (1024, 2048, 4096, 8192, 16_384, 32_768)
    odd = model_shape(2, 4, 2, 16, max_context_len=5000)
    assert kv_series(odd).context_lens == (1024, 2048, 4096, 5000)
    assert kv_series(odd).weights_bytes is None
    assert kv_series(model_shape(2, 4, 2, 16, max_context_len=512)).context_lens == (512,)
