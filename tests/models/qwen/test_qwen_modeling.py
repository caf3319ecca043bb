"""The decoder itself: heads, windows, norms, scale, dtypes, and what its errors say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen_driver import cached_logits, make_store, make_view, scattered_tables
from test_qwen_config import hf_config

from models.qwen import (
    DecoderLayer,
    LoadedModel,
    Qwen,
    QwenConfig,
    abstract_model,
    dense_attend,
    dense_forward,
    random_model,
)
from models.qwen.modeling import NO_WINDOW, layer_shapes, layer_windows, rms_norm, top_shapes

CaseModel = Callable[[str], LoadedModel]


def recording(seen: list[Any], out_like: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns an `attend` that records its arguments; works outside jit, on one layer."""

    def attend(carry: Any, layer: Any, q: Any, k: Any, v: Any, window: Any) -> tuple[Any, Any]:
        seen.append((q, k, v, window))
        return out_like(q), carry

    return attend


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 2), (6, 2), (28, 4), (32, 8)])
def test_query_head_reads_kv_head_by_integer_group(num_q_heads: int, num_kv_heads: int) -> None:
    """Field cases M1 and M2: (4, 2) gives [0, 0, 1, 1], query head 27 of (28, 4) gives 3."""
    q = jnp.zeros((1, 1, num_q_heads, 4))
    k = jnp.zeros((1, 1, num_kv_heads, 4))
    v = jnp.broadcast_to(jnp.arange(num_kv_heads, dtype=jnp.float32)[:, None], (num_kv_heads, 4))
    out, _ = dense_attend(0.5)(None, jnp.int32(0), q, k, v[None, None], None)
    expected = np.arange(num_q_heads) // (num_q_heads // num_kv_heads)
    np.testing.assert_array_equal(out[0, 0, :, 0], expected)


def test_window_of_4_at_position_9_sees_keys_6_to_9() -> None:
    """Field case K1: four keys, itself included."""
    q, k = jnp.zeros((1, 10, 1, 2)), jnp.zeros((1, 10, 1, 2))
    v = jnp.broadcast_to(jnp.eye(10)[None, :, None, :], (1, 10, 1, 10))
    out, _ = dense_attend(1.0)(None, jnp.int32(0), q, k, v[..., :2], jnp.int32(4))
    del out
    weights = []
    for start in range(0, 10, 2):
        out, _ = dense_attend(1.0)(
            None, jnp.int32(0), q, k, v[..., start : start + 2], jnp.int32(4)
        )
        weights.append(out[0, 9, 0])
    expected = np.where(np.arange(10) >= 6, 0.25, 0.0)
    np.testing.assert_allclose(np.concatenate(weights), expected, atol=1e-7)


def test_layers_get_their_own_window(case_model: CaseModel) -> None:
    """Field case K2 at the model: full, full, slide, slide; the cached path agrees in test_qwen_parity."""
    config = case_model("qwen3_sliding_group1").config
    assert layer_windows(config).tolist() == [NO_WINDOW, NO_WINDOW, 5, 5]
    assert layer_windows(case_model("qwen3_head_dim_tied").config) is None


@pytest.mark.parametrize("head_dim", [64, 16])
def test_scores_are_scaled_by_head_dim(head_dim: int) -> None:
    """Field case M4: head_dim 64 scales by 1/8, whatever a kernel pads it to."""
    config = QwenConfig.from_hf(
        hf_config("llama", head_dim=head_dim, num_hidden_layers=1, num_key_value_heads=4)
    )
    model = random_model(config, jax.random.key(0))
    model = jax.tree.map(lambda leaf: leaf * 3, model)  # the scale shows in the scores
    tokens = np.arange(6, dtype=np.int32)[None]
    cached, _ = cached_logits(model, tokens, [6])
    positions = jnp.arange(6, dtype=jnp.int32)[None]
    right = model.forward(jnp.asarray(tokens), positions, dense_attend(head_dim**-0.5), None)[0]
    wrong = model.forward(jnp.asarray(tokens), positions, dense_attend(128**-0.5), None)[0]
    np.testing.assert_allclose(cached, model.unembed(right), atol=1e-4)
    assert np.abs(cached - np.asarray(model.unembed(wrong))).max() > 1e-2


