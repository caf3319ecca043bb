"""The xla and reference paths of paged attention against the float64 oracle and against known answers."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.attention import TOLERANCES, paged_attention_oracle, worst_row_error

from pallas_kernels.layout import BatchView, KVLayout, KVStore, encode, kv_format
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import CASES, Case, Inputs, make_inputs
from pallas_kernels.paged_attention.xla import _items

IMPLEMENTATIONS = ("xla", "reference")
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.partial(
    jax.jit,
    static_argnames=("implementation", "return_lse"),
)
def attention(q: Any, store: KVStore, layer: Any, view: BatchView, **options: Any) -> Any:
    """The op under jit; scale, soft cap and window are traced."""
    return paged_attention(q, store, layer, view, **options)


def run(case: Case, inputs: Inputs, implementation: str, **options: Any) -> tuple[Any, Any]:
    """Runs a case with its own scale, soft cap and window."""
    return attention(
        inputs.q,
        inputs.store,
        inputs.layer,
        inputs.view,
        scale=case.softmax_scale,
        soft_cap=case.soft_cap,
        window=case.window,
        implementation=implementation,
        return_lse=True,
        **options,
    )


def oracle(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Runs the oracle on the numbers of a case."""
    view = jax.tree.map(np.asarray, inputs.view)
    return paged_attention_oracle(
        np.asarray(inputs.q.astype(jnp.float32)),
        inputs.kv,
        case.layer,
        view.block_tables,
        view.kv_lens,
        view.q_lens,
        scale=case.softmax_scale,
        soft_cap=case.soft_cap,
        window=case.window,
    )


def small(
    k: Any, v: Any, *, kv_len: int | None = None, block_size: int = 4, format: str = "float32"
) -> tuple[KVStore, BatchView]:
    """Returns a store and a decode view of one sequence with the given k, v [token, kv_head, head_dim].

    The blocks lie in reverse order, so block 0 is the last one; what is not written is NaN.
    """
    k, v = np.asarray(k, np.float32), np.asarray(v, np.float32)
    tokens, heads, head_dim = k.shape
    columns = -(-tokens // block_size)
    layout = KVLayout(1, columns, heads, block_size, head_dim, kv_format(format), as_bits=True)
    table = np.arange(columns)[::-1]
    kv = np.full(layout.shape, np.nan, np.float32)
    for token in range(tokens):
        kv[0, table[token // block_size], :, token % block_size] = np.concatenate(
            [k[token], v[token]], -1
        )
    kv_len = tokens if kv_len is None else kv_len
    view = BatchView(
        block_tables=jnp.asarray(table[None], jnp.int32),
        kv_lens=jnp.array([kv_len], jnp.int32),
        q_lens=jnp.array([1], jnp.int32),
        positions=jnp.array([[kv_len - 1]], jnp.int32),
    )
    return KVStore(encode(layout, jnp.asarray(kv)), layout), view


# Every shape ------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_named_case_matches_oracle(case: Case, implementation: str) -> None:
    """Field cases A6-A9, E1, E2, J1: lengths around edges, empty rows, shuffled blocks, NaN where dead."""
    inputs = make_inputs(case)
    out, lse = run(case, inputs, implementation)
    want, want_lse = oracle(case, inputs)
    assert out.dtype == inputs.q.dtype
    assert worst_row_error(out, want) <= TOLERANCES[case.format]
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


MIXED = Case(
    "mixed", num_q_heads=6, num_kv_heads=3, head_dim=8, block_size=4, lens=((3, 11), (1, 4), (2, 2))
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kv_lens=st.lists(st.integers(0, 24), min_size=3, max_size=3),
    q_lens=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    window=st.integers(1, 30),
    soft_cap=st.sampled_from([0.5, 3.0, 1e4]),
    shuffle=st.integers(0, 2**31),
    implementation=st.sampled_from(IMPLEMENTATIONS),
)
def test_attention_random_lengths_match_oracle(
    kv_lens: list[int],
    q_lens: list[int],
    window: int,
    soft_cap: float,
    shuffle: int,
    implementation: str,
) -> None:
    """Any lengths, block order, window and soft cap with one compile per implementation."""
    lens = tuple((min(q, kv), kv) for q, kv in zip(q_lens, kv_lens, strict=True))
    case = dataclasses.replace(
        MIXED, lens=lens, window=window, soft_cap=soft_cap, query_len=5, max_blocks=7
    )
    inputs = make_inputs(case, shuffle=shuffle)
    # Pools of one size, so that every example runs the same program.
    room = ((0, 0), (0, 21 - inputs.store.kv.shape[1]), (0, 0), (0, 0), (0, 0))
    layout = dataclasses.replace(inputs.store.layout, num_blocks=21)
    store = KVStore(jnp.pad(inputs.store.kv, room, constant_values=np.nan), layout)
    out, lse = run(case, dataclasses.replace(inputs, store=store), implementation)
    want, want_lse = oracle(case, inputs)
    assert worst_row_error(out, want) <= TOLERANCES["float32"]
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "first", "num_chunks"),
    [(None, [0] * 5, [0, 1, 10, 3, 0]), (40, [0, 0, 8, 0, 0], [0, 1, 2, 3, 0])],
)
def test_xla_reads_no_chunk_that_no_query_of_its_row_sees(
    window: int | None, first: list[int], num_chunks: list[int]
) -> None:
    """Lengths 0, 5, 300, 65 and 70 (no query), chunks of 2 blocks of 16; the third row sees keys 260 to 299 of 300."""
    layout = KVLayout(1, 64, 1, 16, 8, kv_format("float32"), as_bits=False)
    store = KVStore(jnp.zeros(layout.shape), layout)
    kv_lens = jnp.array([0, 5, 300, 65, 70], jnp.int32)
    q_lens = jnp.array([0, 1, 1, 1, 0], jnp.int32)
    view = BatchView(
        block_tables=jnp.arange(5 * 19, dtype=jnp.int32).reshape(5, 19) % 64,
        kv_lens=kv_lens,
        q_lens=q_lens,
        positions=jnp.maximum(kv_lens - q_lens, 0)[:, None],
        open_ids=None,
    )
    query_end = jnp.where(q_lens > 0, kv_lens - 1, -1)[:, None]
    items = _items(store, view, query_end, 2, window)
    assert items.num_chunks.tolist() == num_chunks
    assert [f for f, n in zip(items.first.tolist(), num_chunks, strict=True) if n] == [
        f for f, n in zip(first, num_chunks, strict=True) if n
    ]
    assert int(items.end[-1]) == sum(num_chunks)
    assert items.tables.shape == (5, 20)
    assert items.tables[1].tolist() == [19] * 20  # one block, again and again


