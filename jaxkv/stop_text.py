"""Text of one sequence as its tokens arrive, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """An incremental decoder; `models.qwen.tokenizer.TextStream` is one."""

    def push(self, ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class StopText:
    """Gives out text that can no longer turn out to be the begin of a stop string.

    Args:
      stream: decodes the sequence.
      stops: stop strings, none empty.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Takes a token; returns new text, and whether a stop string has come (the text ends before it)."""
        return self._cut(self._stream.push([token]))

    def flush(self) -> tuple[str, bool]:
        """Returns the rest of the text of a sequence that has ended, and whether a stop string was in it."""
        text, stopped = self._cut(self._stream.flush())
        if not stopped:
            text, self._held = text + self._held, ""
        return text, stopped

    def _cut(self, new: str) -> tuple[str, bool]:
        text = self._held + new
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