def test_rms_norm_divides_by_mean_square_not_variance() -> None:
    """Field case N8: k = [3, 1, 1, 1] has mean square 3 (variance 0.75)."""
    out = rms_norm(jnp.asarray([[3.0, 1, 1, 1]]), jnp.asarray([1.0, 2, 3, 4]), 1e-6)
    np.testing.assert_allclose(out[0], np.array([3, 2, 3, 4]) / np.sqrt(3), rtol=1e-6)


def test_qk_norm_comes_before_rope_over_head_dim() -> None:
    """Field case N8: tiny Qwen3, head_dim 4, k of every token [3, 1, 1, 1], norm weight [1, 2, 3, 4]."""
    hf = hf_config("qwen3", hidden_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    config = QwenConfig.from_hf(hf | {"num_hidden_layers": 1})
    weights = {name: jnp.zeros(shape) for name, shape in layer_shapes(config).items()}
    weights["input_norm"] = jnp.ones(4)
    weights["k_proj"] = jnp.zeros((4, 4)).at[0].set(jnp.asarray([3.0, 1, 1, 1]))
    weights["k_norm"] = jnp.asarray([1.0, 2, 3, 4])
    seen: list[Any] = []
    x = jnp.broadcast_to(jnp.asarray([1.0, 1, 1, 1]), (1, 2, 4))
    cos = jnp.asarray([1.0, 0.0]).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, 2))
    sin = jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, 2))
    layer = DecoderLayer(config, weights)
    layer(x, cos, sin, jnp.int32(0), None, layer.product, recording(seen, lambda q: q), None)
    k = seen[0][1][0, :, 0]
    normed = np.array([3, 2, 3, 4]) / np.sqrt(3)
    np.testing.assert_allclose(k[0], normed, rtol=1e-5)
    quarter_turn = np.concatenate([-normed[2:], normed[:2]])
    np.testing.assert_allclose(k[1], quarter_turn, rtol=1e-5)


def test_qwen2_bias_reaches_q_k_v_and_not_o() -> None:
    """Field case O2: zero weights and biases of 1."""
    config = QwenConfig.from_hf(hf_config("qwen2", rope_theta=1e6, num_hidden_layers=1))
    shapes = layer_shapes(config)
    assert "o_bias" not in shapes
    weights = {
        name: jnp.ones(s) if name.endswith("bias") else jnp.zeros(s) for name, s in shapes.items()
    }
    seen: list[Any] = []
    one, zero = jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 1, 1, 8))
    layer = DecoderLayer(config, weights)
    out, _ = layer(
        jnp.ones((1, 1, 64)),
        one,
        zero,
        jnp.int32(0),
        None,
        layer.product,
        recording(seen, jnp.zeros_like),
        None,
    )
    for part in seen[0][:3]:
        np.testing.assert_array_equal(part, 1.0)
    np.testing.assert_array_equal(out, 1.0)  # the residual alone


def test_float16_large_q_and_k_do_not_overflow() -> None:
    """Field case O6: q = k = 40 at head_dim 64 has dot 102400, past float16's 65504."""
    q = jnp.full((1, 2, 1, 64), 40, jnp.float16)
    v = jnp.asarray([1.0, 3.0], jnp.float16)[None, :, None, None] * jnp.ones(
        (1, 1, 1, 64), jnp.float16
    )
    out, _ = dense_attend(0.125)(None, jnp.int32(0), q, q, v, None)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(out[0, 1, 0], 2.0)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.exhaustive)]
)
def test_narrow_weights_keep_dtype_and_give_float32_logits(
    dtype: Any, case_model: CaseModel
) -> None:
    """Field case O7: the store keeps its dtype and structure; hidden has the weights' dtype."""
    wide = case_model("qwen3_head_dim_tied").model
    model = jax.tree.map(lambda leaf: leaf.astype(dtype), wide)
    tokens = np.arange(8, dtype=np.int32)[None]
    store = make_store(model, 8, "bfloat16")
    view = make_view(scattered_tables(1, 2, 8), [8], [8], 8, 8)
    hidden, after = jax.jit(lambda *args: args[0](*args[1:]))(
        model, jnp.asarray(tokens), store, view
    )
    assert hidden.dtype == dtype
    assert jax.tree.structure(after) == jax.tree.structure(store)
    assert after.kv.dtype == jnp.bfloat16
    logits = model.unembed(hidden)
    assert logits.dtype == jnp.float32
    exact = wide.unembed(dense_forward(wide, jnp.asarray(tokens)))
    np.testing.assert_allclose(logits, exact, atol=0.3)


