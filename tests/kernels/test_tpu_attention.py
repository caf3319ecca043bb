"""The TPU attention kernel in its interpreter, against a float64 oracle, the reference and a stock reference.

Most cases run with chunks of 128 tokens, narrow tiles and tables outside SMEM, so that tiny inputs cross every
boundary the kernel has: chunk to chunk, tile to tile, row to row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from jax.experimental.pallas import tpu as pltpu
from oracles.attention import TOLERANCES, paged_attention_oracle, worst_row_error

from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format
from pallas_kernels.paged_attention import tpu_kernel
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.shapes import CASES, Case, Inputs, find, make_inputs
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.tpu_plan import Tuning, make_plan

NARROW = Tuning(
    max_chunk_len=128,
    max_chunk_len_wide=128,
    max_queries=32,
    wide_queries=16,
    smem_table_bytes=0,
)
TRACES: list[None] = []  # one entry per trace of `attend`
INTERPRET = pltpu.InterpretParams()
RUNS = [case for case in CASES if case.format != "float16"]


@functools.partial(
    jax.jit,
    static_argnames=("tuning", "interpret"),
    compiler_options=FAST_INTERPRET,
)
def attend(q, store, layer, view, scale, soft_cap, window, tuning, interpret):
    TRACES.append(None)
    return paged_attention_tpu(
        q,
        store,
        layer,
        view,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        interpret=interpret,
        tuning=tuning,
    )


@functools.partial(jax.jit)
def refer(q, store, layer, view, scale, soft_cap, window):
    return paged_attention_reference(
        q, store, layer, view, scale=scale, soft_cap=soft_cap, window=window
    )


def arguments(case: Case, inputs: Inputs) -> tuple[Any, ...]:
    """Returns the operands of `attend` and `refer`; small float32 cases are given one shape, to share a compile."""
    wide = widen(inputs) if shared(case) else inputs
    numbers = (case.softmax_scale, case.soft_cap, case.window)
    return (wide.q, wide.store, wide.layer, wide.view, *numbers)


def shared(case: Case) -> bool:
    """Whether a case is one of the many that differ from `decode` in nothing but lengths and numbers."""
    plain = Case(case.name, lens=case.lens, scale=case.scale, soft_cap=case.soft_cap)
    return dataclasses.replace(case, window=None) == plain and case.lens[0][0] <= 1


def widen(inputs: Inputs, rows: int = 6, columns: int = 20, blocks: int = 50) -> Inputs:
    """Returns the inputs with empty rows, empty columns and blocks of NaN added to them."""
    view, layout = inputs.view, inputs.store.layout
    more = rows - view.kv_lens.shape[0]
    kv = jnp.pad(
        inputs.store.kv,
        ((0, 0), (0, blocks - layout.num_blocks), (0, 0), (0, 0), (0, 0)),
        constant_values=math.nan,
    )
    tables = jnp.where(view.block_tables == layout.num_blocks, blocks, view.block_tables)
    view = BatchView(
        jnp.pad(
            tables, ((0, more), (0, columns - tables.shape[1])), constant_values=jnp.int32(blocks)
        ),
        jnp.pad(view.kv_lens, (0, more)),
        jnp.pad(view.q_lens, (0, more)),
        jnp.pad(view.positions, ((0, more), (0, 0))),
    )
    store = KVStore(kv, dataclasses.replace(layout, num_blocks=blocks))
    q = jnp.pad(inputs.q, ((0, more), (0, 0), (0, 0), (0, 0)), constant_values=math.nan)
    return dataclasses.replace(inputs, q=q, store=store, view=view)


def run(case: Case, inputs: Inputs, tuning: Tuning = NARROW, interpret: Any = INTERPRET):
    """Returns (out, lse) of the kernel as NumPy."""
    out, lse = attend(*arguments(case, inputs), tuning, interpret)
    rows = len(case.lens)
    assert not np.any(out[rows:])  # the rows that `widen` added
    return np.asarray(out[:rows]), np.asarray(lse[:rows])


def expect(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) of the float64 oracle."""
    view = jax.tree.map(np.asarray, inputs.view)
    return paged_attention_oracle(
        inputs.q,
        inputs.kv,
        case.layer,
        view.block_tables,
        view.kv_lens,
        view.q_lens,
        scale=case.softmax_scale,
        soft_cap=case.soft_cap,
        window=case.window,
    )


