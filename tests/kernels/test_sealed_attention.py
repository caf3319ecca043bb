"""Attention over sealed blocks: every implementation that reads codes, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from fast_compile import FAST_INTERPRET
from jax.experimental.pallas import tpu as pltpu
from oracles.attention import TOLERANCES, worst_row_error
from oracles.quantised import sealed_attention_oracle
from sealed_cases import SEALED_CASES, SealedCase, make_sealed_inputs

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.tpu_plan import Tuning
from pallas_kernels.paged_attention.triton import paged_attention_triton
from pallas_kernels.paged_attention.triton_plan import Tiling
from pallas_kernels.sealed import SealedStore

NARROW = Tuning(
    max_chunk_len=128, max_chunk_len_wide=128, max_queries=32, wide_queries=16, smem_table_bytes=0
)
RUNS = {
    "reference": functools.partial(paged_attention, implementation="reference", return_lse=True),
    "xla": functools.partial(paged_attention, implementation="xla", return_lse=True),
    "tpu": functools.partial(paged_attention_tpu, interpret=pltpu.InterpretParams(), tuning=NARROW),
    "triton": functools.partial(paged_attention_triton, interpret=True),
}


@functools.cache
def expected(case: SealedCase) -> tuple[np.ndarray, np.ndarray]:
    inputs = make_sealed_inputs(case)
    view = jax.tree.map(np.asarray, inputs.view)
    return sealed_attention_oracle(
        np.asarray(inputs.q), inputs.store, 1, view.block_tables, view.kv_lens, view.q_lens,
        **inputs.knobs(case),
    )  # fmt: skip


# One head, whose K scales lie in both halves of their row.
ACROSS = SealedCase("fp8 across halves", "fp8_e4m3", 32, 256, 1, 2, ((65, 1), (64, 1)))


def cases() -> list:
    """Returns every implementation on every case; the two in jnp share their reading, so two cases of one will do."""
    few = ("int8 block 32, window", "int4 chunk, window")
    return [
        pytest.param("tpu", ACROSS, id="tpu-fp8 across halves"),
    ] + [
        pytest.param(
            name,
            case,
            id=f"{name}-{case.name}",
            marks=[pytest.mark.exhaustive]
            if name in ("xla", "reference") and case.name not in few
            else [],
        )
        for name in RUNS
        for case in SEALED_CASES
    ]


@pytest.mark.parametrize(("name", "case"), cases())
def test_sealed_attention_matches_the_oracle(name: str, case: SealedCase) -> None:
    """Codes, scales and centres, block edges, windows, empty rows; rubbish in every block that is not sealed."""
    inputs = make_sealed_inputs(case)
    call = jax.jit(
        functools.partial(RUNS[name], **inputs.knobs(case)),
        compiler_options=FAST_INTERPRET,
    )
    out, lse = call(inputs.q, inputs.store, inputs.layer, inputs.view)
    want, want_lse = expected(case)
    assert worst_row_error(out, want) < TOLERANCES[case.dtype]
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(
        np.asarray(lse)[seen],
        want_lse[seen],
        rtol=1e-5,
        atol=2e-5 if case.dtype == "float32" else 2e-2,
    )


# Blocks of several steps with a ragged end, heads of no power of two, one split and several.
RAGGED = (
    (
        SealedCase("int4", "int4", 40, 96, 1, 2, ((130, 7), (81, 1)), 7, False, 32, 70, 3.0),
        Tiling(query_rows=16, keys=32, num_splits=3, num_warps=4, num_stages=2),
    ),
    (
        SealedCase("fp8", "fp8_e4m3", 24, 48, 2, 3, ((71, 2), (24, 1)), 2, window=40, soft_cap=2.0),
        Tiling(query_rows=16, keys=16, num_splits=1, num_warps=4, num_stages=2),
    ),
)


@pytest.mark.parametrize(("case", "tiling"), RAGGED, ids=lambda x: getattr(x, "name", None))
def test_triton_ragged_blocks_bits_and_traced_knobs_match_the_oracle(
    case: SealedCase, tiling: Tiling
) -> None:
    inputs = make_sealed_inputs(case)
    layout = dataclasses.replace(case.layout, as_bits=True)
    arrays = (inputs.store.codes, inputs.store.key_affine, inputs.store.value_affine)
    types = (layout.codes_dtype, layout.affine_dtype, layout.affine_dtype)
    bits = [jax.lax.bitcast_convert_type(x, t) for x, t in zip(arrays, types, strict=True)]
    call = jax.jit(
        functools.partial(paged_attention_triton, interpret=True, tiling=tiling),
    )
    out, lse = call(
        inputs.q, SealedStore(*bits, layout), inputs.layer, inputs.view, **inputs.knobs(case)
    )
    want, want_lse = expected(case)
    assert worst_row_error(out, want) < TOLERANCES["float32"]
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-5)


def test_triton_refuses_codes_it_cannot_pair() -> None:
    case = SealedCase("odd", "int8", 32, 33, 1, 1, ((40, 1),))
    inputs = make_sealed_inputs(case)
    with pytest.raises(NotImplementedError, match="even head_dim and value groups, got 33 and 33"):
        RUNS["triton"](inputs.q, inputs.store, inputs.layer, inputs.view, **inputs.knobs(case))
