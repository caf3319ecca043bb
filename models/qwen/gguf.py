"""Weights and config from one GGUF file, read with the package `gguf`; numbers are dequantised to float32 first.

Invariants:
  * The config comes from the file's metadata and its list of tensors, never from its name.
  * Files of architecture "llama" hold the rows of q and k with the rotated pairs interleaved; they are put back in
    halves here, so that one rotation serves all.  qwen2 and qwen3 files already are in halves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.qwen.config import MODEL_TYPES, QwenConfig
from models.qwen.modeling import Qwen
from models.qwen.rope import RopeConfig, attention_factor
from models.qwen.weights import build_model, check_names, file_shapes

_TOP = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_LAYER = {
    "input_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_name(name: str, layer: int | None) -> str:
    """Returns the GGUF name of a weight of ours."""
    return _TOP[name] if layer is None else f"blk.{layer}.{_LAYER[name]}"


class GGUFFile:
    """An open GGUF file: its metadata and its tensors, nothing dequantised yet.

    Attributes:
      path: where it is.
      metadata: key -> value, as the file spells the keys.
      shapes: tensor name -> shape, outermost axis first.
    """

    def __init__(self, path: str | Path):
        """Opens a file.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a whole GGUF file.
          ImportError: the package `gguf` is not installed.
        """
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                "reading GGUF files needs the package gguf: pip install 'jaxkv[gguf]'"
            ) from error
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
        self._dequantize = gguf.quants.dequantize
        try:
            reader = gguf.GGUFReader(str(self.path))
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(f"{self.path}: expected a whole GGUF file, got {error}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as f32 in the shape that `shapes` says.

        Raises:
          NotImplementedError: the package cannot dequantise its type.
        """
        tensor = self._tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{name}: no dequantiser for type {tensor.tensor_type.name}"
            ) from error
        return np.asarray(values, np.float32).reshape(self.shapes[name])

    @property
    def architecture(self) -> str:
        """`general.architecture` of the file."""
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value under the architecture's own `key`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def config_from_gguf(file: GGUFFile) -> QwenConfig:
    """Returns the config that the file's metadata and tensors describe.

    Raises:
      ValueError: a key is missing or out of range.
      NotImplementedError: another architecture, or a switch the model does not have.
    """
    arch = file.architecture
    if arch not in MODEL_TYPES:
        raise NotImplementedError(
            f"general.architecture: {arch!r} is not supported (supported: {', '.join(MODEL_TYPES)})"
        )
    if file.get("attention.sliding_window"):
        raise NotImplementedError(
            f"{arch}.attention.sliding_window: sliding layers are not read from GGUF"
        )
    num_layers, num_q_heads = _int(file, "block_count"), _int(file, "attention.head_count")
    hidden_size = _int(file, "embedding_length")
    head_dim = int(file.get("attention.key_length") or hidden_size // num_q_heads)
    if file.get("rope.dimension_count", head_dim) != head_dim:
        raise NotImplementedError(
            f"{arch}.rope.dimension_count: only the whole head_dim {head_dim} is supported, "
            f"got {file.get('rope.dimension_count')}"
        )
    return QwenConfig(
        model_type=arch,
        vocab_size=file.shapes.get("token_embd.weight", (0,))[0],
        hidden_size=hidden_size,
        intermediate_size=_int(file, "feed_forward_length"),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=_int(file, "attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        max_position_embeddings=_int(file, "context_length"),
        rms_norm_eps=float(file.get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope(file),
        qkv_bias="blk.0.attn_q.bias" in file.shapes,
        o_bias="blk.0.attn_output.bias" in file.shapes,
        qk_norm="blk.0.attn_q_norm.weight" in file.shapes,
        tie_word_embeddings="output.weight" not in file.shapes,
        windows=(None,) * num_layers,
        eos_token_ids=eos_from_gguf(file.metadata),
    )


def eos_from_gguf(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids that end a sequence or a turn, ascending."""
    ids = {metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    return tuple(sorted(int(i) for i in ids if i is not None))


def load(
    path: str | Path | GGUFFile,
    config: QwenConfig | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Qwen:
    """Returns the model with the file's weights, dequantised and cast to `dtype`.

    Raises:
      FileNotFoundError, ImportError, NotImplementedError: see `GGUFFile` and `config_from_gguf`.
      ValueError: tensors are missing, unexpected or misshapen (names all of them), or a value does not fit `dtype`.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    config = config or config_from_gguf(file)
    found = {name: shape for name, shape in file.shapes.items() if name != _ROPE_FACTORS}
    if config.tie_word_embeddings:
        found.pop("output.weight", None)
    check_names(file_shapes(config, gguf_name), found, str(file.path))

    def read(name: str) -> np.ndarray:
        tensor = file.read(name)
        heads = {"attn_q": config.num_q_heads, "attn_k": config.num_kv_heads}.get(
            name.split(".")[-2]
        )
        return halves(tensor, heads) if file.architecture == "llama" and heads else tensor

    return build_model(config, gguf_name, read, dtype, implementation)


def halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns the rows of q or k, [num_heads * head_dim, ...], with pairs (2i, 2i+1) moved to (i, i + head_dim/2)."""
    shape = rows.shape
    return rows.reshape(num_heads, -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _int(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, default)
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{file.architecture}.{key}: expected a positive integer, got {value!r}")
    return int(value)


def _rope(file: GGUFFile) -> RopeConfig:
    """The position rule; `rope_freqs` holds what llama3 scaling comes to, frequency by frequency."""
    kind = file.get("rope.scaling.type") or "none"
    kind = "default" if kind == "none" else str(kind)
    factor = float(file.get("rope.scaling.factor") or 1.0) if kind != "default" else 1.0
    original = file.get("rope.scaling.original_context_length") or _int(file, "context_length")
    rope = RopeConfig(
        type=kind,
        theta=float(file.get("rope.freq_base") or 10000.0),
        factor=factor,
        original_max_position_embeddings=int(original) if kind == "yarn" else None,
        beta_fast=float(file.get("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(file.get("rope.scaling.yarn_beta_slow") or 1.0),
        freq_factors=tuple(file.read(_ROPE_FACTORS).tolist())
        if _ROPE_FACTORS in file.shapes
        else (),
    )
    times = file.get("rope.scaling.attn_factor") or file.get("rope.scaling.yarn_attn_factor")
    if kind != "yarn" or times is None:
        return rope
    # In GGUF this multiplies the derived factor; in a Hugging Face config it replaces it.
    return dataclasses.replace(rope, attention_factor=float(times) * attention_factor(rope))