def assert_close(case: Case, got, expected) -> None:
    """Checks out row by row and lse where something is seen; -inf must be at the same places."""
    tolerance = TOLERANCES[case.format]
    assert worst_row_error(got[0], expected[0]) < tolerance
    seen = np.isfinite(expected[1])
    assert np.array_equal(np.isneginf(got[1]), ~seen)
    np.testing.assert_allclose(got[1][seen], expected[1][seen], rtol=1e-5, atol=1e-5)


def bits(result) -> list[bytes]:
    """Returns the bits of (out, lse)."""
    return [np.asarray(x).tobytes() for x in result]


REPEATS = {"prefill", "prefill_padded", "speculative", "decode_block32", "decode_mha"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.exhaustive) if case.name in REPEATS else case
        for case in RUNS
    ],
    ids=lambda case: case.name,
)
def test_attention_case_matches_oracle_and_reference(case):
    """Field cases A6 to A9, E1, E2, J1, M1 to M5, R1: every named case, NaN and Inf wherever nothing may look."""
    inputs = make_inputs(case)
    got = run(case, inputs)
    assert_close(case, got, expect(case, inputs))
    reference, _ = refer(*arguments(case, inputs))
    assert worst_row_error(got[0], reference[: len(case.lens)]) < TOLERANCES[case.format]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("decode_many_blocks", marks=pytest.mark.exhaustive),
        "speculative_bfloat16",
        "prefill",
    ],
)
def test_attention_default_tuning_matches_oracle(name):
    case = find(name)
    inputs = make_inputs(case)
    assert_close(case, run(case, inputs, Tuning()), expect(case, inputs))


@pytest.mark.parametrize(
    "name",
    [
        "decode_many_blocks",
        pytest.param("speculative_window", marks=pytest.mark.exhaustive),
        pytest.param("decode_bfloat16_bits", marks=pytest.mark.exhaustive),
    ],
)
def test_attention_dead_slots_and_block_ids_change_no_bit(name):
    """Field cases E1, E2, R3, R4: dead bytes, the order of blocks and any sentinel leave every bit alone."""
    case = find(name)
    finite = bits(run(case, make_inputs(case, dead=(0.0,))))
    assert bits(run(case, make_inputs(case, dead=(math.nan, math.inf)))) == finite
    assert bits(run(case, make_inputs(case, dead=(3e38, -math.inf), shuffle=1))) == finite
    assert bits(run(case, make_inputs(case, sentinel=2_000_000, shuffle=2))) == finite
    assert bits(run(case, make_inputs(case, sentinel=-1))) == finite


