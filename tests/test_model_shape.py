"""Model shapes from configs and plain numbers: KV bytes, weight counts, sliding layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.hf_config import model_shape_from_config
from jaxkv.model_shape import model_shape, num_params, weights_bytes


def config(model_type: str, numbers: str, **extra: Any) -> dict[str, Any]:
    """Returns a config dict from "hidden inner layers q_heads kv_heads vocab"."""
    hidden, inner, layers, heads, kv_heads, vocab = map(int, numbers.split())
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **extra,
    }


TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
HD128 = {"head_dim": 128}
STOCK_WINDOW = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}

QWEN25_05B = config("qwen2", "896 4864 24 14 2 151936", **TIED, **STOCK_WINDOW)
QWEN25_7B = config("qwen2", "3584 18944 28 28 4 152064", **UNTIED, **STOCK_WINDOW)
QWEN3_06B = config("qwen3", "1024 3072 28 16 8 151936", **TIED, **HD128)
QWEN3_4B = config("qwen3", "2560 9728 36 32 8 151936", **TIED, **HD128)
QWEN3_32B = config("qwen3", "5120 25600 64 64 8 151936", **UNTIED, **HD128)
SMOLLM2_135M = config("llama", "576 1536 30 9 3 49152", **TIED)
LLAMA3_8B = config("llama", "4096 14336 32 32 8 128256", **UNTIED)
MLA = config("deepseek_v2", "5120 12288 60 128 128 102400", n_routed_experts=160) | {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN25_05B, 12_288),
        (QWEN25_7B, 57_344),
        (QWEN3_06B, 114_688),
        (QWEN3_4B, 147_456),  # field case Q1: hidden / heads would give 92,160
        (QWEN3_32B, 262_144),
        (LLAMA3_8B, 131_072),
        (MLA, 60 * 1152),
    ],
)
def test_bytes_per_token_published_config_matches(source: dict[str, Any], expected: int) -> None:
    """Field cases Q1, Q2 (kv heads, no extra factor) and Q3 (16-bit and 32-bit widths)."""
    shape = model_shape_from_config(source)
    assert shape.bytes_per_token("bfloat16") == expected
    assert shape.bytes_per_token("float16") == expected
    assert shape.bytes_per_token("float32") == 2 * expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN25_05B, 494_032_768),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_06B, 596_049_920),
        (SMOLLM2_135M, 134_515_008),
        (LLAMA3_8B, 8_030_261_248),
    ],
)
def test_num_params_published_config_is_exact(source: dict[str, Any], expected: int) -> None:
    shape = model_shape_from_config(source)
    assert num_params(shape) == expected
    assert weights_bytes(shape, "float16") == 2 * expected


@pytest.mark.parametrize(
    ("given", "expected"), [({"head_dim": 32}, 32), ({"head_dim": None}, 16), ({}, 16)]
)
def test_head_dim_given_null_or_absent_is_read_right(given: dict[str, Any], expected: int) -> None:
    """Field case O3."""
    source = config("qwen3", "64 128 2 4 2 100", **given)
    assert model_shape_from_config(source).head_dim == expected


def test_num_kv_heads_absent_or_null_is_one_per_query_head() -> None:
    source = config("llama", "64 128 2 4 2 100", num_key_value_heads=None)
    assert model_shape_from_config(source).num_kv_heads == 4
    del source["num_key_value_heads"]
    assert model_shape_from_config(source).num_kv_heads == 4


# Sliding layers -----------------------------------------------------------------------------------


def sliding(model_type: str, **extra: Any) -> tuple[int | None, tuple[int, ...]]:
    shape = model_shape_from_config(config(model_type, "64 128 4 4 2 100", **extra))
    return shape.sliding_window, shape.sliding_layers


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_sliding_layers_max_window_layers_slides_from_there(model_type: str) -> None:
    """Field case K2."""
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert sliding(model_type, **on, max_window_layers=2) == (8, (2, 3))
    assert sliding(model_type, **on, max_window_layers=4) == (None, ())
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert sliding(model_type, **on, max_window_layers=2, layer_types=kinds) == (8, (0,))


@pytest.mark.parametrize("off", [{"use_sliding_window": False}, {}])
def test_sliding_layers_switch_off_is_full_attention(off: dict[str, Any]) -> None:
    """Field case K3: a window that is set but not in use, also beside a layer_types list."""
    assert sliding("qwen2", sliding_window=4096, max_window_layers=0, **off) == (None, ())
    kinds = ["sliding_attention"] * 4
    assert sliding("qwen2", sliding_window=4096, layer_types=kinds, **off) == (None, ())
    assert model_shape_from_config(QWEN25_05B).reachable_bytes(200_000) == 200_000 * 12_288


def test_sliding_layers_mistral_slides_everywhere() -> None:
    assert sliding("mistral", sliding_window=8) == (8, (0, 1, 2, 3))
    assert sliding("mistral", sliding_window=None) == (None, ())
    assert sliding("llama", sliding_window=8) == (None, ())


def test_sliding_layers_not_told_names_layer_types() -> None:
    with pytest.raises(NotImplementedError, match="layer_types: expected a list"):
        sliding("gemma2", sliding_window=8)
    with pytest.raises(NotImplementedError, match=r"layer_types: .* got linear_attention"):
        sliding("qwen3_next", layer_types=["linear_attention"] * 4)


def test_reachable_bytes_mixed_layers_counts_windows() -> None:
    shape = model_shape(4, 4, 2, 16, sliding_window=8, sliding_layers=(2, 3))
    assert shape.sequence_bytes(100) == 100 * 4 * 128
    assert shape.reachable_bytes(100) == (2 * 100 + 2 * 8) * 128
    assert shape.reachable_bytes(5) == shape.sequence_bytes(5)


# Weights that cannot be counted; bad input --------------------------------------------------------


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_num_params_mixture_of_experts_refused_but_kv_counted(field: str) -> None:
    shape = model_shape_from_config(config("qwen3_moe", "64 128 2 4 2 100", **{field: 8}))
    assert shape.bytes_per_token() == 2 * 128
    with pytest.raises(NotImplementedError, match=r"num_experts: .* got 8"):
        num_params(shape)


def test_num_params_unknown_layout_or_missing_size_names_field() -> None:
    with pytest.raises(NotImplementedError, match="model_type: expected one of qwen2"):
        num_params(model_shape_from_config(config("gemma2", "64 128 2 4 2 100")))
    with pytest.raises(NotImplementedError, match="hidden_size, intermediate_size, vocab_size"):
        num_params(model_shape(2, 4, 2, 16))
    with pytest.raises(NotImplementedError, match="kv_lora_rank"):
        num_params(model_shape_from_config(MLA | {"n_routed_experts": None}))


def test_config_several_bad_fields_reported_at_once() -> None:
    bad = config("qwen2", "64 128 2 4 2 100", num_hidden_layers=0, num_key_value_heads=1.5)
    del bad["num_attention_heads"]
    with pytest.raises(ValueError, match=r"^config: ") as error:
        model_shape_from_config(bad)
    for part in (
        "num_hidden_layers: expected an integer >= 1, got 0",
        "num_attention_heads: expected an integer >= 1, got None",
        "num_key_value_heads: expected an integer >= 1, got 1.5",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of 4 query heads, got 3"),
        ({"hidden_size": 62}, "head_dim: expected it given.*hidden_size 62; got 4"),
        ({"kv_lora_rank": 16}, "kv_lora_rank, qk_rope_head_dim: expected both"),
        ({"use_sliding_window": "no"}, "use_sliding_window: expected true or false, got 'no'"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: .* >= 1, got 0"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 2 names"),
        ({"vocab_size": -1}, "vocab_size: expected an integer >= 1, got -1"),
    ],
)
def test_config_bad_field_names_field_value_and_expectation(
    extra: dict[str, Any], message: str
) -> None:
    base = config("qwen2", "64 128 2 4 2 100", max_window_layers=0)
    with pytest.raises(ValueError, match=message):
        model_shape_from_config(base | extra)


def test_model_shape_bad_layers_raise() -> None:
    with pytest.raises(ValueError, match="sliding_layers: expected indices below 2"):
        model_shape(2, 4, 2, 16, sliding_window=8, sliding_layers=(2,))
    with pytest.raises(ValueError, match="sliding_window: expected a window"):
        model_shape(2, 4, 2, 16, sliding_layers=(1,))


@pytest.mark.torch
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama", "Mistral"])
@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("heads", [(4, 2, None), (6, 2, 32), (7, 1, None)])
def test_model_shape_random_config_equals_transformers(
    family: str, switch: bool, heads: tuple[int, int, int | None]
) -> None:
    """Weight count and sliding layers against the HF model built without data."""
    torch = pytest.importorskip("torch", reason="transformers builds its models with torch")
    transformers = pytest.importorskip("transformers", reason="the reference implementation")
    num_q_heads, num_kv_heads, head_dim = heads
    options: dict[str, Any] = {"tie_word_embeddings": switch}
    if head_dim is not None and family != "Qwen2":  # HF's Qwen2 config has no head_dim
        options["head_dim"] = head_dim
    if family in ("Qwen2", "Qwen3"):
        options |= {"use_sliding_window": switch, "sliding_window": 8, "max_window_layers": 2}
    if family == "Llama":
        options["mlp_bias"] = switch
    if family in ("Qwen3", "Llama"):
        options["attention_bias"] = switch
    hf_config = getattr(transformers, f"{family}Config")(
        hidden_size=16 * num_q_heads,
        intermediate_size=53,
        vocab_size=101,
        num_hidden_layers=4,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        **options,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(hf_config)
    shape = model_shape_from_config(hf_config.to_dict())
    assert num_params(shape) == sum(weight.numel() for weight in model.parameters())
    if family in ("Qwen2", "Qwen3"):
        assert shape.sliding_layers == ((2, 3) if switch else ())


def test_config_file_and_folder_equal_the_dict(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_06B), encoding="utf-8")
    shape = model_shape_from_config(QWEN3_06B)
    assert model_shape_from_config(path) == model_shape_from_config(str(tmp_path)) == shape
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        model_shape_from_config(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object"):
        model_shape_from_config(path)
