"""Reading a JSON body field by field, with messages that name the field.

Invariants: null means "not given"; a boolean is never taken for a number; a field that would change the result and is
not supported is refused by name, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from jaxkv.serve.errors import APIError, bad_field

# Fields that change no token: taken and not looked at.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
})  # fmt: skip

# Fields that are not supported, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_UNSUPPORTED = "unsupported_field"


def load_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Raises:
      APIError: 400, it is no JSON, or no object.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"body: expected JSON, got an error: {error}") from error
    if not isinstance(value, dict):
        raise APIError(400, f"body: expected a JSON object, got {shown(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def shown(value: Any) -> str:
    """Returns a JSON value for a message: short, in ASCII."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_text(name: str, text: str) -> str:
    """Returns the text.

    Raises:
      APIError: 400, it holds half of a surrogate pair, which no UTF-8 can spell.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_field(
            name, f"expected text, got half a surrogate pair in {shown(text)}"
        ) from None
    return text


class Fields:
    """The fields of one body.

    Args:
      values: the JSON object.
      known: names this endpoint reads.

    Raises:
      APIError: 400, naming the first field that is not supported.
    """

    def __init__(self, values: dict[str, Any], known: Iterable[str]):
        self._values = {name: value for name, value in values.items() if value is not None}
        for name, value in self._values.items():
            if name in known or name in HARMLESS or value in NEUTRAL.get(name, ()):
                continue
            if name not in NEUTRAL:
                label = shown(name)[1:-1]
                raise bad_field(label, "not supported by this server; leave it out", _UNSUPPORTED)
            plain = shown(NEUTRAL[name][0])
            text = f"expected {plain} (anything else is not supported), got {shown(value)}"
            raise bad_field(name, text, _UNSUPPORTED)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """Returns a field as it came, None where it is not given."""
        return self._values.get(name)

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises APIError 400 "name: expected ..., got ..." for a field that is given, or is missing."""
        got = shown(self._values[name]) if name in self else "nothing"
        raise bad_field(name, f"expected {expected}, got {got}")

    def integer(
        self, name: str, default: Any = None, *, low: int = 0, high: int = 2**31 - 1
    ) -> Any:
        """Returns an integer in [low, high], or the default."""
        value = self._values.get(name, default)
        if name not in self:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, default: float) -> float:
        """Returns a number, or the default; its range is checked where it is used."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, "a number")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        """Returns true or false, or the default."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def string(self, name: str) -> str | None:
        """Returns text, or None."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "a string")
        return None if value is None else check_text(name, value)

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """Returns the texts of a string or of a list of at most `most` strings."""
        value = self._values.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            self.refuse(name, "a string or a list of strings, none of them empty")
        if len(texts) > most:
            raise bad_field(name, f"expected at most {most} strings, got {len(texts)}")
        return tuple(check_text(name, text) for text in texts)

    def integers(self, name: str) -> tuple[int, ...]:
        """Returns a list of token ids."""
        value = self._values.get(name, [])
        if not is_ids(value):
            self.refuse(name, "a list of token ids")
        return tuple(value)


def is_ids(value: Any) -> bool:
    """Whether a JSON value is a list of integers that fit int32 and are not negative."""
    return isinstance(value, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value
    )
