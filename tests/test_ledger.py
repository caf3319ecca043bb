"""The ledger's formulas against the seed documents' numbers and plain counting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import ledger

MIB = 2**20
GIB = 2**30
QWEN_05B = (24, 2, 64)  # layers, kv heads, head_dim
LLAMA_8B = (32, 8, 128)


# Volume -------------------------------------------------------------------------------------------


def test_bytes_per_token_per_layer_qwen25_05b_is_512() -> None:
    assert ledger.bytes_per_token_per_layer(2, 64, "float16") == 512


def test_bytes_per_token_qwen25_05b_is_12288() -> None:
    assert ledger.bytes_per_token(*QWEN_05B, "float16") == 12_288


def test_sequence_bytes_qwen25_05b_2048_tokens_is_24_mib() -> None:
    one = ledger.sequence_bytes(2048, ledger.bytes_per_token(*QWEN_05B, "float16"))
    assert one == 24 * MIB
    assert round(100 * one / GIB, 2) == 2.34


def test_bytes_per_token_per_layer_mha_is_seven_times_gqa() -> None:
    mha = ledger.bytes_per_token_per_layer(14, 64, "float16")
    assert mha == 3584
    assert mha == 7 * ledger.bytes_per_token_per_layer(2, 64, "float16")
    assert ledger.gqa_saving(14, 2) == 7.0


def test_sequence_bytes_llama3_8b_4096_tokens_is_512_mib() -> None:
    one = ledger.sequence_bytes(4096, ledger.bytes_per_token(*LLAMA_8B, "float16"))
    assert one == 512 * MIB
    assert 200 * one == 100 * GIB


@pytest.mark.parametrize(
    ("context_len", "num_sequences", "kv_bytes", "ratio"),
    [(2048, 8, 192 * MIB, 0.1875), (8192, 32, 3 * GIB, 3.0), (32768, 64, 24 * GIB, 24.0)],
)
def test_kv_to_weights_document_table_is_reproduced(
    context_len: int, num_sequences: int, kv_bytes: int, ratio: float
) -> None:
    per_token = ledger.bytes_per_token(*QWEN_05B, "float16")
    total = num_sequences * ledger.sequence_bytes(context_len, per_token)
    assert total == kv_bytes
    assert ledger.kv_to_weights(total, GIB) == ratio


def test_bytes_per_token_float32_is_twice_16_bit() -> None:
    assert ledger.bytes_per_token(*QWEN_05B, "float32") == 24_576
    assert ledger.bytes_per_token(*QWEN_05B, "bfloat16") == 12_288


def test_mla_bytes_deepseek_latent_is_1152() -> None:
    assert ledger.mla_bytes_per_token_per_layer(512, 64, "bfloat16") == 1152


def test_element_bits_unknown_format_names_value_and_choices() -> None:
    with pytest.raises(ValueError, match=r"float32, float16, bfloat16; got 'bf16'"):
        ledger.element_bits("bf16")


@pytest.mark.parametrize("bad", [0, -2, 2.0, True, None])
def test_bytes_per_token_bad_heads_raises_naming_field(bad: object) -> None:
    with pytest.raises(ValueError, match="num_kv_heads: expected an integer >= 1"):
        ledger.bytes_per_token(24, bad, 64)  # type: ignore[arg-type]


def test_gqa_saving_heads_not_dividing_raises() -> None:
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of 14, got 4"):
        ledger.gqa_saving(14, 4)


# Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "blocks"), [(-3, 0), (0, 0), (1, 1), (4, 1), (5, 2)])
def test_num_blocks_needed_edges_is_ceil(num_tokens: int, blocks: int) -> None:
    assert ledger.num_blocks_needed(num_tokens, 4) == blocks


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8])
def test_new_blocks_for_append_decode_covers_each_position(prompt_len: int) -> None:
    """Field case A1: before writing position p the table has p // 4 + 1 blocks."""
    blocks = ledger.num_blocks_needed(prompt_len, 4)
    for position in range(prompt_len, prompt_len + 6):
        blocks += ledger.new_blocks_for_append(position, 1, 4)
        assert blocks == position // 4 + 1


def test_block_token_ranges_ten_tokens_by_four_is_half_open() -> None:
    """Field case A3: sizes 4, 4, 2 (an inclusive end gives 5, 5, 2)."""
    ranges = ledger.block_token_ranges(10, 4)
    assert ranges == [(0, 4), (4, 8), (8, 10)]
    assert [end - start for start, end in ranges] == [4, 4, 2]


