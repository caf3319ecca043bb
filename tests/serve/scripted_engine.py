"""An engine without a model: what a request brings is written in its prompt.

A prompt of token ids is generated back, two tokens an event, end to end and again, until max_tokens; the first id may
be a command instead.  Everything the server asks of an engine is there, blocks as well: one for each prompt token
of a request while it runs.
"""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import AsyncIterator
from typing import Any

from jaxkv.request import Event, FinishReason, Handle, Output, Request
from jaxkv.status import CapacityError

HOLD, CRASH, CRASH_LATER, FAIL, TOO_LARGE, REFUSE, SLOW, BULKY, LATE = range(1001, 1010)
COUNTERS = (
    "num_submitted", "num_finished", "num_preemptions", "prompt_tokens", "found_tokens", "resumed_tokens", "new_tokens",
    "dispatches",    "num_drafted", "num_accepted", "num_waiting", "num_running", "num_cached", "num_live",
)  # fmt: skip


class ScriptedEngine:
    """Stands for `AsyncEngine` and, as its own `engine`, for `Engine`."""

    def __init__(self, tokenizer: Any, *, max_len: int = 64, num_blocks: int = 32):
        self.engine = self
        self.tokenizer = tokenizer
        self.config = types.SimpleNamespace(
            max_seq_len=max_len, num_blocks=num_blocks, block_size=4, format="float32"
        )
        self.stats = types.SimpleNamespace(**dict.fromkeys(COUNTERS, 0), num_free=num_blocks)
        self.requests: list[Request] = []
        self.stopped: list[bool] = []

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self, drain: bool = True) -> None:
        """Notes how it was stopped."""
        self.stopped.append(drain)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Follows the script in the prompt."""
        self.requests.append(request)
        command = request.prompt[0]
        if command == REFUSE:
            raise ValueError("num_samples: expected fewer, got some")
        if command == TOO_LARGE:
            raise CapacityError("need 99 blocks, free 32", need=99, free=32)
        if command == CRASH:
            raise RuntimeError("secret of the engine")
        outputs = [Output(i) for i in range(request.num_samples)]
        handle = Handle(len(self.requests), request, tuple(request.prompt), outputs, num_found=1)
        self._move(len(request.prompt))
        try:
            async for event in self._events(handle, command):
                yield event
        finally:
            self._move(-len(request.prompt))

    def _move(self, count: int) -> None:
        self.stats.num_live += count
        self.stats.num_free -= count

    async def _events(self, handle: Handle, command: int) -> AsyncIterator[Event]:
        request = handle.request
        if command == LATE:
            await asyncio.sleep(0.2)
        for sample in range(request.num_samples):
            tokens = list(itertools.islice(itertools.cycle(request.prompt), request.max_tokens))
            for start in range(0, len(tokens), 2):
                new = tuple(tokens[start : start + 2])
                last = start + 2 >= len(tokens)
                text = self.tokenizer.decode([token for token in new if token < 1000])
                await asyncio.sleep(0.02 if command == SLOW else 0)
                yield Event(
                    handle,
                    sample,
                    new,
                    tuple(-0.5 for _ in new),
                    "x" * 200_000 if command == BULKY else text,
                    FinishReason.LENGTH if last else None,
                )
                if command == HOLD:
                    await asyncio.Event().wait()
                if command == CRASH_LATER:
                    raise RuntimeError("secret of the engine")
                if command == FAIL:
                    error = FloatingPointError("logits: expected numbers, got NaN")
                    yield Event(handle, sample, finish_reason=FinishReason.ERROR, error=error)
                    return
