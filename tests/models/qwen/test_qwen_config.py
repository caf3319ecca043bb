"""Reading config.json: what is derived, what wins, what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from qwen_cases import CASES

from models.qwen import QwenConfig


def hf_config(model_type: str = "qwen2", **given: Any) -> dict[str, Any]:
    base = {
        "model_type": model_type,
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    }
    return base | given


def without(hf: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if key != name}


@pytest.mark.parametrize(
    ("given", "expected"), [({"head_dim": 32}, 32), ({"head_dim": None}, 16), ({}, 16)]
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_head_dim_given_null_absent(model_type: str, given: dict[str, Any], expected: int) -> None:
    """Field case O3."""
    assert QwenConfig.from_hf(hf_config(model_type, **given)).head_dim == expected


@pytest.mark.parametrize(
    ("max_window_layers", "expected"), [(2, (None, None, 8, 8)), (4, (None,) * 4)]
)
def test_max_window_layers_first_layers_are_full(
    max_window_layers: int, expected: tuple[int | None, ...]
) -> None:
    """Field case K2."""
    hf = hf_config(use_sliding_window=True, sliding_window=8, max_window_layers=max_window_layers)
    assert QwenConfig.from_hf(hf).windows == expected


def test_layer_types_win_over_max_window_layers() -> None:
    """Field case K2."""
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    hf = hf_config(
        use_sliding_window=True, sliding_window=8, max_window_layers=4, layer_types=types
    )
    assert QwenConfig.from_hf(hf).windows == (8, None, None, 8)


@pytest.mark.parametrize("sliding_window", [131072, 4096, 8, None])
def test_use_sliding_window_false_is_full_attention(sliding_window: int | None) -> None:
    """Field case K3: stock Qwen2.5 values."""
    hf = hf_config(use_sliding_window=False, sliding_window=sliding_window, max_window_layers=0)
    config = QwenConfig.from_hf(hf)
    assert config.windows == (None,) * 4
    assert not config.slides


def test_sliding_layers_without_size_raise() -> None:
    hf = hf_config(
        use_sliding_window=True, sliding_window=None, layer_types=["sliding_attention"] * 4
    )
    with pytest.raises(ValueError, match="sliding_window: expected a positive integer"):
        QwenConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("model_type", "given", "qkv_bias", "o_bias"),
    [
        ("qwen2", {}, True, False),
        ("qwen2", {"attention_bias": False}, True, False),
        ("qwen3", {}, False, False),
        ("qwen3", {"attention_bias": True}, True, True),
        ("llama", {}, False, False),
        ("llama", {"attention_bias": True}, True, True),
    ],
)
def test_bias_rules_of_each_family(
    model_type: str, given: dict[str, Any], qkv_bias: bool, o_bias: bool
) -> None:
    """Field case O2."""
    config = QwenConfig.from_hf(hf_config(model_type, **given))
    assert (config.qkv_bias, config.o_bias) == (qkv_bias, o_bias)
    assert config.qk_norm == (model_type == "qwen3")


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_theta": 1000000.0},
        {"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1000000}},
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_theta": 1000000, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_rope_theta_found_wherever_it_is(given: dict[str, Any]) -> None:
    """Field case N4."""
    assert QwenConfig.from_hf(hf_config(**given)).rope.theta == 1e6


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_yarn_length_is_not_multiplied_twice(key: str, kind_key: str) -> None:
    """Field case N7: factor 4, original 32768, max_position_embeddings already 131072."""
    scaling = {kind_key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    hf = hf_config(max_position_embeddings=131072, rope_theta=1e6, **{key: scaling})
    config = QwenConfig.from_hf(hf)
    assert config.max_position_embeddings == 131072
    assert (config.rope.type, config.rope.factor) == ("yarn", 4.0)
    assert config.rope.original_max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "tokenizer_eos", "expected"),
    [
        (43, [45, 43], (45,), (43, 45)),
        (43, 45, (), (43, 45)),
        ([43], 45, (47,), (43, 45, 47)),
        (None, None, (45,), (45,)),
        (43, None, (), (43,)),
    ],
)
def test_eos_is_the_union_of_all_sources(
    config_eos: Any, generation_eos: Any, tokenizer_eos: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Field case O5, ids scaled down."""
    hf = hf_config(eos_token_id=config_eos)
    config = QwenConfig.from_hf(hf, {"eos_token_id": generation_eos}, tokenizer_eos)
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (hf_config("mixtral"), "model_type: 'mixtral' is not supported (supported: qwen2"),
        (without(hf_config(), "model_type"), "model_type: None is not supported"),
        (hf_config(hidden_act="gelu"), "hidden_act: only 'silu' is supported, got 'gelu'"),
        (hf_config("llama", mlp_bias=True), "mlp_bias"),
        (hf_config(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
        (hf_config(rope_scaling={"rope_type": "longrope"}), "'longrope' is not supported"),
        (
            hf_config(rope_parameters={"full_attention": {"rope_type": "default"}}),
            "one rule per layer type (full_attention)",
        ),
        (hf_config(partial_rotary_factor=0.5), "partial_rotary_factor: only 1.0"),
    ],
)
def test_unsupported_config_is_refused_by_name(hf: dict[str, Any], message: str) -> None:
    """Field case N3 for dynamic and longrope."""
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        QwenConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_key_value_heads": 3},
            "num_kv_heads: expected a divisor of the 4 query heads, got 3",
        ),
        ({"hidden_size": 66}, "num_attention_heads: expected a divisor of hidden_size 66"),
        ({"vocab_size": 0}, "vocab_size: expected a positive integer, got 0"),
        ({"vocab_size": None}, "vocab_size: expected a positive integer, got none"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: expected a positive integer, got 2.0"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a number in (0, 1), got 0.0"),
        ({"rope_theta": 0.5}, "rope_theta: expected a number above 1, got 0.5"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor: expected a number for rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope factor: expected a number of"),
        ({"eos_token_id": 100}, "eos_token_ids: expected ids in [0, 100), got (100,)"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id: expected token ids"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: expected a positive"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 4 entries"),
    ],
)
def test_bad_value_names_field_value_and_expectation(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QwenConfig.from_hf(hf_config(**given))


@pytest.mark.parametrize("name", CASES)
def test_to_hf_and_back_is_the_same_config(name: str) -> None:
    config = QwenConfig.from_hf(CASES[name])
    assert QwenConfig.from_hf(config.to_hf()) == config


def test_to_hf_refuses_what_config_json_cannot_hold() -> None:
    config = dataclasses.replace(QwenConfig.from_hf(hf_config()), windows=(8, 16, None, None))
    with pytest.raises(NotImplementedError, match="cannot hold windows"):
        config.to_hf()


def test_config_is_hashable_and_frozen() -> None:
    config = QwenConfig.from_hf(hf_config())
    assert hash(config) == hash(QwenConfig.from_hf(hf_config()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.head_dim = 8  # type: ignore[misc]
