"""The endpoints that generate: from a body to an answer, whatever happens on the way.

Invariants: a refusal has its status, an answer that has begun ends with what went wrong; the client that leaves takes its
requests with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from jaxkv.serve import errors
from jaxkv.serve.answers import Answer
from jaxkv.serve.errors import APIError
from jaxkv.serve.options import Limits, Served
from jaxkv.serve.parse import Job
from jaxkv.serve.run import Gone, Run, unless_gone
from jaxkv.serve.sender import Sender
from jaxkv.serve.service import Service

CLIENT_LEFT = 499  # in the metrics only: nobody is there to read it
Parse = Callable[[bytes, Served, Limits], Job]


class Generate:
    """An endpoint that generates, as an ASGI app.

    Args:
      service: shared.
      parse: reads the body.
      answer: writes the answer.
    """

    def __init__(self, service: Service, parse: Parse, answer: type[Answer]):
        self._service = service
        self._parse = parse
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; whatever happens is an answer, and is counted."""
        sender = Sender(send, self._service.limits.write_timeout_s)
        try:
            status = await self._answered(Request(scope, receive), sender)
        except (Gone, ClientDisconnect):
            status = CLIENT_LEFT
        self._service.metrics.count_answer(scope["path"], status)

    async def _answered(self, request: Request, sender: Sender) -> int:
        """Answers one request, or says why not; returns the status."""
        try:
            await self._serve(request, sender)
        except (Gone, ClientDisconnect):
            raise
        except Exception as error:
            told = error if isinstance(error, APIError) else errors.from_engine(error)
            if told.status == 500:
                self._service.failure = told
            await sender.fail(told)
            return told.status
        return 200

    async def _serve(self, request: Request, sender: Sender) -> None:
        service = self._service
        service.check_open()
        body = await read_body(request, service.limits)
        job = await run_in_threadpool(self._parse, body, service.served, service.limits)
        with service.room_for(job.num_choices):
            await unless_gone(self._run(job, sender), request.receive, service.closed)

    async def _run(self, job: Job, sender: Sender) -> None:
        """Generates, and sends what comes."""
        service = self._service
        clock = service.metrics.clock()
        answer = self._answer(service.served, job)
        patience_s = service.limits.keep_alive_s if job.stream else None
        async with Run(service.engine, job.requests, patience_s) as run:
            async for news in run:
                if news is None:
                    await sender.open(answer.first_chunks())
                    await sender.keep_alive()
                    continue
                prompt_index, event = news
                clock.take(prompt_index, event)
                piece = answer.take(prompt_index, event)
                if job.stream:
                    await sender.open(answer.first_chunks())
                    if not piece.empty:
                        await sender.event(answer.chunk(piece))
        clock.stop()
        service.failure = None
        if not job.stream:
            await sender.json(answer.whole())
            return
        if job.include_usage:
            await sender.event(answer.usage_chunk())
        await sender.done()


async def read_body(request: Request, limits: Limits) -> bytes:
    """Returns a request's body.

    Raises:
      APIError: 413 it is too large; 408 it does not come.
      ClientDisconnect: the client left.
    """
    too_large = APIError(
        413,
        f"body: expected at most {limits.max_body_bytes} bytes, got more",
        code="body_too_large",
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise APIError(408, "body: expected it sooner", headers={"Connection": "close"}) from None
    return bytes(body)
