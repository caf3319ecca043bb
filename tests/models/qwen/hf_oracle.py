"""transformers as the oracle; imports torch, so only the fixture maker and tests marked `torch` import this."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import transformers


def make_model(hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> transformers.PreTrainedModel:
    """Returns transformers' model with the given weights, in float32."""
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
    return model


def full_forward(
    hf: dict[str, Any], tensors: dict[str, np.ndarray], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (logits f32[row, q_pos, vocab], hidden f32[layer + 1, row, q_pos, hidden]) of one full forward.

    hidden[0] is the embedding, hidden[i] what layer i - 1 put out; the last one comes after the final norm.
    """
    model = make_model(hf, tensors)
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens.astype(np.int64)), output_hidden_states=True, use_cache=False
        )
    hidden = np.stack([state.numpy() for state in out.hidden_states])
    return out.logits.numpy(), hidden


def beams(
    model: transformers.PreTrainedModel, prompt: list[int], eos: list[int], **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Returns tokens and scores of all beams of one prompt, best first; options as of `generate`."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=options["num_beams"],
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0],
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    tokens = []
    for row in out.sequences[:, len(prompt) :].tolist():
        end = next((i for i, token in enumerate(row) if token in eos), len(row))
        tokens.append(row[: end + 1])
    return tokens, [float(score) for score in out.sequences_scores]
