"""What the server says when it refuses or fails: an HTTP status and a body in OpenAI's form.

Invariants: every answer that is no success has the body ``{"error": {"message", "type", "param", "code"}}``; what went
wrong inside the server is logged, and only errors that name a caller's value are told to the caller.
"""

from __future__ import annotations

import logging
from typing import Any

from jaxkv.status import CapacityError

log = logging.getLogger("jaxkv.serve")

# Names of the engine's values that have another name in the HTTP interface.
_FIELD_OF = {
    "num_samples": "n", "stop_ids": "stop_token_ids", "salt": "cache_salt", "namespace.tenant": "tenant",
}  # fmt: skip
_FIELDS = frozenset({
    "prompt", "messages", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop",
    "stop_token_ids", "cache_salt", "tenant", "priority",
})  # fmt: skip


class APIError(Exception):
    """An answer that is no success.

    Attributes:
      status: of HTTP.
      message: for people; starts with the field's name where one is at fault.
      param: the field at fault, or None.
      code: for programs, or None.
      headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def kind(self) -> str:
        """OpenAI's word for the class of error."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        return kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    def body(self) -> dict[str, Any]:
        """Returns the JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_field(name: str, text: str, code: str | None = None) -> APIError:
    """Returns a refusal of one field; the text says what was expected and what came."""
    return APIError(400, f"{name}: {text}", param=name, code=code)


def unknown_model(name: str, served: str) -> APIError:
    """Returns the answer to a model this server does not have."""
    message = f"model: expected {served!r}, got {name!r}"
    return APIError(404, message, param="model", code="model_not_found")


def too_long(prompt_len: int, max_tokens: int, max_len: int, param: str) -> APIError:
    """Returns the refusal of a prompt that leaves no room for its answer."""
    message = f"{param}: expected prompt and max_tokens within {max_len} tokens, got {prompt_len} + {max_tokens}"
    return APIError(400, message, param=param, code="context_length_exceeded")


def shutting_down() -> APIError:
    """Returns the answer of a server that takes no more requests."""
    return APIError(
        503, "the server is shutting down", code="shutting_down", headers={"Connection": "close"}
    )


def from_submit(error: Exception) -> APIError:
    """Returns the answer to a request that the engine did not take."""
    if isinstance(error, CapacityError):
        return APIError(400, f"the request can never run here: {error}", code="capacity_exceeded")
    if isinstance(error, (ValueError, NotImplementedError)):
        return from_value(error)
    return from_engine(error)


def from_value(error: Exception) -> APIError:
    """Returns the answer to a value that was refused with "name: expected X, got Y", under the name callers know."""
    name, colon, rest = str(error).partition(":")
    field = _FIELD_OF.get(name, name)
    if not colon or field not in _FIELDS:
        return APIError(400, str(error))
    return APIError(400, f"{field}:{rest}", param=field)


def from_engine(error: BaseException | None) -> APIError:
    """Returns the answer to a failure inside the server; logs it, with its traceback."""
    log.error("the engine failed", exc_info=error)
    told = isinstance(error, (CapacityError, FloatingPointError))
    reason = str(error) if told else type(error).__name__
    return APIError(500, f"the engine could not finish the request: {reason}", code="engine_error")
