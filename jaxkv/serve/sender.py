"""Sending an answer over ASGI: one JSON object, or server-sent events.

Invariants: nothing is sent before there is something to say or a client has waited long, so that a refusal still has its
own status; a client that does not read is given up after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Send

from jaxkv.serve.answers import to_json
from jaxkv.serve.errors import APIError
from jaxkv.serve.run import Gone

_JSON = {"Content-Type": "application/json"}
_EVENTS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy is not to collect the stream
}


class Sender:
    """The way back to one client.

    Args:
      send: of ASGI.
      timeout_s: for the client to make room for what is sent.
    """

    def __init__(self, send: Send, timeout_s: float):
        self._send = send
        self._timeout_s = timeout_s
        self._started = False

    async def json(
        self, value: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Sends one JSON object as the whole answer.

        Raises:
          Gone: the client does not read.
        """
        body = to_json(value)
        length = {"Content-Length": str(len(body))}
        await self._start(status, _JSON | length | (headers or {}))
        await self._put(body, more=False)

    async def open(self, first: Sequence[Any]) -> None:
        """Opens a stream with its first events, unless it is open.

        Raises:
          Gone: the client does not read.
        """
        if self._started:
            return
        await self._start(200, _EVENTS)
        for value in first:
            await self.event(value)

    async def event(self, value: Any) -> None:
        """Sends one event of an open stream.

        Raises:
          Gone: the client does not read.
        """
        await self._put(b"data: " + to_json(value) + b"\n\n", more=True)

    async def keep_alive(self) -> None:
        """Sends a comment within an open stream, which clients skip.

        Raises:
          Gone: the client does not read.
        """
        await self._put(b": keep-alive\n\n", more=True)

    async def done(self) -> None:
        """Ends a stream that went well."""
        await self._put(b"data: [DONE]\n\n", more=False)

    async def fail(self, error: APIError) -> None:
        """Tells an error: as the answer, or within a stream that has begun, which ends without [DONE]."""
        if not self._started:
            await self.json(error.body(), error.status, error.headers)
            return
        await self.event(error.body())
        await self._put(b"", more=False)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started = True
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._timed({"type": "http.response.start", "status": status, "headers": pairs})

    async def _put(self, body: bytes, *, more: bool) -> None:
        await self._timed({"type": "http.response.body", "body": body, "more_body": more})

    async def _timed(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            raise Gone from None