@given(kv_len=st.integers(0, 200), new=st.integers(0, 200), size=st.integers(1, 64))
def test_new_blocks_for_append_any_lengths_equals_difference(
    kv_len: int, new: int, size: int
) -> None:
    before = ledger.num_blocks_needed(kv_len, size)
    after = ledger.num_blocks_needed(kv_len + new, size)
    assert ledger.new_blocks_for_append(kv_len, new, size) == after - before


@given(num_tokens=st.integers(0, 500), size=st.integers(1, 64))
def test_tail_waste_any_length_completes_whole_blocks(num_tokens: int, size: int) -> None:
    blocks = ledger.num_blocks_needed(num_tokens, size)
    assert ledger.tail_waste(num_tokens, size) == blocks * size - num_tokens
    ranges = ledger.block_token_ranges(num_tokens, size)
    assert len(ranges) == blocks == ledger.release_cost(num_tokens, size)
    assert [t for start, end in ranges for t in range(start, end)] == list(range(num_tokens))


# Fragmentation ------------------------------------------------------------------------------------


def test_fragmentation_two_sequences_counts_free_slots() -> None:
    # 5 tokens in blocks 7, 2 and 4 in block 0, of 4 slots each: 3 of 12 slots are free.
    assert ledger.fragmentation([[7, 2], [0]], [5, 4], 4) == 0.25


def test_fragmentation_shared_block_counts_once() -> None:
    # Two forks of 6 tokens over blocks 3 and 1: 2 of 8 slots are free, not 4 of 16.
    assert ledger.fragmentation([[3, 1], [3, 1]], [6, 6], 4) == 0.25
    # One fork went on in its own copy of the open block: blocks 3, 1, 5 hold 4, 2, 3 tokens.
    assert ledger.fragmentation([[3, 1], [3, 5]], [6, 7], 4) == 0.25


def test_fragmentation_truncated_sibling_counts_the_fuller_owner() -> None:
    assert ledger.fragmentation([[3, 1], [3]], [8, 1], 4) == 0.0


def test_fragmentation_nothing_live_is_zero() -> None:
    assert ledger.fragmentation([], [], 4) == 0.0
    assert ledger.fragmentation(np.full((2, 3), 9), np.zeros(2, np.int32), 4) == 0.0


def test_fragmentation_sentinel_past_the_length_is_ignored() -> None:
    tables = np.array([[1, 9, 9], [0, 2, 9]], dtype=np.int32)
    assert ledger.fragmentation(tables, np.array([3, 8], dtype=np.int32), 4) == 1 / 12


def test_fragmentation_short_table_raises_with_need() -> None:
    with pytest.raises(ValueError, match=r"expected 2 block ids >= 0 for kv_len 5, got \[7\]"):
        ledger.fragmentation([[7]], [5], 4)
    with pytest.raises(ValueError, match="kv_lens: expected 1 entries, got 2"):
        ledger.fragmentation([[7]], [4, 4], 4)


@given(
    size=st.integers(1, 8),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=6),
)
def test_fragmentation_any_tables_equals_plain_count(
    size: int, rows: list[tuple[int, int]]
) -> None:
    """Against a slot-by-slot count; rows overlap because their first block ids collide."""
    tables = [[first + i for i in range(-(-n // size))] for n, first in rows]
    written = {
        (t[p // size], p % size) for t, (n, _) in zip(tables, rows, strict=True) for p in range(n)
    }
    blocks = {block for block, _ in written}
    expected = 1 - len(written) / (len(blocks) * size) if blocks else 0.0
    assert ledger.fragmentation(tables, [n for n, _ in rows], size) == pytest.approx(expected)


# Sharing and recomputation ------------------------------------------------------------------------


def test_sharing_saving_four_branches_keeps_one_copy() -> None:
    prefix = ledger.sequence_bytes(1024, ledger.bytes_per_token(*QWEN_05B))
    assert ledger.sharing_saving(4, prefix) == 3 * 12 * MIB
    assert ledger.sharing_saving(1, prefix) == 0


def test_recompute_saving_2048_tokens_is_about_half_the_length() -> None:
    assert ledger.uncached_token_forwards(2048) == sum(range(1, 2049))
    assert ledger.recompute_saving(2048) == 1024.5


def test_decode_read_bytes_batch_grows_linearly() -> None:
    assert ledger.decode_read_bytes([2048] * 3, 12_288) == 3 * 24 * MIB
    assert ledger.decode_read_bytes([], 12_288) == 0
