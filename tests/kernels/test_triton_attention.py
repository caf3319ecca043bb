"""The Triton kernels of paged attention, run by the Pallas interpreter, against the float64 oracle.

What the interpreter cannot show (registers, memory, launches) is in tests/compile/test_cuda_triton.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from field_cases import wrong_answers
from jax.experimental.pallas.ops.gpu import paged_attention as stock
from oracles.attention import TOLERANCES, paged_attention_oracle, worst_row_error

from pallas_kernels.layout import BatchView, KVLayout, KVStore, decode, kv_format
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.shapes import CASES, Case, Inputs, find, make_inputs
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.triton_plan import Tiling, choose_tiling

# Small steps and several splits, so that tiny cases cross every boundary the kernels have.
SMALL = Tiling(query_rows=16, keys=16, num_splits=3, num_warps=4, num_stages=2)
WHOLE = dataclasses.replace(SMALL, num_splits=1)


@functools.cache
def attention(tiling: Tiling | None, **static: Any) -> Any:
    """Returns the kernels under jit; knobs given here are Python numbers, the others traced."""
    call = functools.partial(paged_attention_triton, interpret=True, tiling=tiling, **static)
    return jax.jit(call, compiler_options=FAST_INTERPRET)


def run(case: Case, inputs: Inputs, tiling: Tiling | None = SMALL) -> tuple[np.ndarray, np.ndarray]:
    """Runs a case with its scale, soft cap and window traced; returns float32 copies."""
    out, lse = attention(tiling)(
        inputs.q,
        inputs.store,
        inputs.layer,
        inputs.view,
        scale=case.softmax_scale,
        soft_cap=case.soft_cap,
        window=case.window,
    )
    assert out.dtype == inputs.q.dtype
    assert lse.dtype == jnp.float32
    return np.asarray(out.astype(jnp.float32)), np.asarray(lse)


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


def reference_of(case: Case, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Runs the float32 reference on a case."""
    knobs = {"scale": case.softmax_scale, "soft_cap": case.soft_cap, "window": case.window}
    call = jax.jit(paged_attention_reference, compiler_options=FAST_INTERPRET)
    return call(inputs.q, inputs.store, inputs.layer, inputs.view, **knobs)


