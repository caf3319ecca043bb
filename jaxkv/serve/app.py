"""The ASGI app: its endpoints, who may use them, and how much at once.

Invariants: the app starts the engine with its lifespan and stops it with it; a caller without the key learns nothing but
that; whatever one request meets, the app serves the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxkv.serve import errors
from jaxkv.serve.answers import Answer, ChatCompletion, Completion, to_json
from jaxkv.serve.errors import APIError
from jaxkv.serve.fields import shown
from jaxkv.serve.metrics import Metrics
from jaxkv.serve.options import Limits, Served
from jaxkv.serve.parse import Job, parse_chat, parse_completion
from jaxkv.serve.run import AsyncEngine, Gone, Run, unless_gone
from jaxkv.serve.sender import Sender

CLIENT_LEFT = 499  # in the metrics only: nobody is there to read it
Parse = Callable[[bytes, Served, Limits], Job]


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
        status = 200
        try:
            try:
                await self._serve(Request(scope, receive), sender)
            except (Gone, ClientDisconnect):
                raise
            except Exception as error:
                told = error if isinstance(error, APIError) else errors.from_engine(error)
                status = told.status
                if status == 500:
                    self._service.failure = told
                await sender.fail(told)
        except (Gone, ClientDisconnect):
            status = CLIENT_LEFT
        self._service.metrics.count_answer(scope["path"], status)

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
        async with Run(service.engine, job.requests) as run:
            async for prompt_index, event in run:
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


class RequireKey:
    """Lets only callers with the key through to /v1; a key of None lets everybody through."""

    def __init__(self, app: ASGIApp, key: str | None):
        self._app = app
        self._expected = None if key is None else _digest(f"Bearer {key}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a call on, or answers 401."""
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1")
        if guarded and self._expected is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(_digest(given), self._expected):
                await _refusal(_NO_KEY)(scope, receive, send)
                return
        await self._app(scope, receive, send)


_NO_KEY = APIError(
    401,
    "expected a valid key in the header 'Authorization: Bearer KEY'",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _digest(secret: bytes) -> bytes:
    """Returns a digest, so that comparing takes as long for every length."""
    return hashlib.blake2b(secret).digest()


def _refusal(error: APIError) -> Response:
    return _json(error.body(), error.status, error.headers)


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def create_app(
    engine: AsyncEngine, served: Served, limits: Limits | None = None, api_key: str | None = None
) -> Starlette:
    """Returns the app; its `state.service` is the `Service`.

    Args:
      engine: not started.
      served: the model as callers see it.
      limits: None: the defaults of `Limits`.
      api_key: callers of /v1 must present it; None: everybody may call.
    """
    service = Service(engine, served, limits or Limits())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop(drain=False)

    get = functools.partial(Route, methods=["GET"])
    app = Starlette(
        routes=[
            Route(
                "/v1/completions",
                Generate(service, parse_completion, Completion),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                Generate(service, parse_chat, ChatCompletion),
                methods=["POST"],
            ),
            get("/v1/models", functools.partial(_models, service)),
            get("/v1/models/{name:path}", functools.partial(_model, service)),
            get("/health", functools.partial(_health, service)),
            get("/metrics", functools.partial(_metrics, service)),
        ],
        middleware=[Middleware(RequireKey, key=api_key)],
        exception_handlers={HTTPException: _http_error, Exception: _server_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _entry(served: Served) -> dict[str, object]:
    """Returns the model in OpenAI's form, with its sequence length beside."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "jaxkv",
        "max_model_len": served.max_len,
    }


async def _models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_entry(service.served)]})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name != service.served.name:
        return _refusal(errors.unknown_model(name, service.served.name))
    return _json(_entry(service.served))


async def _health(service: Service, request: Request) -> Response:
    if service.draining:
        return _refusal(errors.shutting_down())
    return _refusal(service.failure) if service.failure else _json({"status": "ok"})


async def _metrics(service: Service, request: Request) -> Response:
    text, media_type = service.metrics.text()
    return Response(text, headers={"Content-Type": media_type})


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers what the router refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    messages = {
        404: f"no such path: {path}",
        405: f"method {request.method} is not allowed for {path}",
    }
    message = messages.get(error.status_code, error.detail)
    return _refusal(APIError(error.status_code, message, headers=dict(error.headers or {})))


async def _server_error(request: Request, error: Exception) -> Response:
    """Answers what no endpoint expected."""
    return _refusal(errors.from_engine(error))
