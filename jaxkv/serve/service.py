"""What the endpoints of one app share: the engine, the places in the queue, and how the server is.

Invariants: a place that was taken is given back, however its request ends; once `closed`, nothing new begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from jaxkv.serve import errors
from jaxkv.serve.errors import APIError
from jaxkv.serve.metrics import Metrics
from jaxkv.serve.options import Limits, Served
from jaxkv.serve.run import AsyncEngine


class Service:
    """What the endpoints of one app share.

    Args:
      engine: generates.
      served: the model as callers see it.
      limits: for callers.

    Attributes:
      draining: takes no new requests.
      failure: what the engine last failed with, until a request goes well again.
      closed: set: what still runs is to end now.
    """

    def __init__(self, engine: AsyncEngine, served: Served, limits: Limits):
        self.engine = engine
        self.served = served
        self.limits = limits
        self.metrics = Metrics(engine.engine)
        self.draining = False
        self.failure: APIError | None = None
        self.closed = asyncio.Event()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Refuses a request before its body is read, where it could not be taken anyway.

        Raises:
          APIError: 503 the server is shutting down; 429 the queue is full.
        """
        if self.draining:
            raise errors.shutting_down()
        if self._in_flight >= self.limits.max_queue:
            raise self._full()

    def _full(self) -> APIError:
        return APIError(
            429,
            f"the queue is full: {self._in_flight} of {self.limits.max_queue} sequences run or wait; try later",
            code="queue_full",
            headers={"Retry-After": "1"},
        )

    @contextlib.contextmanager
    def room_for(self, num_choices: int) -> Iterator[None]:
        """Holds places in the queue while the body runs.

        Raises:
          APIError: see `check_open`.
        """
        self.check_open()
        if self._in_flight + num_choices > self.limits.max_queue:
            raise self._full()
        self._count(num_choices)
        try:
            yield
        finally:
            self._count(-num_choices)

    def _count(self, change: int) -> None:
        self._in_flight += change
        self.metrics.in_flight.set(self._in_flight)
        if self._in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Takes no more requests, waits for those that run, and ends those that are left after `grace_s`."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self.closed.set()