def test_model_is_a_pytree_argument_with_one_trace(case_model: CaseModel) -> None:
    """Weights are arguments of the program: another model of the same config does not trace again."""
    model = case_model("qwen3_head_dim_tied").model
    traces = []

    @jax.jit
    def run(model: Qwen, tokens: jax.Array) -> jax.Array:
        traces.append(None)
        return dense_forward(model, tokens)

    tokens = jnp.zeros((1, 4), jnp.int32)
    first = run(model, tokens)
    second = run(jax.tree.map(lambda leaf: leaf * 0.5, model), tokens)
    assert len(traces) == 1
    assert not np.allclose(first, second)
    sizes = {leaf.size for leaf in jax.tree.leaves(model)}
    jaxpr = jax.make_jaxpr(dense_forward)(model, tokens)
    assert not sizes & {np.size(const) for const in jaxpr.consts if np.size(const) > 100}


def test_reference_implementation_is_passed_to_the_ops(case_model: CaseModel) -> None:
    loaded = case_model("qwen2_layer_types")
    weights = {name: getattr(loaded.model, name)[...] for name in top_shapes(loaded.config)}
    weights["layers"] = {
        name: loaded.model.layer_weight(name) for name in layer_shapes(loaded.config)
    }
    reference = Qwen(loaded.config, weights, implementation="reference")
    tokens = np.arange(10, dtype=np.int32)[None]
    ours, _ = cached_logits(loaded.model, tokens, [10])
    theirs, _ = cached_logits(reference, tokens, [10])
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    unknown = Qwen(loaded.config, weights, implementation="abacus")
    with pytest.raises(ValueError, match="abacus"):
        cached_logits(unknown, tokens, [10])


@pytest.mark.parametrize(
    "name",
    [pytest.param("qwen2_layer_types", marks=pytest.mark.exhaustive), "qwen3_sliding_group1"],
)
def test_spread_model_gives_the_logits_of_the_stacked_one(case_model: CaseModel, name: str) -> None:
    stacked = case_model(name).model
    spread = stacked.spread()
    tokens = np.arange(10, dtype=np.int32)[None]
    ours, _ = cached_logits(spread, tokens, [7, 3])
    theirs, _ = cached_logits(stacked, tokens, [7, 3])
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for weight in layer_shapes(case_model(name).config):
        np.testing.assert_array_equal(spread.layer_weight(weight), stacked.layer_weight(weight))
    own = [leaf for leaf in jax.tree.leaves(spread) if leaf.ndim == 3]
    assert not own, "a spread model keeps no stack of matrices"


def test_abstract_model_has_shapes_and_no_bytes() -> None:
    """Qwen3-8B: 8.19e9 parameters, described without allocating them."""
    config = QwenConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        }
    )
    leaves = jax.tree.leaves(abstract_model(config, jnp.bfloat16))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert sum(leaf.size for leaf in leaves) == 8_190_735_360


def test_missing_and_misshapen_weights_are_all_named() -> None:
    config = QwenConfig.from_hf(hf_config("llama"))
    weights: dict[str, Any] = {name: jnp.zeros(shape) for name, shape in top_shapes(config).items()}
    weights["layers"] = {name: jnp.zeros((4, *s)) for name, s in layer_shapes(config).items()}
    del weights["final_norm"]
    weights["layers"]["k_proj"] = jnp.zeros((4, 64, 64))
    weights["layers"]["q_bias"] = jnp.zeros((4, 64))
    with pytest.raises(ValueError, match="final_norm: missing") as error:
        Qwen(config, weights)
    assert "layers.k_proj: expected (4, 64, 32), got (4, 64, 64)" in str(error.value)
    assert "layers.q_bias: not a weight of this model" in str(error.value)


def test_store_of_another_model_is_refused(case_model: CaseModel) -> None:
    model = case_model("qwen3_head_dim_tied").model
    store = make_store(model, 8)
    view = make_view(scattered_tables(1, 2, 8), [4], [4], 4, 8)
    layout = dataclasses.replace(store.layout, head_dim=8)
    with pytest.raises(ValueError, match="store: expected head_dim 16 of the model, got 8"):
        model(jnp.zeros((1, 4), jnp.int32), dataclasses.replace(store, layout=layout), view)
    with pytest.raises(ValueError, match=re.escape("tokens: expected integers of shape (1, 4)")):
        model(jnp.zeros((1, 3), jnp.int32), store, view)
    with pytest.raises(ValueError, match=re.escape("got float32[1, 4]")):
        model(jnp.zeros((1, 4)), store, view)