# Which keys are seen ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("window", "keys"), [(1, [9]), (4, [6, 7, 8, 9]), (5, [5, 6, 7, 8, 9])])
def test_attention_window_w_sees_w_keys(window: int, keys: list[int], implementation: str) -> None:
    """Field case K1: window 4, query at 9 sees keys 6..9.  V spells the key; equal scores average it."""
    v = np.eye(10, 16)[:, None]
    store, view = small(np.zeros_like(v), v)
    out = attention(
        jnp.ones((1, 1, 1, 16)),
        store,
        0,
        view,
        scale=1.0,
        window=window,
        implementation=implementation,
    )
    want = np.zeros(16)
    want[keys] = 1 / window
    np.testing.assert_allclose(out[0, 0, 0], want, rtol=1e-6)


@both
def test_attention_causal_query_i_sees_keys_up_to_kv_minus_q_plus_i(implementation: str) -> None:
    """Field case A7: two queries over five keys see four and five."""
    v = np.eye(5, 8)[:, None]
    store, view = small(np.zeros_like(v), v)
    view = dataclasses.replace(
        view, q_lens=jnp.array([2], jnp.int32), positions=jnp.array([[3, 4]], jnp.int32)
    )
    out = attention(
        jnp.ones((1, 2, 1, 8)), store, 0, view, scale=1.0, implementation=implementation
    )
    want = [[0.25] * 4 + [0] * 4, [0.2] * 5 + [0] * 3]
    np.testing.assert_allclose(out[0, :, 0], want, rtol=1e-6)


