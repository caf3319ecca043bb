"""SmolLM2-135M through the paged cache: transformers' own beam search, hypothesis by hypothesis (fixture)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxkv import CacheConfig, beam_search
from models.qwen import LoadedModel

pytestmark = pytest.mark.realmodel

FOLDER = Path(__file__).parent
PROMPTS = [
    case["prompt_ids"]
    for case in json.loads((FOLDER / "smollm2_greedy.json").read_text(encoding="utf-8"))["cases"]
]
CASES = json.loads((FOLDER / "smollm2_beams.json").read_text(encoding="utf-8"))["cases"]
BEAMS, NUM_NEW, EOS, TIE = 4, 24, 2, 1e-3


def test_smollm2_beams_equal_transformers(smollm2: LoadedModel) -> None:
    """4 beams on 8 prompts at once: tokens equal; where they part, the scores lie within 1e-3."""
    config = CacheConfig(
        num_layers=smollm2.config.num_layers,
        num_kv_heads=smollm2.config.num_kv_heads,
        head_dim=smollm2.config.head_dim,
        block_size=16,
        num_blocks=8 * len(PROMPTS) * BEAMS,
        max_seqs=len(PROMPTS) * BEAMS,
        max_blocks_per_seq=8,
    )
    result = beam_search(
        smollm2.model.spread(), config, PROMPTS, num_beams=BEAMS, max_new_tokens=NUM_NEW,
        eos_token_ids=[EOS], num_return=BEAMS, prefill_chunk=32,
    )  # fmt: skip
    assert len(CASES) == len(PROMPTS) == 8
    same = 0
    for mine, case in zip(result.hypotheses, CASES, strict=True):
        assert [h.score for h in mine] == pytest.approx(case["scores"], abs=TIE)
        same += sum(h.tokens == tokens for h, tokens in zip(mine, case["tokens"], strict=True))
    assert same >= 30, f"only {same} of 32 hypotheses are the same"
    assert result.copied_blocks <= len(PROMPTS) * (BEAMS - 1) * result.num_steps
