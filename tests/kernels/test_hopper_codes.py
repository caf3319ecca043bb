"""The Hopper kernel over sealed blocks, in its interpreter: against the float64 oracle, and inside `cached_attention`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from oracles.attention import TOLERANCES, worst_row_error
from oracles.quantised import sealed_attention_oracle
from sealed_cases import SEALED_CASES, SealedCase, make_sealed_inputs
from test_hopper_interpreter import interpreter  # noqa: F401  (a fixture)

from jaxkv import CacheConfig, init_cache, reserve
from pallas_kernels import kv_write, paged_attention
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.kv_write.xla import write_kv_xla
from pallas_kernels.paged_attention.hopper import paged_attention_hopper
from pallas_kernels.paged_attention.hopper_plan import make_code_plan

# Several tiles a block, of both halves of its nibbles; four blocks a tile, several queries.
OWN_CASES = (
    SealedCase(
        "int4 block 128", "int4", 128, 64, 1, 3, ((300, 1), (128, 1)), value_group=16, window=130
    ),
    SealedCase("int8 block 16, queries", "int8", 16, 64, 1, 2, ((90, 3), (33, 2)), query_len=3),
)
WINDOW = SealedCase("fp8 window", "fp8_e4m3", 32, 64, 1, 2, ((200, 1), (64, 1)), window=40)


def make_call(interpreter, case, *, splits=None, **params):  # noqa: F811
    """Returns the jitted kernel as a function of the inputs."""
    params = interpreter(out_of_bounds_reads="uninitialized", **params)
    run = functools.partial(paged_attention_hopper, interpret=params, splits=splits)
    run = jax.jit(run, compiler_options=FAST_INTERPRET)

    def call(inputs):
        out = run(inputs.q, inputs.store, inputs.layer, inputs.view, **inputs.knobs(case))
        return tuple(np.asarray(x) for x in out)

    return call


def check(case, inputs, out, lse):
    """Compares with the oracle."""
    view = jax.tree.map(np.asarray, inputs.view)
    want, want_lse = sealed_attention_oracle(
        np.asarray(inputs.q), inputs.store, 1, view.block_tables, view.kv_lens, view.q_lens,
        **inputs.knobs(case),
    )  # fmt: skip
    assert worst_row_error(out, want) < TOLERANCES["bfloat16"]
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-5, atol=2e-2)
    assert not out[~seen].any()


# Each of them has a sibling below that runs the same code on other sizes.
LONG_RUN_ONLY = (
    "int8", "int8 symmetric, 1 head", "int8 block 32, window", "int4", "int4 one scale a head", "int8 chunk",
    "int4 chunk, window",
)  # fmt: skip


def cases() -> list:
    """Returns every case, those of LONG_RUN_ONLY marked."""
    marks = {name: [pytest.mark.exhaustive] for name in LONG_RUN_ONLY}
    return [
        pytest.param(case, id=case.name, marks=marks.get(case.name, []))
        for case in (*SEALED_CASES, *OWN_CASES)
    ]


@pytest.mark.parametrize("case", cases())
def test_sealed_attention_matches_the_oracle(interpreter, case):  # noqa: F811
    """Codes, scales and centres, block edges, windows, empty rows; rubbish in every block that is not sealed."""
    case = dataclasses.replace(case, dtype="bfloat16")
    inputs = make_sealed_inputs(case)
    check(case, inputs, *make_call(interpreter, case)(inputs))


def test_ring_of_codes_has_no_races_in_splits(interpreter):  # noqa: F811
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    # 17 tiles in two splits: more than the ring holds.
    case = SealedCase(
        "long", "int8", 128, 64, 1, 2, ((1140, 1),), symmetric_keys=True, dtype="bfloat16"
    )
    plan = make_code_plan(case.layout, (1, 1, 2, 64), 9, 2)
    assert plan.stages < 8
    inputs = make_sealed_inputs(case)
    check(case, inputs, *make_call(interpreter, case, splits=2, detect_races=True)(inputs))
    assert not gpu_callbacks.get_races().races_found


def test_dead_codes_foreign_blocks_and_unused_entries_change_no_bit(interpreter):  # noqa: F811
    """Blocks that no query sees hold NaN, as codes and as scales, or are not in the pool at all."""
    case = dataclasses.replace(WINDOW, dtype="bfloat16")
    inputs = make_sealed_inputs(case)
    call = make_call(interpreter, case)
    plain = call(inputs)
    check(case, inputs, *plain)
    tables = np.asarray(inputs.view.block_tables).copy()
    seen = [tables[0, 5], tables[1, 0]]  # keys 160 to 191 of the first row, 24 to 31 of the second
    dead = np.setdiff1d(np.arange(case.layout.num_blocks), seen)
    for code, entry in ((0x7F, 2_000_000), (0xFF, -1), (0x38, case.layout.num_blocks)):
        arrays = {
            name: np.asarray(getattr(inputs.store, name)).copy()
            for name in ("codes", "key_affine", "value_affine")
        }
        for x in arrays.values():
            x.view(np.uint8)[:, dead] = code  # with 0xFF and 0x7F the scales are NaN or huge
        arrays["value_affine"][:, seen[1], :, :24] = np.nan  # of keys before the window
        tables[~np.isin(tables, seen)] = entry
        changed = dataclasses.replace(
            inputs,
            store=dataclasses.replace(
                inputs.store, **{name: jnp.asarray(x) for name, x in arrays.items()}
            ),
            view=dataclasses.replace(inputs.view, block_tables=jnp.asarray(tables)),
        )
        for got, expected in zip(call(changed), plain, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_cached_attention_by_name_equals_the_xla_path(interpreter, monkeypatch):  # noqa: F811
    """A prompt, then decode steps over the edge of a block: written, sealed and read by "hopper"."""
    hopper = functools.partial(
        paged_attention_hopper, interpret=interpreter(out_of_bounds_reads="uninitialized")
    )
    monkeypatch.setitem(paged_attention.IMPLEMENTATIONS, "hopper", hopper)
    monkeypatch.setitem(kv_write.IMPLEMENTATIONS, "hopper", write_kv_xla)
    config = CacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, block_size=32, num_blocks=4, max_seqs=1,
        max_blocks_per_seq=4, format="int8", open_format="bfloat16",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 66, heads, 64)) for heads in (2, 1, 1))

    @functools.partial(jax.jit, static_argnums=4, compiler_options=FAST_INTERPRET)
    def step(cache, q, k, v, implementation):
        lens = jnp.array([q.shape[1]], jnp.int32)
        cache, view = reserve(config, cache, jnp.array([0], jnp.int32), lens, q.shape[1])
        out, store = cached_attention(
            q, k, v, cache.store, 0, view, scale=0.125, implementation=implementation
        )
        return dataclasses.replace(cache, store=store), out

    def run(implementation):
        cache, outs = init_cache(config), []
        for start, end in ((0, 62), (62, 63), (63, 64), (64, 65), (65, 66)):
            part = (jnp.asarray(x[:, start:end], jnp.bfloat16) for x in (q, k, v))
            # The prompt is the same for both: what is compared is the decode.
            cache, out = step(cache, *part, "xla" if start == 0 else implementation)
            outs.append(out)
        return np.concatenate(outs[1:], axis=1)

    assert worst_row_error(run("hopper"), run("xla")) < 2 * TOLERANCES["bfloat16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 96}, "int8: head_dim: supported are 64 and 128; got 96"),
        ({"block_size": 48}, "int8: block_size: supported are 16, 32 and multiples of 64; got 48"),
        ({"format": "int4", "block_size": 32}, "int4: block_size: supported are multiples of 64"),
        ({"num_blocks": 2**24}, "scales of V in the pool: supported are 64 to 2"),
        ({"group": 40}, "query heads per kv head times value groups: supported are at most 32"),
    ],
)
def test_unsupported_codes_are_refused_with_what_is_supported(changes, message):
    changes = dict(changes)
    num_blocks = changes.pop("num_blocks", 8)
    case = dataclasses.replace(SEALED_CASES[0], **changes)
    layout = dataclasses.replace(case.layout, num_blocks=num_blocks)
    heads = case.num_kv_heads * case.group
    with pytest.raises(NotImplementedError, match=message):
        make_code_plan(layout, (1, 1, heads, case.head_dim), 4)


def test_float32_queries_are_refused(interpreter):  # noqa: F811
    inputs = make_sealed_inputs(SEALED_CASES[0])
    with pytest.raises(
        NotImplementedError, match="q: supported are bfloat16, float16; got float32"
    ):
        make_call(interpreter, SEALED_CASES[0])(inputs)
