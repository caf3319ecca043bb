"""The engine behind asyncio: many consumers, some of whom leave.  The engine is one that counts, so tokens name their request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_driver import CountingEngine

from jaxkv.async_engine import AsyncEngine
from jaxkv.request import FinishReason, Request

FOREVER = 10**6


def running() -> tuple[CountingEngine, AsyncEngine]:
    """Returns an engine and its asyncio front, not started."""
    engine: Any = CountingEngine()
    return engine, AsyncEngine(engine)


async def _tokens(engine: AsyncEngine, request: Request) -> list[int]:
    return [token async for event in engine.generate(request) for token in event.tokens]


def test_many_consumers_get_their_own_tokens_and_some_leave() -> None:
    async def main() -> None:
        counting, engine = running()
        await engine.start()
        with pytest.raises(RuntimeError, match="started already"):
            await engine.start()
        stream = engine.generate(Request([1], max_tokens=FOREVER))
        await anext(stream)
        leaving = asyncio.create_task(_tokens(engine, Request([1], max_tokens=FOREVER)))
        asking = [_tokens(engine, Request([2], max_tokens=n, num_samples=2)) for n in range(1, 9)]
        others = asyncio.gather(*asking)
        await asyncio.sleep(0.01)
        leaving.cancel()
        await stream.aclose()
        answers = await others
        assert [len(answer) for answer in answers] == [2 * n for n in range(1, 9)]
        owners = [set(answer) for answer in answers]
        assert all(len(owner) == 1 for owner in owners)
        assert len(set.union(*owners)) == len(owners)
        with pytest.raises(ValueError, match="got 99"):
            await _tokens(engine, Request([99]))
        await engine.stop()
        assert counting.idle
        with pytest.raises(RuntimeError, match="expected one that runs"):
            await _tokens(engine, Request([1]))

    asyncio.run(asyncio.wait_for(main(), 30))


def test_stopping_waits_for_what_runs_or_aborts_it() -> None:
    async def main(drain: bool, max_tokens: int) -> list[FinishReason | None]:
        _, engine = running()
        await engine.start()
        stream = engine.generate(Request([7], max_tokens=max_tokens, num_samples=2))
        reasons = [(await anext(stream)).finish_reason]
        await engine.stop(drain)
        return reasons + [event.finish_reason async for event in stream]

    reasons = asyncio.run(asyncio.wait_for(main(False, FOREVER), 30))
    assert [reason for reason in reasons if reason] == [FinishReason.ABORT] * 2
    reasons = asyncio.run(asyncio.wait_for(main(True, 50), 30))
    assert [reason for reason in reasons if reason] == [FinishReason.LENGTH] * 2


def test_a_failing_engine_tells_everybody() -> None:
    async def main() -> None:
        counting, engine = running()
        await engine.start()
        stream = engine.generate(Request([1], max_tokens=FOREVER))
        await anext(stream)
        assert engine.failure is None
        counting.step = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        with pytest.raises(RuntimeError, match="the engine has failed"):
            async for _ in stream:
                pass
        assert isinstance(engine.failure, ZeroDivisionError)
        with pytest.raises(RuntimeError, match="expected one that runs"):
            await _tokens(engine, Request([1]))
        with pytest.raises(RuntimeError, match="has failed"):  # one that was on its way already
            await engine._on_thread(lambda: engine._submit(Request([1]), print))
        await engine.stop(drain=False)

    asyncio.run(asyncio.wait_for(main(), 30))