def test_attention_nan_behind_the_window_changes_no_bit():
    """Field cases E1, K4: keys no query can see, inside kv_len."""
    case = dataclasses.replace(find("decode_window"), lens=((1, 40), (1, 300), (1, 5)))
    inputs = make_inputs(case)
    kv = np.asarray(inputs.store.kv).copy()
    tables = np.asarray(inputs.view.block_tables)
    for row, (_, kv_len) in enumerate(case.lens):
        for key in range(max(0, kv_len - case.window)):
            kv[case.layer, tables[row, key // 16], :, key % 16] = math.nan
    poisoned = dataclasses.replace(inputs, store=KVStore(jnp.asarray(kv), inputs.store.layout))
    assert bits(run(case, poisoned)) == bits(run(case, inputs))


def test_attention_empty_rows_disturb_nobody():
    full = Case("full", lens=((1, 20), (1, 5), (3, 33), (2, 17), (1, 1)), query_len=3)
    some = dataclasses.replace(full, lens=((0, 20), (1, 5), (0, 33), (2, 17), (0, 1)))
    lone, mixed = run(full, make_inputs(full)), run(some, make_inputs(some))
    for row in (1, 3):
        q_len = full.lens[row][0]
        assert mixed[0][row, :q_len].tobytes() == lone[0][row, :q_len].tobytes()
    assert not mixed[0][[0, 2, 4]].any()
    assert np.isneginf(mixed[1][[0, 2, 4]]).all()


@pytest.mark.parametrize(
    "change", [{"smem_table_bytes": 2**18}, {"num_cores": 2}, {"wide_queries": 0}], ids=str
)
def test_attention_tuning_changes_no_bit(change):
    case = dataclasses.replace(find("speculative"), lens=((4, 4), (4, 190), (0, 7), (1, 33)))
    inputs = make_inputs(case)
    assert bits(run(case, inputs, dataclasses.replace(NARROW, **change))) == bits(run(case, inputs))


def test_attention_scores_far_below_zero_give_the_mean_of_v():
    """Field case E7: scores of -6e4 and of -1e30; softmax only knows differences, so a finite mask value would show."""
    case = Case("flat", num_q_heads=1, num_kv_heads=1, lens=((1, 3), (1, 3)), scale=1.0)
    inputs = make_inputs(case)
    kv = np.asarray(inputs.store.kv).copy()
    tables = np.asarray(inputs.view.block_tables)
    for row, size in enumerate((6e4, 1e30)):
        kv[1, tables[row, 0], 0, :3, :64] = -size / 64
    q = jnp.ones_like(inputs.q)
    inputs = dataclasses.replace(inputs, q=q, store=KVStore(jnp.asarray(kv), inputs.store.layout))
    out, _ = run(case, inputs)
    for row in range(2):
        mean = kv[1, tables[row, 0], 0, :3, 64:].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(out[row, 0, 0], mean, rtol=1e-5, atol=1e-6)


def test_attention_traced_numbers_match_oracle_with_one_trace():
    case = find("decode_window_1")
    TRACES.clear()
    for scale, soft_cap, window in ((0.1, 5.0, 1), (0.3, 50.0, 7), (-0.2, 1.0, 2**30)):
        now = dataclasses.replace(case, scale=scale, soft_cap=soft_cap, window=window)
        inputs = make_inputs(now)
        assert_close(now, run(now, inputs), expect(now, inputs))
    assert len(TRACES) <= 1


@pytest.mark.parametrize(("q_dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-3)])
def test_attention_q_wider_than_the_store_keeps_its_precision(q_dtype, tolerance):
    case = find("decode_bfloat16")
    inputs = make_inputs(case)
    inputs = dataclasses.replace(inputs, q=(inputs.q.astype(jnp.float32) * 1.0009).astype(q_dtype))
    out, _ = run(case, inputs)
    assert out.dtype == q_dtype
    assert worst_row_error(out, expect(case, inputs)[0]) < tolerance


def test_attention_blocks_past_16_bits_are_found():
    """Field case F3: data in blocks 65,535, 65,536 and 69,999 alone."""
    layout = KVLayout(1, 70_000, 1, 8, 8, kv_format("float32"), False)
    case = Case("far", 1, 1, 8, 8, lens=((1, 20),), num_layers=1, layer=0)
    inputs = make_inputs(case)
    kv = np.zeros(layout.shape, np.float32)
    far = np.array([65_535, 65_536, 69_999], np.int32)
    near = np.asarray(inputs.view.block_tables)[0, :3]
    kv[:, far] = np.asarray(inputs.store.kv)[:, near]
    tables = jnp.asarray(np.append(far, layout.no_block)[None], jnp.int32)
    view = dataclasses.replace(inputs.view, block_tables=tables)
    moved = dataclasses.replace(inputs, store=KVStore(jnp.asarray(kv), layout), view=view)
    assert bits(run(case, moved)) == bits(run(case, inputs))


def test_attention_matches_stock_ragged_reference():
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    case = Case("ragged", 6, 2, 64, 16, lens=((3, 40), (1, 16), (5, 5)), soft_cap=4.0, window=20)
    inputs = make_inputs(case, dead=(0.0,))
    num_tokens = sum(q_len for q_len, _ in case.lens)
    flat = jnp.concatenate([inputs.q[row, :q_len] for row, (q_len, _) in enumerate(case.lens)])
    kv = inputs.store.kv[case.layer].reshape(
        -1, 2, 16, 2, 64
    )  # [block, kv_head, slot, K or V, head_dim]
    pages = kv.transpose(0, 2, 1, 3, 4).reshape(-1, 16, 4, 64)  # K and V of a head side by side
    expected = ref_ragged_paged_attention(
        flat,
        pages,
        inputs.view.kv_lens,
        jnp.minimum(inputs.view.block_tables, pages.shape[0] - 1),
        jnp.asarray(np.cumsum([0, *(q_len for q_len, _ in case.lens)]), jnp.int32),
        jnp.array([len(case.lens)], jnp.int32),
        sm_scale=case.softmax_scale,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
    )
    out, _ = run(case, inputs)
    got = np.concatenate([out[row, :q_len] for row, (q_len, _) in enumerate(case.lens)])
    assert got.shape[0] == num_tokens
    assert worst_row_error(got, expected) < 1e-5


RACES = Case("races", lens=((1, 300), (0, 4), (3, 33), (2, 150)), window=200, block_size=32)


@pytest.mark.parametrize("num_cores", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_attention_race_detection_is_silent(num_cores, capfd):
    case = RACES
    tuning = dataclasses.replace(NARROW, num_cores=num_cores, max_queries=2)
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=num_cores)
    inputs = make_inputs(case)
    assert_close(case, run(case, inputs, tuning, interpret), expect(case, inputs))
    assert "RACE" not in capfd.readouterr().out


def test_attention_race_detection_reports_a_missing_wait(monkeypatch, capfd):
    """Silence means something: the same kernel without its waits is reported."""
    monkeypatch.setattr(tpu_kernel.Chunks, "wait", lambda *_: None)
    interpret = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    case = dataclasses.replace(RACES, lens=((1, 150),))
    tuning = dataclasses.replace(NARROW, max_queries=2)
    run(case, make_inputs(case), tuning, interpret)
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "float16"}, "float16"),
        ({"block_size": 12}, "block_size 12"),
        ({"head_dim": 100}, "head_dim 100"),
        ({"head_dim": 512}, "head_dim 512"),
    ],
)
def test_attention_unsupported_input_names_it_and_what_is_supported(change, named):
    """Field case M9: refused before launch."""
    case = dataclasses.replace(find("decode"), **change)
    with pytest.raises(NotImplementedError, match=f"{named}.*supported are float32 or bfloat16"):
        run(case, make_inputs(case))


@pytest.mark.parametrize("query_len", [1, 5, 64, 512])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(32, 8), (14, 2), (128, 1), (6, 6)])
@pytest.mark.parametrize("block_size", [8, 16, 24, 256])
def test_plan_keeps_its_limits(query_len, num_q_heads, num_kv_heads, block_size):
    layout = KVLayout(1, 9, num_kv_heads, block_size, 128, kv_format("bfloat16"), False)
    tuning = Tuning()
    plan = make_plan((3, query_len, num_q_heads, 128), jnp.dtype("bfloat16"), layout, 300, tuning)
    assert plan.num_tiles * plan.tile_len >= query_len
    assert plan.num_queries <= max(tuning.max_queries, plan.group)
    assert plan.chunk_len % 128 == 0
    one_step = 128 // math.gcd(block_size, 128)
    assert plan.chunk_blocks == one_step or (
        plan.chunk_len * num_kv_heads * 512 <= tuning.chunk_bytes
        and plan.chunk_len <= tuning.max_chunk_len
    )
