"""What the server's tests share: one engine for the session, compiled when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_engine import ScriptedEngine
from serving import Running, running

import models.qwen
import models.tiny
from jaxkv import CacheConfig
from jaxkv.serve import Limits
from models.qwen import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer of the small model."""
    return Tokenizer.from_folder(models.tiny.path())


@pytest.fixture(scope="module")
def scripted(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server over a scripted engine."""
    limits = Limits(max_body_bytes=4096, max_n=4, max_prompts=3, max_prompt_len=40, max_queue=8)
    with running(ScriptedEngine(tokenizer), limits=limits) as server:
        yield server


@pytest.fixture(scope="session")
def loaded() -> models.qwen.LoadedModel:
    """The small model."""
    return models.qwen.load(models.tiny.path())


@pytest.fixture(scope="session")
def real(loaded: models.qwen.LoadedModel) -> Iterator[Running]:
    """A server over the real engine: 4 sequences of at most 256 tokens share 192 tokens of blocks, so they preempt."""
    from jaxkv.async_engine import AsyncEngine
    from jaxkv.engine import Engine

    config = CacheConfig(
        num_layers=loaded.config.num_layers,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        block_size=8,
        num_blocks=24,
        max_seqs=4,
        max_blocks_per_seq=32,
    )
    engine = Engine(
        loaded.model.spread(),
        config,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        max_steps=4,
        prefill_shapes=[(4, 16)],
    )
    engine.warm_up()
    with running(AsyncEngine(engine)) as server:
        yield server
