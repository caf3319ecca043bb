"""Weights in Hugging Face's layout: one model.safetensors, or the shards that an index names.

Invariants: only files the index names are opened, a stray one is not; a tied head in the file is not read; see
`models.qwen.weights` for the checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike

from models.qwen.config import QwenConfig
from models.qwen.modeling import Qwen
from models.qwen.weights import build_model, check_names, file_shapes, unstack

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER = {
    "input_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}


def hf_name(name: str, layer: int | None) -> str:
    """Returns the Hugging Face name of a weight of ours."""
    return _TOP[name] if layer is None else f"model.layers.{layer}.{_LAYER[name]}"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file does not hold one JSON object; names the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Returns the weight files of a folder, and tensor name -> file name where there is an index.

    Raises:
      FileNotFoundError: no weights at all, or the index names a file that is not there.
      ValueError: the index has no weight_map.
    """
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise FileNotFoundError(f"{folder}: expected {SINGLE} or {INDEX}, found neither")
        return [folder / SINGLE], None
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{folder / INDEX}: expected a weight_map of tensor names, got {weight_map!r}"
        )
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise FileNotFoundError(
            f"{folder}: {INDEX} names files that are not there: {', '.join(absent)}"
        )
    return [folder / name for name in names], weight_map


def load(
    folder: str | Path,
    config: QwenConfig,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Qwen:
    """Returns the model with the folder's weights, cast to `dtype`.

    Raises:
      FileNotFoundError: a weight file is not there; names it.
      ValueError: a file is truncated or damaged (names it), tensors are missing, unexpected or misshapen (names
        all of them), or a value does not fit `dtype`.
    """
    folder = Path(folder)
    files, weight_map = weight_files(folder)
    handles = {path.name: _open(path) for path in files}
    held = {name: set(handle.keys()) for name, handle in handles.items()}
    home = {tensor: name for name, tensors in held.items() for tensor in tensors}
    if weight_map is not None:
        absent = sorted(tensor for tensor, name in weight_map.items() if tensor not in held[name])
        if absent:
            raise ValueError(
                f"{folder / INDEX}: names tensors its files do not hold: {', '.join(absent)}"
            )
        home = dict(weight_map)
    found = {
        tensor: tuple(handles[name].get_slice(tensor).get_shape()) for tensor, name in home.items()
    }
    check_names(file_shapes(config, hf_name), _without_ignored(found, config), str(folder))
    return build_model(
        config, hf_name, lambda tensor: _read(handles, home, tensor), dtype, implementation
    )


def save(folder: str | Path, model: Qwen, config: QwenConfig | None = None) -> None:
    """Writes model.safetensors and config.json, readable by `load` and by transformers.

    Raises:
      NotImplementedError: config.json cannot express the config (`QwenConfig.to_hf`).
    """
    config = config or model.config
    folder = Path(folder)
    hf = config.to_hf() | {"dtype": str(model.dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(unstack(model, hf_name))
    safetensors.numpy.save_file(tensors, str(folder / SINGLE), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: expected a whole safetensors file, got {error}") from error


def _read(handles: Mapping[str, Any], home: Mapping[str, str], tensor: str) -> np.ndarray:
    """Reads one tensor.

    Raises:
      ValueError: it does not hold floating-point numbers (another quantisation, for instance).
    """
    handle = handles[home[tensor]]
    kind = handle.get_slice(tensor).get_dtype()
    if kind not in ("F64", "F32", "F16", "BF16"):
        raise ValueError(f"{tensor}: expected floating-point weights, got {kind} in {home[tensor]}")
    return handle.get_tensor(tensor)


def _without_ignored(
    found: Mapping[str, tuple[int, ...]], config: QwenConfig
) -> dict[str, tuple[int, ...]]:
    """Drops what a checkpoint may hold and the model does not read: a tied head, old rotation buffers."""
    return {
        name: shape
        for name, shape in found.items()
        if not name.endswith("rotary_emb.inv_freq")
        and not (config.tie_word_embeddings and name == hf_name("lm_head", None))
    }