@both
def test_attention_zero_query_returns_mean_of_values(implementation: str) -> None:
    """Field case E5: q = 0 over 5 keys in blocks of 4 gives mean(V[0:5]), not the sum over 8."""
    v = np.random.default_rng(0).normal(size=(5, 1, 8))
    store, view = small(v, v + 1)
    out = attention(
        jnp.zeros((1, 1, 1, 8)), store, 0, view, scale=1.0, implementation=implementation
    )
    np.testing.assert_allclose(out[0, 0, 0], np.mean(v + 1, axis=0)[0], rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("poison", ["k", "v", "both"])
def test_attention_nan_in_dead_slots_stays_there(poison: str, implementation: str) -> None:
    """Field cases E1 and E2: lengths 1 and 3, NaN elsewhere, in K and V apart."""
    rng = np.random.default_rng(0)
    layout = KVLayout(1, 3, 1, 4, 8, kv_format("float32"), as_bits=True)
    kv = rng.normal(size=layout.shape).astype(np.float32)
    half = {"k": slice(0, 8), "v": slice(8, 16), "both": slice(0, 16)}[poison]
    kv[:, 0, :, 1:, half] = kv[:, 1, :, 3:, half] = kv[:, 2, ..., half] = np.nan
    tables = jnp.array([[0, layout.no_block], [1, layout.no_block]], jnp.int32)
    kv_lens = jnp.array([1, 3], jnp.int32)
    ones = jnp.ones(2, jnp.int32)
    view = BatchView(tables, kv_lens, ones, (kv_lens - 1)[:, None])
    q = rng.normal(size=(2, 1, 2, 8)).astype(np.float32)
    store = KVStore(jnp.asarray(kv), layout)
    out = attention(q, store, 0, view, scale=0.5, implementation=implementation)
    want, _ = paged_attention_oracle(
        q, kv, 0, np.asarray(tables), [1, 3], [1, 1], scale=0.5, soft_cap=None, window=None
    )
    assert worst_row_error(out, want) <= TOLERANCES["float32"]


@both
def test_attention_padding_rows_with_nan_leave_real_rows_alone(implementation: str) -> None:
    """Field cases E3 and J1: padding rows have NaN queries and a table of block 0 or of sentinels."""
    case = dataclasses.replace(MIXED, lens=((3, 11), (2, 2)))
    inputs = make_inputs(case)
    alone, alone_lse = run(case, inputs, implementation)
    view = inputs.view
    padded = BatchView(
        block_tables=jnp.concatenate(
            [
                view.block_tables,
                jnp.zeros_like(view.block_tables[:1]),
                jnp.full_like(view.block_tables[:1], inputs.store.layout.no_block),
            ]
        ),
        kv_lens=jnp.pad(view.kv_lens, (0, 2)),
        q_lens=jnp.pad(view.q_lens, (0, 2)),
        positions=jnp.pad(view.positions, ((0, 2), (0, 0))),
    )
    q = jnp.pad(inputs.q, ((0, 2), (0, 0), (0, 0), (0, 0)), constant_values=np.nan)
    out, lse = run(case, dataclasses.replace(inputs, q=q, view=padded), implementation)
    np.testing.assert_array_equal(out[2:], 0)
    np.testing.assert_array_equal(lse[2:], -np.inf)
    np.testing.assert_allclose(out[:2], alone, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse[:2], alone_lse, rtol=1e-6, atol=1e-7)


@both
def test_attention_padding_queries_with_nan_give_zeros(implementation: str) -> None:
    """Padding of a row (j >= q_len) gives exact zeros whatever q holds there."""
    case = dataclasses.replace(MIXED, query_len=4)
    inputs = make_inputs(case)
    real = np.arange(4)[None, :] < np.asarray(inputs.view.q_lens)[:, None]
    q = jnp.where(real[..., None, None], inputs.q, jnp.nan)
    out, lse = run(case, dataclasses.replace(inputs, q=q), implementation)
    np.testing.assert_array_equal(np.asarray(out)[~real], 0)
    np.testing.assert_array_equal(np.asarray(lse)[~real], -np.inf)
    assert np.all(np.isfinite(out))


@both
@pytest.mark.parametrize("sentinel", [2_000_000, 2**31 - 1])
def test_attention_huge_sentinel_entries_are_never_read(sentinel: int, implementation: str) -> None:
    """Field cases R3 and R4: any value past the end in unused entries gives the same bits."""
    case = dataclasses.replace(MIXED, max_blocks=9)
    plain, _ = run(case, make_inputs(case), implementation)
    other, _ = run(case, make_inputs(case, sentinel=sentinel), implementation)
    np.testing.assert_array_equal(plain, other)


@both
@pytest.mark.parametrize("filler", [0, 1, "no_block"])
def test_attention_wider_table_changes_nothing(filler: Any, implementation: str) -> None:
    """Field case A8: more columns than needed, filled with any valid id or the sentinel."""
    case = dataclasses.replace(MIXED, max_blocks=3)
    inputs = make_inputs(case)
    narrow, _ = run(case, inputs, implementation)
    filler = inputs.store.layout.no_block if filler == "no_block" else filler
    tables = jnp.pad(inputs.view.block_tables, ((0, 0), (0, 30)), constant_values=filler)
    wide = dataclasses.replace(inputs, view=dataclasses.replace(inputs.view, block_tables=tables))
    np.testing.assert_allclose(run(case, wide, implementation)[0], narrow, rtol=1e-6, atol=1e-7)


@both
def test_attention_shuffled_blocks_change_nothing(implementation: str) -> None:
    first, _ = run(MIXED, make_inputs(MIXED), implementation)
    for shuffle in (1, 2):
        other, _ = run(MIXED, make_inputs(MIXED, shuffle=shuffle), implementation)
        np.testing.assert_array_equal(first, other)


@both
def test_attention_zero_key_counts_as_a_token(implementation: str) -> None:
    """Field case E8: a token whose K is all zero at position 0 is still one token."""
    store, view = small(np.zeros((1, 1, 8)), np.full((1, 1, 8), 3.0))
    out, lse = attention(
        jnp.ones((1, 1, 1, 8)),
        store,
        0,
        view,
        scale=1.0,
        implementation=implementation,
        return_lse=True,
    )
    np.testing.assert_array_equal(out[0, 0, 0], 3)
    assert float(lse[0, 0, 0]) == 0


@both
def test_attention_nan_in_a_seen_key_reaches_the_output(implementation: str) -> None:
    """Field case O6: what a query sees and is not a number must not turn into zeros."""
    k = np.ones((6, 1, 8))
    k[1] = np.nan
    store, view = small(k, np.ones_like(k))
    for kv_len in (3, 6):  # in the open block, in a full one
        view = dataclasses.replace(
            view,
            kv_lens=jnp.array([kv_len], jnp.int32),
            positions=jnp.array([[kv_len - 1]], jnp.int32),
        )
        out, lse = attention(
            jnp.ones((1, 1, 1, 8)),
            store,
            0,
            view,
            scale=1.0,
            implementation=implementation,
            return_lse=True,
        )
        assert np.all(np.isnan(out))
        assert np.all(np.isnan(lse))


# Numbers ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("score", [-6e4, -1e30, 6e4])
def test_attention_scores_far_from_zero_are_not_taken_for_masked(
    score: float, implementation: str
) -> None:
    """Field case E7: all scores -6e4 or -1e30 give the mean of V, bfloat16."""
    k = np.ones((3, 1, 8))
    v = np.arange(3.0)[:, None, None] * np.ones(8)
    store, view = small(k, v, format="bfloat16")
    q = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    out = attention(q, store, 0, view, scale=score / 8, implementation=implementation)
    np.testing.assert_allclose(np.asarray(out[0, 0, 0], np.float32), 1.0, rtol=1e-2)


@both
def test_attention_float16_dot_beyond_its_range_is_finite(implementation: str) -> None:
    """Field case O6: q = k = 40 over head_dim 64 is 102,400, past float16's 65,504."""
    k = np.full((3, 1, 64), 40.0)
    k[1] = 39.0
    v = np.arange(3.0)[:, None, None] * np.ones(64)
    store, view = small(k, v, format="float16")
    q = jnp.full((1, 1, 1, 64), 40, jnp.float16)
    out = attention(q, store, 0, view, scale=1.0, implementation=implementation)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(out[0, 0, 0], np.float32), 1.0, rtol=1e-3)


