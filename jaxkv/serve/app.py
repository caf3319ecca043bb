"""The ASGI app: its paths, and who may use them.

Invariants: the app starts the engine with its lifespan and stops it with it; a caller without the key learns nothing but
that; whatever one request meets, the app serves the next.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxkv.serve import errors
from jaxkv.serve.answers import ChatCompletion, Completion, to_json
from jaxkv.serve.endpoint import Generate
from jaxkv.serve.errors import APIError
from jaxkv.serve.fields import shown
from jaxkv.serve.options import Limits, Served
from jaxkv.serve.parse import parse_chat, parse_completion
from jaxkv.serve.run import AsyncEngine
from jaxkv.serve.service import Service


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
