"""Every logit of prefill and of decode through the cache against transformers' full forward."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen_cases import ATOL, CASES, LENGTH
from qwen_driver import cached_logits, layer_of_first_difference, make_store, scattered_tables

from models.qwen import LoadedModel, dense_forward

CaseModel = Callable[[str], LoadedModel]
Golden = Callable[[str], dict[str, np.ndarray]]

# A prefill in uneven chunks, then decode; sizes around the block size of 4.
CHUNKS_THEN_DECODE = [5, 4, 3] + [1] * (LENGTH - 12)


BY_LAYER = {"qwen2_yarn_group3", "qwen3_sliding_group1", "llama_linear_bias_head_dim"}


@pytest.mark.parametrize(
    "name",
    [n if n in BY_LAYER else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES],
)
def test_layers_equal_transformers_one_by_one(
    name: str, case_model: CaseModel, golden: Golden
) -> None:
    case = golden(name)
    model = case_model(name).model
    assert layer_of_first_difference(model, case["tokens"], case["hidden"], ATOL) is None


@pytest.mark.parametrize("name", CASES)
def test_cached_logits_equal_transformers_full_forward(
    name: str, case_model: CaseModel, golden: Golden
) -> None:
    case = golden(name)
    logits, _ = cached_logits(case_model(name).model, case["tokens"], CHUNKS_THEN_DECODE)
    np.testing.assert_allclose(logits, case["logits"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["qwen2_layer_types", "qwen3_yarn_bias_group7"])
def test_dense_forward_equals_transformers_full_forward(
    name: str, case_model: CaseModel, golden: Golden
) -> None:
    case, model = golden(name), case_model(name).model
    run = jax.jit(lambda model, tokens: model.unembed(dense_forward(model, tokens)))
    logits = run(model, jnp.asarray(case["tokens"]))
    np.testing.assert_allclose(logits, case["logits"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 24])
def test_chunked_prefill_any_chunk_size_gives_the_same_logits(
    chunk: int, case_model: CaseModel, golden: Golden
) -> None:
    """Field case N2: the second chunk starts where the first ended."""
    case = golden("qwen3_sliding_group1")
    chunks = [chunk] * (LENGTH // chunk) + ([LENGTH % chunk] if LENGTH % chunk else [])
    logits, _ = cached_logits(case_model("qwen3_sliding_group1").model, case["tokens"], chunks)
    np.testing.assert_allclose(logits, case["logits"], atol=ATOL, rtol=0)


def test_prefill_after_shared_prefix_blocks_equals_uncached_run(case_model: CaseModel) -> None:
    """Field case N1: two prompts share 8 tokens in blocks 5 and 1; the second adds 3 of its own."""
    model = case_model("qwen3_head_dim_tied").model
    random = np.random.RandomState(7)
    prefix = random.randint(0, 61, 8)
    own = random.randint(0, 61, (2, 3))
    rows = [np.concatenate([prefix, tail])[None].astype(np.int32) for tail in own]
    store = make_store(model, 12)
    first = np.array([[5, 1, 3]], np.int32)
    _, store = cached_logits(model, rows[0], [8, 3], tables=first, store=store)
    second = np.array([[5, 1, 7]], np.int32)
    tail, _ = cached_logits(model, rows[1][:, 8:], [3], tables=second, store=store, start=8)
    whole = model.unembed(dense_forward(model, jnp.asarray(rows[1])))
    np.testing.assert_allclose(tail, whole[:, 8:], atol=ATOL, rtol=0)


def test_rows_of_different_length_do_not_disturb_each_other(case_model: CaseModel) -> None:
    from qwen_driver import _step, make_view

    model = case_model("qwen2_yarn_group3").model
    random = np.random.RandomState(3)
    tokens = random.randint(0, 61, (3, 7)).astype(np.int32)
    lens = [7, 0, 3]  # row 1 is empty; row 2 is padded
    store = make_store(model, 9)
    view = make_view(scattered_tables(3, 2, 9), lens, lens, 7, store.layout.no_block)
    logits, _ = _step(model, jnp.asarray(tokens), store, view)
    for row in (0, 2):
        alone = model.unembed(dense_forward(model, jnp.asarray(tokens[row : row + 1, : lens[row]])))
        np.testing.assert_allclose(logits[row, : lens[row]], alone[0], atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("store_format", "atol"),
    [("bfloat16", 0.25), pytest.param("float16", 0.03, marks=pytest.mark.exhaustive)],
)
def test_narrow_store_stays_near_float32(
    store_format: str, atol: float, case_model: CaseModel, golden: Golden
) -> None:
    """Rounding of K and V alone: 8 and 11 bits of mantissa, logits of size about 4, three layers."""
    case = golden("qwen3_head_dim_tied")
    model = case_model("qwen3_head_dim_tied").model
    logits, store = cached_logits(model, case["tokens"], CHUNKS_THEN_DECODE, store_format)
    assert store.kv.dtype == jnp.dtype(store_format)
    np.testing.assert_allclose(logits, case["logits"], atol=atol, rtol=0)