@both
def test_attention_soft_cap_comes_before_the_mask(implementation: str) -> None:
    """Field case M6: cap 1, scores [0.3, 2.0], third key masked: weights [0.33789, 0.66211, 0]."""
    k = np.zeros((3, 1, 4))
    k[:, 0, 0] = 0.3, 2.0, 5.0
    store, view = small(k, np.eye(3, 4)[:, None], kv_len=2)
    q = jnp.array([1.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    out = attention(q, store, 0, view, scale=1.0, soft_cap=1.0, implementation=implementation)
    np.testing.assert_allclose(out[0, 0, 0], [0.33789, 0.66211, 0, 0], atol=1e-5)


@both
def test_attention_soft_cap_none_5_50_differ(implementation: str) -> None:
    """Field case M7: an accepted soft cap is applied."""
    case = dataclasses.replace(MIXED, scale=4.0)
    inputs = make_inputs(case)
    outs = [
        np.asarray(run(dataclasses.replace(case, soft_cap=cap), inputs, implementation)[0])
        for cap in (None, 5.0, 50.0)
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.max(np.abs(outs[one] - outs[other])) > 1e-3


@both
def test_attention_head_dim_64_uses_scale_one_eighth(implementation: str) -> None:
    """Field case M4: scale 1/8 and an output of 64 numbers, however a kernel pads."""
    k = np.zeros((2, 1, 64))
    k[1] = 1.0
    store, view = small(k, np.eye(2, 64)[:, None])
    q = jnp.full((1, 1, 1, 64), 0.25)
    out = attention(q, store, 0, view, scale=64**-0.5, implementation=implementation)
    weight = 1 / (1 + math.exp(-2.0))  # scores 0 and 64 * 0.25 / 8 = 2
    assert out.shape == (1, 1, 1, 64)
    np.testing.assert_allclose(out[0, 0, 0, :2], [1 - weight, weight], rtol=1e-5)


# Heads ------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(28, 4), (32, 8), (4, 2), (6, 3), (9, 3), (5, 1), (3, 3)]
)
def test_attention_q_head_reads_its_own_kv_head(
    num_q_heads: int, num_kv_heads: int, implementation: str
) -> None:
    """Field cases M1 and M2: (28, 4) sends q head 27 to kv head 3; (4, 2) is [0, 0, 1, 1]; all are used."""
    v = np.arange(float(num_kv_heads))[None, :, None] * np.ones((2, 1, 4))
    store, view = small(np.zeros_like(v), v)
    q = jnp.ones((1, 1, num_q_heads, 4))
    out = attention(q, store, 0, view, scale=1.0, implementation=implementation)
    want = np.repeat(np.arange(num_kv_heads), num_q_heads // num_kv_heads)
    np.testing.assert_array_equal(out[0, 0, :, 0], want)


# Arguments --------------------------------------------------------------------------------------------


def _arguments(case: Case = MIXED) -> dict[str, Any]:
    inputs = make_inputs(case)
    return {"q": inputs.q, "store": inputs.store, "layer": 1, "view": inputs.view, "scale": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "fast"}, "implementation: expected one of .*, got 'fast'"),
        ({"q": jnp.ones((3, 3, 8))}, r"q: expected \[row, q_pos, q_head, head_dim\], got shape"),
        ({"q": jnp.ones((3, 3, 6, 8), jnp.int32)}, "q: expected a float dtype, got int32"),
        ({"q": jnp.ones((3, 3, 6, 16))}, "q: expected head_dim 8 of the cache, got 16"),
        ({"q": jnp.ones((3, 3, 7, 8))}, "the 3 kv heads divide, got 7"),
        ({"q": jnp.ones((3, 2, 6, 8))}, r"view.positions: expected shape \(3, 2\), got \(3, 3\)"),
        ({"soft_cap": 0}, "soft_cap: expected a positive number or None, got 0"),
        ({"soft_cap": -1.0}, "soft_cap: expected a positive number or None, got -1.0"),
    ],
)
def test_attention_bad_argument_raises(change: dict[str, Any], message: str) -> None:
    """Field case M7: soft cap 0 and below are rejected, not ignored."""
    with pytest.raises(ValueError, match=message):
        paged_attention(**_arguments() | change)


