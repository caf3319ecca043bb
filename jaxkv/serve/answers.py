"""The JSON of answers: whole, or in the chunks of a stream, for both endpoints.

Invariants: an answer takes every event of the engine once; a chunk and a whole answer are made by the same code from
the same pieces, so that the chunks joined are the whole; every generated token is counted once, end tokens included.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from typing import Any, ClassVar

from jaxkv.request import Event, Handle
from jaxkv.serve.options import Served
from jaxkv.serve.parse import Job

_REPLACEMENT = "\ufffd"
_UNLIKELY = -9999.0  # OpenAI's stand-in for a logarithm that JSON cannot write


def to_json(value: Any) -> bytes:
    """Returns compact JSON in UTF-8; halves of surrogate pairs are written as escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


@dataclasses.dataclass
class Piece:
    """What is new of one choice, or all of it.

    Attributes:
      index: of the choice.
      text: without end tokens and stop strings.
      names: the tokens as text, one by one.
      logprobs: of the tokens, natural logarithm.
      offsets: where each token's text begins in the choice's text.
      finish_reason: None while the choice runs.
    """

    index: int
    text: str = ""
    names: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def extend(self, piece: Piece) -> None:
        """Takes what is new."""
        self.text += piece.text
        self.names += piece.names
        self.logprobs += piece.logprobs
        self.offsets += piece.offsets
        self.finish_reason = piece.finish_reason

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.text or self.names or self.finish_reason)


class _Names:
    """Names the tokens of one choice, in order, and says where their text begins."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._length = 0

    def take(self, token: int) -> tuple[str, int]:
        """Returns the name of the next token and its offset in the text; without a tokenizer its number."""
        offset = self._length
        if self._stream is None:
            return f"token_id:{token}", offset
        self._length += len(self._stream.push([token]))
        return self._tokenizer.decode([token], skip_special_tokens=False), offset


class Answer:
    """The answer to one job.

    Args:
      served: the model.
      job: what was asked.

    Attributes:
      id: of the answer.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, served: Served, job: Job):
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._served = served
        self._job = job
        self._created = int(time.time())
        self._wholes = [Piece(i) for i in range(job.num_choices)]
        self._names = [_Names(served.tokenizer) for _ in self._wholes]
        self._handles: dict[int, Handle] = {}
        self._num_new = 0

    def take(self, prompt_index: int, event: Event) -> Piece:
        """Takes an event of one prompt's request; returns what it brought."""
        self._handles[prompt_index] = event.handle
        self._num_new += len(event.tokens)
        index = prompt_index * self._job.num_samples + event.sample_index
        reason = event.finish_reason
        piece = Piece(index, event.text, finish_reason=None if reason is None else reason.value)
        if self._job.logprobs:
            for token, logprob in zip(event.tokens, event.logprobs, strict=True):
                name, offset = self._names[index].take(token)
                piece.names.append(name)
                piece.offsets.append(offset)
                piece.logprobs.append(logprob if math.isfinite(logprob) else _UNLIKELY)
        if not self._job.stream:
            self._wholes[index].extend(piece)
        return piece

    def whole(self) -> dict[str, Any]:
        """Returns the answer that is no stream."""
        choices = [self._choice(piece, whole=True) for piece in self._wholes]
        return self._object(self.kind, choices) | {"usage": self.usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns what opens a stream."""
        return []

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Returns one chunk of a stream."""
        return self._chunk([self._choice(piece, whole=False)])

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the chunk that ends a stream whose usage was asked for."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Returns the token counts so far; a prompt counts once, whatever the number of its samples."""
        handles = self._handles.values()
        num_prompt = sum(len(handle.prompt) for handle in handles)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_new,
            "total_tokens": num_prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": sum(h.num_found for h in handles)},
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._job.include_usage else {}
        return self._object(self.chunk_kind, choices) | usage

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }

    def _choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        raise NotImplementedError


class Completion(Answer):
    """An answer of /v1/completions."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def _choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        logprobs = {
            "tokens": piece.names,
            "token_logprobs": piece.logprobs,
            "top_logprobs": None,
            "text_offset": piece.offsets,
        }
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs if self._job.logprobs else None,
            "finish_reason": piece.finish_reason,
        }


class ChatCompletion(Answer):
    """An answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        """Returns one chunk for each choice that says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(self._wholes))
        ]

    def _choice(self, piece: Piece, *, whole: bool) -> dict[str, Any]:
        if whole:
            said: dict[str, Any] = {
                "message": {"role": "assistant", "content": piece.text, "refusal": None}
            }
        else:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        tokens = zip(piece.names, piece.logprobs, strict=True)
        logprobs = {
            "content": [_chat_token(name, logprob) for name, logprob in tokens],
            "refusal": None,
        }
        return {
            "index": piece.index,
            **said,
            "logprobs": logprobs if self._job.logprobs else None,
            "finish_reason": piece.finish_reason,
        }


def _chat_token(name: str, logprob: float) -> dict[str, Any]:
    """Returns one token; its bytes are left out where it is a part of a character."""
    whole = _REPLACEMENT not in name
    return {
        "token": name,
        "logprob": logprob,
        "bytes": list(name.encode()) if whole else None,
        "top_logprobs": [],
    }
