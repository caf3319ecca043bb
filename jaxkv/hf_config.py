"""Reads a Hugging Face config.json into a `ModelShape`.

Invariants: only config fields count, never a model's name. `model_type` (the layout's name in the
config) decides which projections carry biases and norms, and what an absent sliding-window field
means, as in the HF code. All fields that are missing or wrong are reported at once.

References: field cases O3 (head_dim), K2 and K3 (sliding layers); transformers' configuration files
of qwen2, qwen3, llama, mistral and deepseek_v3.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxkv import ledger
from jaxkv.model_shape import ModelShape, model_shape

QWEN_TYPES = ("qwen2", "qwen3")
ALWAYS_SLIDING_TYPES = ("mistral", "mixtral", "phi3", "starcoder2")
NEVER_SLIDING_TYPES = ("llama",)
OFF_BY_DEFAULT_TYPES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
HF_MAX_WINDOW_LAYERS = 28

T = TypeVar("T")


def _read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object, got {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(read).__name__}")
    return read


def _head_dim(config: Mapping[str, Any]) -> int:
    """Returns head_dim as given, else hidden_size / num_attention_heads.

    MLA configs without one get the query-key width; no cached byte depends on it there.
    """
    given = config.get("head_dim")
    if given is not None:
        return ledger.check_count("head_dim", given, 1)
    if config.get("kv_lora_rank") is not None and config.get("qk_nope_head_dim") is not None:
        return int(config["qk_nope_head_dim"]) + int(config.get("qk_rope_head_dim") or 0)
    hidden = ledger.check_count("hidden_size", config.get("hidden_size"), 1)
    heads = ledger.check_count("num_attention_heads", config.get("num_attention_heads"), 1)
    if hidden % heads:
        raise ValueError(
            f"head_dim: expected it given, or num_attention_heads dividing hidden_size {hidden}; "
            f"got {heads}"
        )
    return hidden // heads


def _typed_layers(layer_types: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the sliding indices of an explicit layer_types list."""
    if not isinstance(layer_types, (list, tuple)) or len(layer_types) != num_layers:
        raise ValueError(f"layer_types: expected a list of {num_layers} names, got {layer_types!r}")
    unknown = sorted(set(map(str, layer_types)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise NotImplementedError(
            f"layer_types: expected full_attention or sliding_attention, got {', '.join(unknown)}"
        )
    return tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")


def _untyped_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the sliding indices of a config with a window in force and no layer_types."""
    model_type = config.get("model_type")
    if model_type in QWEN_TYPES or (model_type is None and "max_window_layers" in config):
        first = config.get("max_window_layers", HF_MAX_WINDOW_LAYERS)
        return tuple(range(ledger.check_count("max_window_layers", first), num_layers))
    if model_type in ALWAYS_SLIDING_TYPES or model_type is None:
        return tuple(range(num_layers))
    raise NotImplementedError(
        f"layer_types: expected a list saying which layers slide "
        f"(model_type {model_type!r}), got none"
    )


def _sliding(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the window and the layers that slide, as the HF code reads the config.

    (None, ()) when all attend fully.
    """
    model_type = config.get("model_type")
    use = config.get("use_sliding_window")
    use = model_type not in OFF_BY_DEFAULT_TYPES if use is None else use
    if not isinstance(use, bool):
        raise ValueError(f"use_sliding_window: expected true or false, got {use!r}")
    window = config.get("sliding_window")
    layer_types = config.get("layer_types")
    layers = () if layer_types is None else _typed_layers(layer_types, num_layers)
    if not use or window is None or model_type in NEVER_SLIDING_TYPES:
        return None, ()
    if layer_types is None:
        layers = _untyped_layers(config, num_layers)
    return (ledger.check_count("sliding_window", window, 1), layers) if layers else (None, ())


def _biases(config: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which projections have biases and norms.

    Qwen2 has q, k, v biases whatever attention_bias says.
    """
    model_type = config.get("model_type")
    attention_bias = bool(config.get("attention_bias", False)) and model_type in ("qwen3", "llama")
    return {
        "qkv_bias": model_type == "qwen2" or attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias", False)) and model_type == "llama",
        "qk_norm": model_type == "qwen3",
    }


def _num_experts(config: Mapping[str, Any]) -> int:
    return max((config.get(name) or 0 for name in EXPERT_FIELDS), default=0)


class _Reader:
    """Runs one check at a time and keeps what each found wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def read(self, part: Callable[[], T], fallback: T) -> T:
        try:
            return part()
        except ValueError as error:
            self.problems.append(str(error))
            return fallback

    def count(self, config: Mapping[str, Any], name: str, fallback: int = 1) -> int:
        return self.read(lambda: ledger.check_count(name, config.get(name), 1), fallback)


def model_shape_from_config(config: Mapping[str, Any] | str | Path) -> ModelShape:
    """Returns the `ModelShape` of a Hugging Face config: a dict, a config.json, or its folder.

    head_dim is taken as given, else hidden_size / num_attention_heads; num_key_value_heads absent
    means one per query head; use_sliding_window false means full attention whatever sliding_window
    says; an explicit layer_types list wins over max_window_layers.

    Raises: ValueError with the fields that are missing or wrong, all of them; NotImplementedError
    naming the field for layers that do not cache keys and values, or for a window whose layers the
    config does not tell; OSError for an unreadable file.
    """
    config = _read_config(config)
    reader = _Reader()
    num_layers = reader.count(config, "num_hidden_layers", fallback=0)
    num_q_heads = reader.count(config, "num_attention_heads")
    num_kv_heads = num_q_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = reader.count(config, "num_key_value_heads")
    head_dim = reader.read(lambda: _head_dim(config), 1)
    window: int | None = None
    layers: tuple[int, ...] = ()
    if num_layers:
        window, layers = reader.read(lambda: _sliding(config, num_layers), (window, layers))
    if reader.problems:
        raise ValueError("config: " + "; ".join(dict.fromkeys(reader.problems)))
    is_mla = config.get("kv_lora_rank") is not None
    return model_shape(
        num_layers,
        num_q_heads,
        num_kv_heads,
        head_dim,
        hidden_size=config.get("hidden_size"),
        intermediate_size=config.get("intermediate_size"),
        vocab_size=config.get("vocab_size"),
        max_context_len=config.get("max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=_num_experts(config),
        sliding_window=window,
        sliding_layers=layers,
        kv_lora_rank=config.get("kv_lora_rank"),
        qk_rope_head_dim=config.get("qk_rope_head_dim") if is_mla else None,
        model_type=config.get("model_type"),
        **_biases(config),
    )
