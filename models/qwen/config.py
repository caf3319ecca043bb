"""The static description of a model: what a Hugging Face config.json says, checked once.

Invariants: frozen, hashable, validated by its constructor, never mutated; every field is read by the model, the
weight loaders or `to_hf`.  Nothing is derived from a model's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from models.qwen.rope import RopeConfig

MODEL_TYPES = ("qwen2", "qwen3", "llama")
_DEFAULT_EPS = 1e-6
_DEFAULT_THETA = 10000.0


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """Sizes and switches of a Qwen2, Qwen3 or Llama decoder.

    Attributes:
      model_type: one of `MODEL_TYPES`.
      vocab_size, hidden_size, intermediate_size, num_layers, num_q_heads, num_kv_heads, head_dim: sizes.
      max_position_embeddings: longest sequence the model was made for, in tokens.
      rms_norm_eps: added to the mean square of every norm.
      rope: the position rule.
      qkv_bias, o_bias: whether q, k, v and whether o carry a bias.
      qk_norm: RMS norm over head_dim of q and k, before the rotation.
      tie_word_embeddings: logits come from the embedding; a separate head is then not read.
      windows: per layer, the sliding window in tokens or None for full attention.
      eos_token_ids: ids that end a sequence, ascending.

    Raises:
      ValueError: "field: expected ..., got ...".
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_model_type(self.model_type)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"{field.name}: expected a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of the {self.num_q_heads} query heads, got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(
                f"rms_norm_eps: expected a number in (0, 1), got {self.rms_norm_eps!r}"
            )
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows: expected one entry for each of {self.num_layers} layers, got {len(self.windows)}"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows: expected positive integers or None, got {self.windows}")
        if any(not 0 <= token < self.vocab_size for token in self.eos_token_ids):
            raise ValueError(
                f"eos_token_ids: expected ids in [0, {self.vocab_size}), got {self.eos_token_ids}"
            )

    @classmethod
    def from_hf(
        cls,
        hf: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        extra_eos: Iterable[int] = (),
    ) -> QwenConfig:
        """Reads a Hugging Face config.json, in its old and its new form.

        Args:
          hf: config.json as a dict.
          generation: generation_config.json as a dict, if there is one.
          extra_eos: end ids from elsewhere, as a rule the tokenizer's.

        Returns:
          The config; `eos_token_ids` is the union of all three sources.

        Raises:
          ValueError: a field is missing or out of range.
          NotImplementedError: another model family, activation, or position rule; names what is supported.
        """
        model_type = hf.get("model_type")
        _check_model_type(model_type)
        _refuse_unsupported(hf)
        num_q_heads = _required_int(hf, "num_attention_heads")
        hidden_size = _required_int(hf, "hidden_size")
        num_layers = _required_int(hf, "num_hidden_layers")
        max_positions = _required_int(hf, "max_position_embeddings")
        attention_bias = bool(hf.get("attention_bias", False))
        generation = generation or {}
        eos = _ids(hf, "eos_token_id") | _ids(generation, "eos_token_id") | set(extra_eos)
        return cls(
            model_type=str(model_type),
            vocab_size=_required_int(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required_int(hf, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=_optional_int(hf, "num_key_value_heads") or num_q_heads,
            head_dim=_head_dim(hf, hidden_size, num_q_heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=float(hf.get("rms_norm_eps", _DEFAULT_EPS)),
            rope=rope_from_hf(hf, max_positions),
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=model_type != "qwen2" and attention_bias,
            qk_norm=model_type == "qwen3",
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            windows=_windows(hf, num_layers),
            eos_token_ids=tuple(sorted(eos)),
        )

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(window is not None for window in self.windows)

    def to_hf(self) -> dict[str, Any]:
        """Returns a config.json that `from_hf` and transformers read back as this config.

        Raises:
          NotImplementedError: layers with different windows, or per-frequency factors: config.json has no
            place for them.
        """
        sizes = {window for window in self.windows if window is not None}
        if len(sizes) > 1 or (sizes and self.model_type == "llama") or self.rope.freq_factors:
            raise NotImplementedError(
                f"to_hf: a {self.model_type} config.json cannot hold windows {self.windows} with "
                f"{len(self.rope.freq_factors)} frequency factors"
            )
        hf: dict[str, Any] = {
            "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": _rope_to_hf(self.rope),
            "tie_word_embeddings": self.tie_word_embeddings,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if self.model_type != "qwen2":
            hf["attention_bias"] = self.qkv_bias
        if sizes:
            hf["use_sliding_window"] = True
            hf["sliding_window"] = sizes.pop()
            hf["layer_types"] = [
                "full_attention" if window is None else "sliding_attention"
                for window in self.windows
            ]
        return hf


def rope_from_hf(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads the position rule from `rope_parameters`, `rope_scaling` and the top-level `rope_theta`.

    A value inside the dict wins over the top-level one; theta is 10000 only if neither names it.

    Raises:
      NotImplementedError: one rule per layer type, partial rotation, or an unsupported type.
      ValueError: a number is missing or out of range.
    """
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    both = {**(hf.get("rope_parameters") or {}), **given}
    nested = [key for key, value in both.items() if isinstance(value, Mapping)]
    if nested:
        raise NotImplementedError(
            f"rope_parameters: one rule per layer type ({', '.join(nested)}) is not supported"
        )
    partial = both.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise NotImplementedError(f"partial_rotary_factor: only 1.0 is supported, got {partial!r}")
    kind = both.get("rope_type") or both.get("type") or "default"
    name = "original_max_position_embeddings"
    original = hf.get(name) or both.get(name) or max_positions
    factor = both.get("factor")
    if kind == "yarn" and factor is None:
        factor = max_positions / original
    if kind in ("linear", "llama3") and factor is None:
        raise ValueError(f"rope factor: expected a number for rope_type {kind!r}, got none")
    theta = both.get("rope_theta")
    if theta is None:
        theta = hf.get("rope_theta")
    return RopeConfig(
        type=str(kind),
        theta=float(_DEFAULT_THETA if theta is None else theta),
        factor=1.0 if factor is None or kind == "default" else float(factor),
        original_max_position_embeddings=int(original) if kind in ("yarn", "llama3") else None,
        attention_factor=_optional_float(both, "attention_factor") if kind == "yarn" else None,
        mscale=_optional_float(both, "mscale"),
        mscale_all_dim=_optional_float(both, "mscale_all_dim"),
        beta_fast=_optional_float(both, "beta_fast") or 32.0,
        beta_slow=_optional_float(both, "beta_slow") or 1.0,
        truncate=bool(both.get("truncate", True)),
        low_freq_factor=_optional_float(both, "low_freq_factor") or 1.0,
        high_freq_factor=_optional_float(both, "high_freq_factor") or 4.0,
    )


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` dict of a rule, with only the keys its type reads."""
    out: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        out["factor"] = rope.factor
    if rope.type in ("yarn", "llama3"):
        out["original_max_position_embeddings"] = rope.original_max_position_embeddings
    names: tuple[str, ...] = ()
    if rope.type == "yarn":
        names = (
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        )
    elif rope.type == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    out.update({name: getattr(rope, name) for name in names if getattr(rope, name) is not None})
    return out


def _check_model_type(model_type: object) -> None:
    if model_type not in MODEL_TYPES:
        raise NotImplementedError(
            f"model_type: {model_type!r} is not supported (supported: {', '.join(MODEL_TYPES)})"
        )


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Refuses switches that would change the result and that the model does not have."""
    if hf.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act: only 'silu' is supported, got {hf['hidden_act']!r}")
    if hf.get("mlp_bias"):
        raise NotImplementedError("mlp_bias: only false is supported, got true")


def _required_int(hf: Mapping[str, Any], name: str) -> int:
    value = _optional_int(hf, name)
    if value is None:
        raise ValueError(f"{name}: expected a positive integer, got none")
    return value


def _optional_int(hf: Mapping[str, Any], name: str) -> int | None:
    value = hf.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    return value


def _optional_float(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return None if value is None else float(value)


def _head_dim(hf: Mapping[str, Any], hidden_size: int, num_q_heads: int) -> int:
    """head_dim as given, else (null or absent) hidden_size / heads; the weights' shapes confirm it."""
    given = _optional_int(hf, "head_dim")
    if given is not None:
        return given
    if hidden_size % num_q_heads:
        raise ValueError(
            f"num_attention_heads: expected a divisor of hidden_size {hidden_size} without head_dim, got {num_q_heads}"
        )
    return hidden_size // num_q_heads


def _windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Per layer, the window or None.  An explicit layer_types wins over max_window_layers.

    Without use_sliding_window there is no window at all, whatever sliding_window says.  Llama never slides.
    """
    slides = bool(hf.get("use_sliding_window", False)) and hf["model_type"] != "llama"
    size = _optional_int(hf, "sliding_window") if slides else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        return tuple(size if layer >= first else None for layer in range(num_layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types: expected {num_layers} entries of 'full_attention' or 'sliding_attention', "
            f"got {len(types)} with {unknown or 'known names'}"
        )
    if slides and size is None and "sliding_attention" in types:
        raise ValueError("sliding_window: expected a positive integer for sliding layers, got none")
    return tuple(size if kind == "sliding_attention" else None for kind in types)


def _ids(values: Mapping[str, Any], name: str) -> set[int]:
    """Token ids that may be written as null, one integer or a list."""
    value = values.get(name)
    if value is None:
        return set()
    ids = list(value) if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{name}: expected token ids, null or a list of them, got {value!r}")
    return set(ids)
