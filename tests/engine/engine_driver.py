"""Engines whose programs are compiled once, and what their requests must bring: the same request, generated alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from fake_model import fake_model

from jaxkv import CacheConfig, check_invariants
from jaxkv.engine import Engine
from jaxkv.engine_stats import EngineStats
from jaxkv.generate import Generator
from jaxkv.request import Event, FinishReason, Handle, Output, Request
from jaxkv.sampling import SamplingParams

CONFIG = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    num_blocks=24,
    max_seqs=4,
    max_blocks_per_seq=12,
)
MODEL = fake_model(max_len=64)
EOS = 5


class Letters:
    """A tokenizer of single letters: id 0 is "a"; what is beyond "z" is "?"."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def stream(self) -> Letters:
        return self

    def push(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i) if i < 26 else "?" for i in ids)

    def flush(self) -> str:
        return ""


class CountingEngine:
    """An engine without a model: every step gives each of two requests the token that is its id."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.stats = EngineStats()

    @property
    def idle(self) -> bool:
        return not self.handles

    def submit(self, request: Request) -> Handle:
        if 99 in request.prompt:
            raise ValueError("prompt: got 99")
        outputs = [Output(i) for i in range(request.num_samples)]
        handle = Handle(self.stats.num_submitted, request, tuple(request.prompt), outputs)
        self.stats.num_submitted += 1
        self.handles.append(handle)
        return handle

    def abort(self, handle: Handle) -> list[Event]:
        if handle not in self.handles:
            return []
        self.handles.remove(handle)
        return [self._end(handle, output, FinishReason.ABORT) for output in handle.outputs]

    def step(self) -> list[Event]:
        events = []
        for handle in self.handles[:2]:
            for output in handle.outputs:
                output.tokens.append(handle.id)
                if len(output.tokens) == handle.request.max_tokens:
                    output.finish_reason = FinishReason.LENGTH
                reason = output.finish_reason
                events.append(Event(handle, output.sample_index, (handle.id,), (0.0,), "", reason))
        self.handles = [handle for handle in self.handles if not handle.done]
        return events

    def _end(self, handle: Handle, output: Output, reason: FinishReason) -> Event:
        output.finish_reason = reason
        return Event(handle, output.sample_index, finish_reason=reason)


@functools.cache
def engine_of(draft_len: int) -> Engine:
    """Returns the engine with or without speculation; their chunks and bursts differ too."""
    sizes: dict[str, Any] = {"prefill_shapes": [(3, 4)], "max_steps": 5}
    if draft_len:
        sizes = {"prefill_shapes": [(1, 16)], "max_steps": 3, "draft_len": draft_len}
    return Engine(
        MODEL,
        CONFIG,
        tokenizer=Letters(),
        eos_token_ids=[EOS],
        **sizes,
    )


def assert_all_blocks_are_back(engine: Engine) -> None:
    """Nothing runs, every block is free or cached, and the cache is sound."""
    check_invariants(CONFIG, engine._programs.state.cache)
    assert engine.idle
    assert engine.stats.num_live == 0


_generator = functools.cache(
    lambda: Generator(MODEL, CONFIG, eos_token_ids=[EOS], prefill_chunk=8, steps_per_dispatch=16)
)


@functools.cache
def alone(
    prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams, sample: int
) -> list[int]:
    """Returns the tokens of one sample, by the generator that other tests compare with a dense model."""
    run = _generator().generate(  # 16, whatever is asked for: the number is a shape, another one is a compile
        [prompt], max_new_tokens=16, sampling=sampling, num_samples=sample + 1
    )
    return run[sample].tokens[:max_tokens]


def random_request(rng: np.random.Generator, **changes: Any) -> Request:
    """Returns a request of a few tokens: greedy or sampled, of one of few families of prompts."""
    family = np.random.default_rng(int(rng.integers(4))).integers(0, 31, 16)
    own = rng.integers(0, 31, rng.integers(1, 9))
    sampling = SamplingParams()
    if rng.random() < 0.5:
        sampling = SamplingParams(
            temperature=1.2, top_k=int(rng.integers(0, 9)), seed=int(rng.integers(100))
        )
    fields = {
        "prompt": tuple(int(t) for t in [*family[: rng.integers(17)], *own]),
        "max_tokens": int(rng.integers(1, 16)),
        "sampling": sampling,
    }
    return Request(**fields | changes)
