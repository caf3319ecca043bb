"""The same comparison against a live transformers, with other seeds; and our saved files read by it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from qwen_cases import ATOL, CASES, GOLDEN, LENGTH, seed_weights, write_folder
from qwen_driver import cached_logits

from jaxkv import CacheConfig
from jaxkv.beam import BeamSearcher
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


# The golden fixtures hold every case; live, one of each family runs by default.
LIVE = {"qwen2_yarn_group3", "qwen3_sliding_group1", "llama_linear_bias_head_dim"}
NAMES = [n if n in LIVE else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_cached_logits_equal_live_transformers(name: str, tmp_path: Path) -> None:
    from hf_oracle import full_forward

    hf = CASES[name]
    tensors = seed_weights(QwenConfig.from_hf(hf), seed=5)
    tokens = np.random.RandomState(11).randint(0, hf["vocab_size"], (1, LENGTH)).astype(np.int32)
    logits, _ = full_forward(hf, tensors, tokens)
    model = load(write_folder(tmp_path, hf, tensors)).model
    ours, _ = cached_logits(model, tokens, [LENGTH // 2] + [1] * (LENGTH - LENGTH // 2))
    np.testing.assert_allclose(ours, logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", NAMES)
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


def test_beams_equal_live_transformers(tmp_path: Path) -> None:
    """The golden searches again, over other weights and prompts: hypotheses and scores, all lengths and rules of stopping."""
    from hf_oracle import beams, make_model

    golden = json.loads((GOLDEN / "beams.json").read_text(encoding="utf-8"))
    hf = CASES[golden["case"]]
    tensors = seed_weights(QwenConfig.from_hf(hf), seed=7)
    theirs, ours = make_model(hf, tensors), load(write_folder(tmp_path, hf, tensors)).model
    num_beams, num_new, eos = golden["num_beams"], golden["max_new_tokens"], golden["eos"]
    cache = CacheConfig(
        num_layers=ours.config.num_layers,
        num_kv_heads=ours.config.num_kv_heads,
        head_dim=ours.config.head_dim,
        block_size=4,
        num_blocks=num_beams * 6,
        max_seqs=num_beams,
        max_blocks_per_seq=6,
    )
    searcher = BeamSearcher(ours, cache, eos_token_ids=eos, prefill_chunk=8)
    random = np.random.RandomState(13)
    for search in golden["searches"][::2]:
        prompt = random.randint(0, hf["vocab_size"], 9).tolist()
        rules = {key: search[key] for key in ("length_penalty", "early_stopping")}
        tokens, scores = beams(
            theirs, prompt, eos, num_beams=num_beams, max_new_tokens=num_new, **rules
        )
        result = searcher.search(
            [prompt], num_beams=num_beams, max_new_tokens=num_new, num_return=num_beams, **rules
        )
        (mine,) = result.hypotheses
        assert [h.score for h in mine] == pytest.approx(scores, abs=2e-4, rel=1e-5)
        assert [h.tokens for h in mine] == tokens
