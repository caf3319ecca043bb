"""transformers as the oracle; imports torch, so only the fixture maker and tests marked `torch` import this."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import transformers


def full_forward(
    hf: dict[str, Any], tensors: dict[str, np.ndarray], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (logits f32[row, q_pos, vocab], hidden f32[layer + 1, row, q_pos, hidden]) of one full forward.

    hidden[0] is the embedding, hidden[i] what layer i - 1 put out; the last one comes after the final norm.
    """
    classes = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config_class, model_class = classes[hf["model_type"]]
    given = {key: value for key, value in copy.deepcopy(hf).items() if key != "model_type"}
    model = model_class(config_class(**given, attn_implementation="eager")).to(torch.float32).eval()
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"oracle: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens.astype(np.int64)), output_hidden_states=True, use_cache=False
        )
    hidden = np.stack([state.numpy() for state in out.hidden_states])
    return out.logits.numpy(), hidden