def check_lse(got: np.ndarray, expected: np.ndarray) -> None:
    """Log-sum-exps agree to float32 rounding, -inf where nothing is seen."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    seen = np.isfinite(expected)
    np.testing.assert_allclose(got[seen], expected[seen], rtol=1e-5, atol=1e-5)


# Between their neighbours of 8, 16, 64 and 256 tokens, or of 64 and 128 channels.
REPEATS = {"decode_block32", "decode_block128", "decode_hd96", "decode_bfloat16_block8"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.exhaustive) if case.name in REPEATS else case
        for case in CASES
    ],
    ids=lambda case: case.name,
)
def test_every_case_matches_oracle_and_reference(case: Case) -> None:
    inputs = make_inputs(case)
    expected, expected_lse = oracle(case, inputs)
    out, lse = run(case, inputs)
    assert worst_row_error(out, expected) <= TOLERANCES[case.format]
    check_lse(lse, expected_lse)
    reference, _ = reference_of(case, inputs)
    assert worst_row_error(out, reference.astype(jnp.float32)) <= TOLERANCES[case.format]


@pytest.mark.parametrize(
    "name", ["decode_many_blocks", "speculative_window", "prefill_bfloat16", "decode_hd80"]
)
def test_own_tiling_matches_the_reference(name: str) -> None:
    case = find(name)
    inputs = make_inputs(case)
    expected, expected_lse = reference_of(case, inputs)
    out, lse = run(case, inputs, tiling=None)
    assert worst_row_error(out, expected.astype(jnp.float32)) <= TOLERANCES[case.format]
    check_lse(lse, np.asarray(expected_lse))


@pytest.mark.parametrize("name", ["decode_window", "speculative_bfloat16", "decode_empty_rows"])
def test_dead_slots_unused_entries_and_block_ids_change_no_bit(name: str) -> None:
    case = find(name)
    plain = run(case, make_inputs(case, dead=(0.0,)))
    for other in (
        make_inputs(case, dead=(np.nan,)),
        make_inputs(case, dead=(np.inf, -np.inf)),
        make_inputs(case, sentinel=2_000_000),
        make_inputs(case, sentinel=2**31 - 1),
        make_inputs(case, shuffle=7),
    ):
        for got, expected in zip(run(case, other), plain, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_blocks_behind_the_window_may_be_gone() -> None:
    """Field case K4: entries of keys no query can see are not read, even inside kv_len."""
    case = find("decode_window")  # window 4
    inputs = make_inputs(case)
    plain = run(case, inputs)
    tables = np.array(inputs.view.block_tables)
    for row, (_, kv_len) in enumerate(case.lens):
        tables[row, : max(0, kv_len - case.window) // case.block_size] = (
            inputs.store.layout.no_block
        )
    view = dataclasses.replace(inputs.view, block_tables=jnp.asarray(tables))
    for got, expected in zip(run(case, dataclasses.replace(inputs, view=view)), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_row_does_not_see_who_else_is_in_the_batch() -> None:
    case = find("speculative")
    inputs = make_inputs(case)
    out, lse = run(case, inputs)
    alone = dataclasses.replace(
        inputs.view,
        q_lens=inputs.view.q_lens * jnp.array([0, 0, 1, 0, 0]),
        kv_lens=inputs.view.kv_lens * jnp.array([0, 1, 1, 0, 0]),
    )
    lone_out, lone_lse = run(case, dataclasses.replace(inputs, view=alone))
    np.testing.assert_array_equal(lone_out[2], out[2])
    np.testing.assert_array_equal(lone_lse[2], lse[2])
    others = [0, 1, 3, 4]
    assert not lone_out[others].any()
    assert np.isneginf(lone_lse[others]).all()


def test_number_of_splits_changes_only_rounding() -> None:
    """Field case J2 as well: most of the 64 splits of a short row are empty."""
    case = find("decode_many_blocks")
    inputs = make_inputs(case)
    expected, expected_lse = oracle(case, inputs)
    for splits in (1, 2, 64):
        out, lse = run(case, inputs, dataclasses.replace(SMALL, num_splits=splits))
        assert worst_row_error(out, expected) <= TOLERANCES["float32"]
        check_lse(lse, expected_lse)


def test_random_lengths_match_the_oracle() -> None:
    rng = np.random.default_rng(3)
    sizes = Case("random", num_q_heads=6, head_dim=16, block_size=8, query_len=3, max_blocks=6)
    for seed in range(12):
        kv_lens = rng.integers(0, 49, 4)
        lens = tuple((int(rng.integers(0, min(3, n) + 1)), int(n)) for n in kv_lens)
        case = dataclasses.replace(sizes, lens=lens, window=int(rng.integers(1, 60)), soft_cap=4.0)
        inputs = make_inputs(case, seed)
        # A pool of one size for all seeds, so that one compiled program serves them.
        kv = jnp.full((2, 40, *inputs.store.kv.shape[2:]), jnp.nan, inputs.store.kv.dtype)
        kv = kv.at[:, : inputs.store.kv.shape[1]].set(inputs.store.kv)
        layout = dataclasses.replace(inputs.store.layout, num_blocks=40)
        padded = dataclasses.replace(inputs, store=KVStore(kv, layout))
        expected, expected_lse = oracle(case, inputs)
        out, lse = run(case, padded)
        assert worst_row_error(out, expected) <= TOLERANCES["float32"], lens
        check_lse(lse, expected_lse)


@pytest.mark.parametrize(("q_dtype", "format"), [("float32", "bfloat16"), ("float32", "float16")])
def test_float32_queries_lose_nothing_over_a_half_precision_pool(q_dtype: str, format: str) -> None:
    case = dataclasses.replace(find("decode"), format=format)
    inputs = make_inputs(case)
    q = np.random.default_rng(5).standard_normal(inputs.q.shape, np.float32)
    inputs = dataclasses.replace(inputs, q=jnp.asarray(q, q_dtype))
    out, _ = run(case, inputs)
    assert worst_row_error(out, oracle(case, inputs)[0]) <= TOLERANCES["float32"]


def test_python_knobs_equal_traced_ones() -> None:
    case = find("prefill_window_soft_cap")
    inputs = make_inputs(case)
    args = (inputs.q, inputs.store, inputs.layer, inputs.view)
    numbers = {"scale": 0.125, "soft_cap": case.soft_cap, "window": case.window}
    out, lse = attention(WHOLE, **numbers)(*args)
    traced = {"scale": np.float16(0.125), "soft_cap": jnp.int32(3), "window": np.int16(case.window)}
    traced_out, traced_lse = attention(WHOLE)(*args, **traced)
    assert worst_row_error(traced_out, out) <= 1e-6
    check_lse(np.asarray(traced_lse), np.asarray(lse))


def test_field_cases_with_answers_known_by_hand() -> None:
    def attend(q: Any, store: Any, layer: Any, view: Any, soft_cap: Any, window: Any) -> Any:
        knobs = {"scale": 1.0, "soft_cap": soft_cap, "window": window}
        return attention(SMALL)(q, store, layer, view, **knobs)[0]

    assert not wrong_answers(attend, format="float32", block_size=4, head_dim=8)
    assert not wrong_answers(attend, format="bfloat16", block_size=8, head_dim=16)


def test_block_ids_past_16_bits_are_read() -> None:
    """Field case F3: 70,000 blocks of one token, data in three of them."""
    layout = KVLayout(1, 70_000, 1, 1, 8, kv_format("float32"), False)
    kv = jnp.full(layout.shape, jnp.nan)
    ids = [65_535, 65_536, 69_999]
    for index, block in enumerate(ids):
        kv = kv.at[0, block].set(float(index))
    lens = jnp.array([3], jnp.int32), jnp.array([1], jnp.int32)
    view = BatchView(jnp.array([ids], jnp.int32), *lens, jnp.array([[2]], jnp.int32))
    weights = np.exp([0.0, 8.0, 16.0])
    expected = (weights * [0, 1, 2]).sum() / weights.sum()
    knobs = {"scale": 1.0, "soft_cap": None, "window": None}
    q = jnp.ones((1, 1, 1, 8))
    out, _ = attention(SMALL)(q, KVStore(kv, layout), jnp.int32(0), view, **knobs)
    np.testing.assert_allclose(out[0, 0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["decode_group_7", "decode_window_1"])
def test_agrees_with_upstream_kernel_and_reference(name: str) -> None:
    """jax.experimental.pallas.ops.gpu: plain decode, whose kernel runs in the interpreter too."""
    case = dataclasses.replace(find(name), window=None, max_blocks=4)
    inputs = make_inputs(case, dead=(0.0,), sentinel=0)
    layout, view = inputs.store.layout, inputs.view
    kv = decode(layout, inputs.store.kv)[case.layer].transpose(1, 0, 2, 3)
    k, v = jnp.split(kv, 2, axis=-1)  # [kv_head, block, slot, head_dim]
    q = inputs.q[:, 0] * case.softmax_scale
    out, _ = run(case, inputs)

    pages = stock.paged_attention(
        q,
        k,
        v,
        view.block_tables,
        view.kv_lens,
        k_splits=2,
        pages_per_compute_block=1,
        interpret=True,
    )
    assert worst_row_error(out[:, 0], pages) <= TOLERANCES["float32"]

    dense = [
        x[:, view.block_tables].transpose(1, 2, 3, 0, 4).reshape(len(case.lens), -1, *x.shape[::3])
        for x in (k, v)
    ]
    dense = stock.paged_attention_reference(q, *dense, view.kv_lens)
    assert worst_row_error(out[:, 0], dense) <= TOLERANCES["float32"]


def test_own_tiling_fills_the_chip_at_batch_1() -> None:
    layout = KVLayout(36, 4096, 8, 16, 128, kv_format("bfloat16"), False)
    tiling = choose_tiling((1, 1, 32, 128), jnp.bfloat16, layout, 32_768)
    assert layout.num_kv_heads * tiling.num_splits >= 2 * 132
    assert tiling.query_rows == 16
    assert choose_tiling((256, 1, 32, 128), jnp.bfloat16, layout, 32_768).num_splits == 1


def test_what_is_not_supported_says_what_is() -> None:
    inputs = make_inputs(find("decode"))
    rest = (inputs.layer, inputs.view)
    knobs = {"scale": 1.0, "soft_cap": None, "window": None}
    with pytest.raises(NotImplementedError, match="supports float32, bfloat16 and float16, got q"):
        paged_attention_triton(inputs.q.astype(jnp.float8_e4m3fn), inputs.store, *rest, **knobs)
    layout = dataclasses.replace(inputs.store.layout, head_dim=512)
    store = KVStore(jnp.zeros(layout.shape), layout)
    with pytest.raises(NotImplementedError, match="head_dim up to 256, got 512"):
        paged_attention_triton(jnp.zeros((5, 1, 4, 512)), store, *rest, **knobs)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [("triton", "head_dim up to 256, got 512"), ("hopper", "format: supported are bfloat16")],
)
def test_a_named_implementation_never_falls_back(implementation: str, message: str) -> None:
    inputs = make_inputs(find("decode"))
    layout = dataclasses.replace(inputs.store.layout, head_dim=512)
    store = KVStore(jnp.zeros(layout.shape), layout)
    q = jnp.zeros((5, 1, 4, 512))
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(
            q, store, inputs.layer, inputs.view, scale=1.0, implementation=implementation
        )
