"""Following a job's requests through the engine, and giving up when nobody waits for the answer any more.

Invariants: a run that is left, however it is left, has no request in the engine; a request that ends without an answer
raises an `APIError`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol

from starlette.types import Receive

from jaxkv.request import Event, FinishReason, Request
from jaxkv.serve import errors


class AsyncEngine(Protocol):
    """What is asked of an engine; `jaxkv.async_engine.AsyncEngine` is one."""

    engine: Any

    async def start(self) -> None: ...
    async def stop(self, drain: bool = True) -> None: ...
    def generate(self, request: Request) -> AsyncIterator[Event]: ...


class Gone(Exception):
    """The client has left."""


class Run:
    """The events of several requests, in the order in which they come.

    Use it as a context; iterating gives (index of the request, event) until all have ended, and None whenever nothing has
    come for `patience_s`.

    Args:
      engine: generates.
      requests: to follow.
      patience_s: None: without end.

    Raises:
      APIError: while iterating: the engine did not take a request, or could not finish it.
    """

    def __init__(
        self, engine: AsyncEngine, requests: Sequence[Request], patience_s: float | None = None
    ):
        self._patience_s = patience_s
        self._engine = engine
        self._requests = requests
        self._queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(requests)

    async def __aenter__(self) -> Run:
        for index, request in enumerate(self._requests):
            self._tasks.append(asyncio.create_task(self._follow(index, request)))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await _cancel(self._tasks)

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> tuple[int, Event] | None:
        while self._running:
            try:
                async with asyncio.timeout(
                    self._patience_s
                ):  # what comes at that moment stays queued
                    index, item = await self._queue.get()
            except TimeoutError:
                return None
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return index, item
            self._running -= 1
        raise StopAsyncIteration

    async def _follow(self, index: int, request: Request) -> None:
        """Puts one request's events into the queue, then None, or the error that ended it."""
        taken = False
        last: Event | Exception | None = None
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as events:  # type: ignore[type-var]
                async for event in events:
                    taken = True
                    if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        last = _ended(event)
                        break
                    self._queue.put_nowait((index, event))
        except Exception as error:
            last = errors.from_engine(error) if taken else errors.from_submit(error)
        self._queue.put_nowait((index, last))


def _ended(event: Event) -> errors.APIError:
    """Returns what to say of a sequence that ended without its answer."""
    if event.finish_reason is FinishReason.ERROR:
        return errors.from_engine(event.error)
    return errors.shutting_down()  # nobody but a stopping engine aborts a run that is followed


async def unless_gone(
    work: Coroutine[Any, Any, None], receive: Receive, closed: asyncio.Event
) -> None:
    """Runs `work` to its end, or cancels it when the client leaves or the server closes.

    Raises:
      Gone: the client has left.
      APIError: 503, the server closes; or what `work` raises.
    """
    task = asyncio.create_task(work)
    left = asyncio.create_task(_client_leaves(receive))
    closes = asyncio.create_task(closed.wait())
    try:
        await asyncio.wait((task, left, closes), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        elif left.done():
            raise Gone
        else:
            raise errors.shutting_down()
    finally:
        await _cancel([task, left, closes])


async def _client_leaves(receive: Receive) -> None:
    """Returns when the connection is gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