@pytest.mark.parametrize("window", [0, -1])
def test_attention_window_below_1_raises(window: int) -> None:
    with pytest.raises(ValueError, match=f"window: expected an integer >= 1 or None, got {window}"):
        paged_attention(**_arguments(), window=window)


@pytest.mark.parametrize("leaf", ["block_tables", "kv_lens", "q_lens", "positions"])
@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.float32])
def test_attention_view_of_another_width_raises(leaf: str, dtype: Any) -> None:
    """Field case E6: a clear error, never a wrong row."""
    arguments = _arguments()
    view = arguments["view"]
    arguments["view"] = dataclasses.replace(view, **{leaf: getattr(view, leaf).astype(dtype)})
    with pytest.raises(ValueError, match=f"view.{leaf}: expected int32, got {np.dtype(dtype)}"):
        paged_attention(**arguments)


@pytest.mark.parametrize("leaf", ["block_tables", "kv_lens", "q_lens"])
def test_attention_view_of_other_rows_raises(leaf: str) -> None:
    arguments = _arguments()
    view = arguments["view"]
    arguments["view"] = dataclasses.replace(view, **{leaf: getattr(view, leaf)[:2]})
    with pytest.raises(ValueError, match=f"view.{leaf}: expected 3 rows, got shape"):
        paged_attention(**arguments)


def test_attention_auto_is_the_xla_path_on_cpu() -> None:
    inputs = make_inputs(MIXED)
    auto, _ = run(MIXED, inputs, "auto")
    np.testing.assert_array_equal(auto, run(MIXED, inputs, "xla")[0])
