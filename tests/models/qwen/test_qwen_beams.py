"""Beam search over a Qwen model: the hypotheses and scores of transformers (fixture)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from qwen_cases import GOLDEN

from jaxkv import CacheConfig
from jaxkv.beam import BeamSearcher
from models.qwen import LoadedModel

FIXTURE = json.loads((GOLDEN / "beams.json").read_text(encoding="utf-8"))


def test_beam_search_equals_transformers(case_model: Callable[[str], LoadedModel]) -> None:
    """All 4 hypotheses of both prompts, searched together, with every length penalty and rule of stopping."""
    model = case_model(FIXTURE["case"]).model
    beams = FIXTURE["num_beams"]
    config = CacheConfig(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        block_size=4,
        num_blocks=2 * beams * 5,
        max_seqs=2 * beams,
        max_blocks_per_seq=5,
    )
    searcher = BeamSearcher(model, config, eos_token_ids=FIXTURE["eos"], prefill_chunk=8)
    searches = FIXTURE["searches"]
    for pair in zip(searches[::2], searches[1::2], strict=True):
        result = searcher.search(
            [search["prompt"] for search in pair],
            num_beams=beams,
            max_new_tokens=FIXTURE["max_new_tokens"],
            length_penalty=pair[0]["length_penalty"],
            early_stopping=pair[0]["early_stopping"],
            num_return=beams,
        )
        for mine, search in zip(result.hypotheses, pair, strict=True):
            assert [h.tokens for h in mine] == search["tokens"]
            assert [h.score for h in mine] == pytest.approx(search["scores"], abs=2e-4, rel=1e-5)
