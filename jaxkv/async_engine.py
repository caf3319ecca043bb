"""The engine for asyncio: it steps in a thread of its own, and every request is an async iterator of events.

Invariants:
  * Only the thread touches the engine; submits and aborts reach it through one queue, in order.
  * A consumer that goes away (its iterator is closed, its task cancelled) aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from jaxkv.engine import Engine
from jaxkv.request import Event, Handle, Request

_IDLE_S = 0.5  # how long the thread sleeps at most when there is nothing to do


class AsyncEngine:
    """Runs an engine in the background.

    Args:
      engine: nobody else may call it while this one runs; its `stats` may be read.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._readers: dict[int, Callable[[Event | Exception], None]] = {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: Exception | None = None

    @property
    def failure(self) -> Exception | None:
        """What the engine failed with, or None; after a failure every request is refused."""
        return self._failure

    async def start(self) -> None:
        """Starts the thread.

        Raises:
          RuntimeError: it runs already.
        """
        if self._thread is not None:
            raise RuntimeError(
                "AsyncEngine: expected one that does not run, it was started already"
            )
        self._stopping.clear()
        self._thread = threading.Thread(target=self._loop, name="jaxkv-engine", daemon=True)
        self._thread.start()

    async def stop(self, drain: bool = True) -> None:
        """Ends the thread; with `drain` once all requests have ended, else they are aborted."""
        if self._thread is None:
            return
        if not drain:
            self._calls.put(self._abort_all)
        self._stopping.set()
        self._calls.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Submits a request and yields its events until all its sequences have ended.

        Raises:
          ValueError, CapacityError: as `Engine.submit`.
          RuntimeError: the engine does not run, is stopping, or has failed; the cause says why.
        """
        if self._thread is None or self._stopping.is_set() or self._failure is not None:
            raise RuntimeError("AsyncEngine: expected one that runs") from self._failure
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event | Exception] = asyncio.Queue()

        def deliver(item: Event | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        submitted: list[
            Handle
        ] = []  # filled on the thread, also if this task is cancelled meanwhile
        left = request.num_samples
        try:
            await self._on_thread(lambda: submitted.append(self._submit(request, deliver)))
            while left:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise RuntimeError("the engine has failed") from item
                left -= item.finish_reason is not None
                yield item
        finally:
            if left:
                self._calls.put(lambda: self._abort(submitted))

    async def _on_thread(self, call: Callable[[], Any]) -> Any:
        """Runs a call on the engine's thread and returns or raises what it does."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: Exception | None) -> None:
            if not result.cancelled():
                result.set_exception(error) if error else result.set_result(value)

        def run() -> None:
            try:
                value, error = call(), None
            except Exception as caught:
                value, error = None, caught
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, value, error)

        self._calls.put(run)
        return await result

    # On the thread --------------------------------------------------------------------------------

    def _submit(self, request: Request, deliver: Callable[[Event | Exception], None]) -> Handle:
        if self._failure is not None:
            raise RuntimeError("the engine has failed") from self._failure
        handle = self.engine.submit(request)
        self._readers[handle.id] = deliver
        return handle

    def _abort(self, handles: list[Handle]) -> None:
        for handle in handles:
            self._readers.pop(handle.id, None)
            if self._failure is None:
                self.engine.abort(handle)

    def _abort_all(self) -> None:
        for handle in self.engine.handles if self._failure is None else ():
            self._deliver(self.engine.abort(handle))

    def _loop(self) -> None:
        """Runs calls and steps until it is stopped; after a failure it only answers calls."""
        while not (self._stopping.is_set() and self._calls.empty() and self._rests):
            try:
                self._take_calls()
                if not self._rests:
                    self._deliver(self.engine.step())
            except Exception as error:
                self._failure = error
                for deliver in self._readers.values():
                    deliver(error)
                self._readers.clear()

    @property
    def _rests(self) -> bool:
        """Whether there is nothing to step."""
        return self._failure is not None or self.engine.idle

    def _take_calls(self) -> None:
        """Runs the calls that wait; sleeps for the first one if the engine has nothing to do."""
        with contextlib.suppress(queue.Empty):
            if self._rests:
                self._calls.get(timeout=_IDLE_S)()
            while True:
                self._calls.get_nowait()()

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            deliver = self._readers.get(event.handle.id)
            if deliver is not None:
                deliver(event)
        for event in events:
            if event.handle.done:
                self._readers.pop(event.handle.id, None)
