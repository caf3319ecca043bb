"""The engine behind asyncio: many consumers, some of whom leave."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine.conftest import alone, assert_all_blocks_are_back, engine_of, random_request

from jaxkv.async_engine import AsyncEngine
from jaxkv.request import FinishReason, Request


async def _tokens(engine: AsyncEngine, request: Request) -> list[int]:
    return [token async for event in engine.generate(request) for token in event.tokens]


def test_many_consumers_get_their_own_tokens_and_some_leave() -> None:
    async def main() -> None:
        engine = AsyncEngine(engine_of(0))
        await engine.start()
        rng = np.random.default_rng(7)
        requests = [random_request(rng) for _ in range(10)]
        leaving = asyncio.create_task(_tokens(engine, Request([1, 2, 3], max_tokens=40)))
        stream = engine.generate(Request([4, 5, 6], max_tokens=40, ignore_eos=True))
        await anext(stream)
        running = asyncio.gather(*(_tokens(engine, request) for request in requests))
        await asyncio.sleep(0)
        leaving.cancel()
        await stream.aclose()
        for request, tokens in zip(requests, await running, strict=True):
            prompt = tuple(request.prompt)
            assert tokens == alone(prompt, request.max_tokens, request.sampling, 0)
        with pytest.raises(ValueError, match="got 99"):
            await _tokens(engine, Request([99]))
        await engine.stop()
        with pytest.raises(RuntimeError, match="expected one that runs"):
            await _tokens(engine, Request([1]))

    asyncio.run(main())
    assert_all_blocks_are_back(engine_of(0))


def test_stopping_at_once_aborts_what_runs() -> None:
    async def main() -> list[FinishReason | None]:
        engine = AsyncEngine(engine_of(0))
        await engine.start()
        request = Request([7, 8, 9], max_tokens=40, ignore_eos=True, num_samples=2)
        stream = engine.generate(request)
        reasons = [(await anext(stream)).finish_reason]
        await engine.stop(drain=False)
        return reasons + [event.finish_reason async for event in stream]

    reasons = asyncio.run(main())
    assert [reason for reason in reasons if reason is not None] == [FinishReason.ABORT] * 2
    assert_all_blocks_are_back(engine_of(0))


def test_a_failing_engine_tells_its_consumers() -> None:
    async def main() -> None:
        broken = engine_of(0)
        engine = AsyncEngine(broken)
        await engine.start()
        stream = engine.generate(Request([1, 2], max_tokens=40, ignore_eos=True))
        await anext(stream)
        broken.step = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        try:
            with pytest.raises(RuntimeError, match="the engine has failed"):
                async for _ in stream:
                    pass
            with pytest.raises(RuntimeError, match="expected one that runs"):
                await _tokens(engine, Request([1]))
        finally:
            del broken.step
        await engine.stop(drain=False)
        broken.run_until_idle()

    asyncio.run(main())
    assert_all_blocks_are_back(engine_of(0))
