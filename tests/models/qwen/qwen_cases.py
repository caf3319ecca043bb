"""Small configs that cover the family, and weights made from a seed: shared by fixtures, tests and the oracle.

Invariant: weights come from `numpy.random.RandomState`, whose stream numpy keeps for good, in the order of the
tensors' sorted names; so a fixture needs to hold only tokens and results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from models.qwen.config import QwenConfig
from models.qwen.hf_weights import hf_name
from models.qwen.weights import file_shapes

GOLDEN = Path(__file__).parent / "golden"
NUM_ROWS, LENGTH = 2, 24
ATOL = 2e-4  # float32 against transformers' full forward, every logit


def _case(model_type: str, **given: Any) -> dict[str, Any]:
    base = {
        "model_type": model_type,
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    return base | given


def _yarn(**given: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
    } | given


CASES: dict[str, dict[str, Any]] = {
    "qwen2_group7_tied": _case(
        "qwen2",
        hidden_size=56,
        num_attention_heads=7,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "qwen2_yarn_group3": _case("qwen2", rope_parameters=_yarn()),
    "qwen2_layer_types": _case(
        "qwen2",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_head_dim_tied": _case("qwen3", hidden_size=32, head_dim=16, tie_word_embeddings=True),
    "qwen3_sliding_group1": _case(
        "qwen3",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    ),
    "qwen3_yarn_bias_group7": _case(
        "qwen3",
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=8,
        attention_bias=True,
        rope_parameters=_yarn(attention_factor=1.25, beta_fast=16.0),
    ),
    "llama_linear_bias_head_dim": _case(
        "llama",
        head_dim=12,
        attention_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama_llama3_group1_tied": _case(
        "llama",
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


def seed_weights(config: QwenConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns f32 tensors by Hugging Face name, large enough that every part of the model shows in the logits."""
    random = np.random.RandomState(seed)
    out = {}
    for name, shape in sorted(file_shapes(config, hf_name).items()):
        values = random.standard_normal(shape).astype(np.float32)
        if name.endswith("norm.weight"):
            out[name] = 1.0 + 0.3 * values
        elif name.endswith(".bias"):
            out[name] = 0.5 * values
        else:
            out[name] = values * np.float32(1.2 / np.sqrt(shape[-1]))
    return {name: tensor.astype(np.float32) for name, tensor in out.items()}


def case_tokens(name: str) -> np.ndarray:
    """Returns i32[row, q_pos] random tokens of a case."""
    seed = sorted(CASES).index(name)
    vocab = CASES[name]["vocab_size"]
    return np.random.RandomState(1000 + seed).randint(0, vocab, (NUM_ROWS, LENGTH)).astype(np.int32)


def write_folder(folder: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """Writes config.json and model.safetensors, returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    safetensors.numpy.save_file(
        tensors, str(folder / "model.safetensors"), metadata={"format": "pt"}
    )
    return folder
