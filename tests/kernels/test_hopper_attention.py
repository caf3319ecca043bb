"""The Hopper kernel in its interpreter: against the reference, the float64 oracle and hostile inputs."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from field_cases import wrong_answers
from oracles.attention import TOLERANCES, paged_attention_oracle, worst_row_error
from test_hopper_interpreter import interpreter  # noqa: F401  (a fixture)

from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format
from pallas_kernels.paged_attention.hopper import combine, paged_attention_hopper
from pallas_kernels.paged_attention.hopper_plan import choose_splits, make_plan
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.shapes import CASES, Case, find, make_inputs

# Edges of tiles (64 tokens; 128 at head_dim 64), of blocks, of splits, of the window and of the group.
OWN_CASES = (
    Case(
        "block64_head_dim_64",
        block_size=64,
        lens=((1, 1), (1, 63), (0, 0), (1, 65), (1, 129), (0, 70), (1, 256)),
        format="bfloat16",
        num_q_heads=14,
        num_layers=1,
        layer=0,
    ),
    Case(
        "block128_head_dim_128_soft_cap",
        block_size=128,
        head_dim=128,
        lens=((1, 127), (1, 130)),
        format="bfloat16",
        soft_cap=3.0,
        num_kv_heads=1,
    ),
    Case(
        "window_inside_blocks",
        block_size=64,
        lens=((1, 10), (1, 64), (1, 200), (1, 3)),
        format="bfloat16",
        window=4,
        num_kv_heads=1,
    ),
    Case(
        "several_queries_window",
        block_size=8,
        lens=((5, 70), (3, 3), (0, 9), (1, 30)),
        format="bfloat16",
        window=20,
        num_q_heads=3,
        num_kv_heads=1,
    ),
    Case(
        "block256_wide_group",
        block_size=256,
        lens=((1, 257), (1, 256)),
        format="bfloat16",
        num_q_heads=20,
        num_kv_heads=1,
    ),
    Case(
        "head_dim_96",
        head_dim=96,
        block_size=64,
        lens=((1, 70), (1, 64)),
        format="bfloat16",
        num_kv_heads=1,
    ),
    Case(
        "head_dim_80_two_queries",
        head_dim=80,
        block_size=32,
        lens=((2, 70),),
        format="bfloat16",
        num_kv_heads=1,
    ),
    Case(
        "head_dim_256",
        head_dim=256,
        block_size=64,
        lens=((1, 70),),
        format="bfloat16",
        num_q_heads=2,
        num_kv_heads=1,
        num_layers=1,
        layer=0,
    ),
)


def supported(case: Case) -> bool:
    try:
        plan_of(case)
    except NotImplementedError:
        return False
    return True


def plan_of(case: Case, **changes):
    layout = KVLayout(
        1, 8, case.num_kv_heads, case.block_size, case.head_dim, kv_format(case.format), False
    )
    q_shape = (len(case.lens), case.query_len or 1, case.num_q_heads, case.head_dim)
    return make_plan(layout, q_shape, 4, **changes)


def make_call(interpreter, case, *, splits=None, out_of_bounds_reads="uninitialized", **params):  # noqa: F811
    """Returns the jitted kernel; soft cap and window are traced, as a model may pass them."""
    params = interpreter(out_of_bounds_reads=out_of_bounds_reads, **params)
    bounds = {"soft_cap": case.soft_cap, "window": case.window}
    traced = {name: jnp.asarray(value) for name, value in bounds.items() if value is not None}

    @functools.partial(jax.jit, compiler_options=FAST_INTERPRET)
    def call(q, store, layer, view, scale, traced):
        return paged_attention_hopper(
            q,
            store,
            layer,
            view,
            scale=scale,
            soft_cap=traced.get("soft_cap"),
            window=traced.get("window"),
            interpret=params,
            splits=splits,
        )

    def run(inputs):
        arguments = inputs.q, inputs.store, inputs.layer, inputs.view
        out, lse = call(*arguments, case.softmax_scale, traced)
        return np.asarray(out), np.asarray(lse)

    return run


def check(case, inputs, out, lse):
    """Compares with the oracle and the reference."""
    bounds = {"scale": case.softmax_scale, "soft_cap": case.soft_cap, "window": case.window}
    q, view = jax.tree.map(np.asarray, (inputs.q, inputs.view))  # a JAX array is slow to index
    expected = paged_attention_oracle(
        q, inputs.kv, case.layer, view.block_tables, view.kv_lens, view.q_lens, **bounds
    )
    assert worst_row_error(out, expected[0]) <= TOLERANCES[case.format]
    empty = np.isneginf(expected[1])
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert not out[empty].any()
    np.testing.assert_allclose(lse[~empty], expected[1][~empty], atol=2e-5)
    reference = jax.jit(paged_attention_reference, compiler_options=FAST_INTERPRET)(
        inputs.q, inputs.store, inputs.layer, inputs.view, **bounds
    )
    assert worst_row_error(out, reference[0]) <= TOLERANCES[case.format]


@pytest.mark.parametrize(
    "case", [*filter(supported, CASES), *OWN_CASES], ids=lambda case: case.name
)
def test_kernel_equals_reference_and_oracle(interpreter, case):  # noqa: F811
    inputs = make_inputs(case)
    check(case, inputs, *make_call(interpreter, case)(inputs))


@pytest.mark.parametrize("splits", [pytest.param(2, marks=pytest.mark.exhaustive), 5])
def test_splits_of_the_sequence_equal_oracle(interpreter, splits):  # noqa: F811
    lens = ((1, 1), (1, 64), (0, 0), (1, 300))
    case = dataclasses.replace(find("decode_bfloat16"), lens=lens, num_kv_heads=1)
    inputs = make_inputs(case)
    check(case, inputs, *make_call(interpreter, case, splits=splits)(inputs))


def test_dead_bytes_block_ids_and_unused_entries_change_no_bit(interpreter):  # noqa: F811
    case = dataclasses.replace(OWN_CASES[0], lens=((1, 65), (0, 0), (1, 130)), window=100)
    run = make_call(interpreter, case)
    plain = run(make_inputs(case, dead=(0.0,)))
    for changes in (
        {"dead": (math.nan, math.inf), "sentinel": 2_000_000},
        {"dead": (-math.inf,), "shuffle": 7, "sentinel": -1},
    ):
        got = run(make_inputs(case, **changes))
        np.testing.assert_array_equal(got[0], plain[0])
        np.testing.assert_array_equal(got[1], plain[1])


def test_blocks_behind_the_window_may_be_gone(interpreter):  # noqa: F811
    """Field case K4: neither the entry nor the bytes of a block no query can see are read."""
    case = dataclasses.replace(OWN_CASES[2], lens=((1, 200), (1, 64)), window=40)
    inputs = make_inputs(case)
    run = make_call(interpreter, case)
    plain = run(inputs)
    tables = inputs.view.block_tables
    gone = inputs.store.kv.at[:, tables[0, :2]].set(jnp.nan)  # keys 0 to 127; 160 to 199 are seen
    inputs = dataclasses.replace(
        inputs,
        store=dataclasses.replace(inputs.store, kv=gone),
        view=dataclasses.replace(inputs.view, block_tables=tables.at[0, :2].set(2_000_000)),
    )
    for got, expected in zip(run(inputs), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_field_cases_with_answers_known_by_hand(interpreter):  # noqa: F811
    params = interpreter(out_of_bounds_reads="uninitialized")

    @functools.partial(jax.jit, compiler_options=FAST_INTERPRET)
    def attend(q, store, layer, view, soft_cap, window):
        bounds = {"scale": jnp.float32(1), "soft_cap": soft_cap, "window": window}
        return paged_attention_hopper(q, store, layer, view, **bounds, interpret=params)[0]

    assert not wrong_answers(attend, format="bfloat16", block_size=8, head_dim=32)


def test_row_alone_equals_row_in_batch(interpreter):  # noqa: F811
    case = dataclasses.replace(OWN_CASES[2], lens=((1, 200), (0, 0), (1, 64)))
    inputs = make_inputs(case)
    run = make_call(interpreter, case)
    out, _ = run(inputs)
    alone = dataclasses.replace(
        inputs, q=inputs.q[2:], view=jax.tree.map(lambda x: x[2:], inputs.view)
    )
    np.testing.assert_array_equal(run(alone)[0][0], out[2])


def test_ring_has_no_races_when_it_wraps(interpreter):  # noqa: F811
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    # Seven tiles through three stages: every stage is refilled at least once.
    case = dataclasses.replace(find("decode_bfloat16"), lens=((1, 440),), num_kv_heads=1)
    inputs = make_inputs(case)
    out, lse = make_call(interpreter, case, splits=1, detect_races=True)(inputs)
    check(case, inputs, out, lse)
    assert not gpu_callbacks.get_races().races_found


def test_nothing_is_read_out_of_bounds(interpreter):  # noqa: F811
    # Eight query heads per kv head fill the columns, so that even q needs no rows from past its end; the
    # last tile has room for more blocks than the table has columns.
    case = dataclasses.replace(
        find("decode_bfloat16_block8"), num_q_heads=8, num_kv_heads=1, lens=((1, 72),), max_blocks=9
    )
    inputs = make_inputs(case)
    run = make_call(interpreter, case, out_of_bounds_reads="raise")
    check(case, inputs, *run(inputs))


def test_combine_of_empty_parts_is_empty_and_of_one_part_is_that_part():
    merged, merged_lse = combine(
        jnp.asarray([[0.0, 0.0], [0.0, 3.0]]), jnp.asarray([[-jnp.inf, -jnp.inf], [-jnp.inf, 0.5]])
    )
    np.testing.assert_array_equal(merged, [0.0, 3.0])
    np.testing.assert_array_equal(merged_lse, [-np.inf, 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "float32"}, "format: supported are bfloat16, float16; got float32"),
        ({"head_dim": 72}, "head_dim: supported are multiples of 16 from 32 to 256; got 72"),
        ({"block_size": 12}, "block_size: supported are multiples of 8; got 12"),
        ({"num_q_heads": 130}, "query heads per kv head: supported are at most 64"),
    ],
)
def test_unsupported_shape_is_refused_with_what_is_supported(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        plan_of(dataclasses.replace(find("decode_bfloat16"), **changes))


def test_query_dtype_other_than_the_pool_is_refused():
    inputs = make_inputs(find("decode_bfloat16"))
    q = inputs.q.astype(jnp.float32)
    bounds = {"scale": 1.0, "soft_cap": None, "window": None}
    with pytest.raises(NotImplementedError, match="q: supported is bfloat16, got float32"):
        paged_attention_hopper(q, inputs.store, inputs.layer, inputs.view, **bounds)


def test_pieces_of_a_tile_never_cross_a_block():
    for block_size in range(8, 264, 8):
        plan = plan_of(dataclasses.replace(find("decode_bfloat16"), block_size=block_size))
        assert plan.tile % plan.piece == 0 == block_size % plan.piece
        assert plan.piece % 8 == 0


@pytest.mark.parametrize(
    ("blocks", "most", "expected"), [(8, 128, 28), (512, 128, 1), (264, 9, 1), (8, 0, 1)]
)
def test_splits_fill_the_chip_and_no_more(blocks, most, expected):
    assert choose_splits(blocks, most) == expected


def test_block_ids_past_16_bits_are_read(interpreter):  # noqa: F811
    """Field case F3: 70,000 blocks of eight tokens, data in three of them."""
    layout = KVLayout(1, 70_000, 1, 8, 32, kv_format("bfloat16"), False)
    ids = [65_535, 65_536, 69_999]
    kv = jnp.full(layout.shape, jnp.nan, jnp.bfloat16)
    for index, block in enumerate(ids):
        kv = kv.at[0, block].set(float(index))
    lens = jnp.array([24], jnp.int32), jnp.array([1], jnp.int32)
    view = BatchView(jnp.array([ids], jnp.int32), *lens, jnp.array([[23]], jnp.int32))
    out, _ = jax.jit(
        functools.partial(
            paged_attention_hopper, scale=1 / 32, soft_cap=None, window=None,
            interpret=interpreter(),
        ),
        compiler_options=FAST_INTERPRET,
    )(jnp.ones((1, 1, 1, 32), jnp.bfloat16), KVStore(kv, layout), jnp.int32(0), view)  # fmt: skip
    weights = np.exp([0.0, 1.0, 2.0])
    expected = (weights * [0, 1, 2]).sum() / weights.sum()
    np.testing.assert_allclose(np.asarray(out[0, 0, 0], np.float32), expected, rtol=8e-3)
