"""The same comparison against a live transformers, with other seeds; and our saved files read by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from qwen_cases import ATOL, CASES, LENGTH, seed_weights, write_folder
from qwen_driver import cached_logits

from models.qwen import QwenConfig, load
from models.qwen.hf_weights import save

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("default"),
]

pytest.importorskip(
    "torch", reason="torch is not installed; the golden fixtures are checked instead"
)
pytest.importorskip("transformers", reason="transformers is not installed; see above")


@pytest.mark.parametrize("name", CASES)
def test_cached_logits_equal_live_transformers(name: str, tmp_path: Path) -> None:
    from hf_oracle import full_forward

    hf = CASES[name]
    tensors = seed_weights(QwenConfig.from_hf(hf), seed=5)
    tokens = np.random.RandomState(11).randint(0, hf["vocab_size"], (1, LENGTH)).astype(np.int32)
    logits, _ = full_forward(hf, tensors, tokens)
    model = load(write_folder(tmp_path, hf, tensors)).model
    ours, _ = cached_logits(model, tokens, [LENGTH // 2] + [1] * (LENGTH - LENGTH // 2))
    np.testing.assert_allclose(ours, logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_saved_folder_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    """`save` writes names, shapes and a config.json that transformers understands."""
    import torch
    import transformers

    hf = CASES[name]
    tensors = seed_weights(QwenConfig.from_hf(hf), seed=6)
    loaded = load(write_folder(tmp_path / "in", hf, tensors))
    save(tmp_path / "out", loaded.model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.RandomState(12).randint(0, hf["vocab_size"], (1, LENGTH)).astype(np.int32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    ours, _ = cached_logits(load(tmp_path / "out").model, tokens, [LENGTH])
    np.testing.assert_allclose(ours, logits, atol=ATOL, rtol=0)
