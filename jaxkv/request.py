"""What goes into the engine and what comes out: requests, handles, events.

Invariants: a request is checked when it is built, as far as that needs no model; an output only grows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from jaxkv.namespace import Namespace
from jaxkv.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the caller
    ERROR = "error"  # see `Output.error`


@dataclasses.dataclass(frozen=True)
class Request:
    """One request to the engine.

    Attributes:
      prompt: token ids, or text where the engine has a tokenizer.
      max_tokens: generated tokens at most, the end token included; at least 1.
      sampling: how tokens are chosen; its seed makes the request's tokens its own.
      stop_ids: tokens that end a sequence, besides the engine's.
      stop: strings that end a sequence; they are not part of its text.  Need a tokenizer.
      num_samples: sequences to generate from the prompt; sample i draws with its own key.
      namespace: who may share cached blocks with this request; its tenant is whom they are charged to.
      priority: a larger one starts first and is preempted last.
      ignore_eos: the engine's end tokens do not end this request.

    Raises:
      ValueError: a value is out of range.
    """

    prompt: Sequence[int] | str
    max_tokens: int = 16
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    namespace: Namespace = Namespace()
    priority: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError("prompt: expected at least one token, got an empty prompt")
        for name in ("max_tokens", "num_samples"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop: expected strings that are not empty, got {self.stop!r}")


@dataclasses.dataclass
class Output:
    """One sequence of a request.

    Attributes:
      sample_index: which of the request's samples it is.
      tokens: generated so far, the end token included.
      logprobs: of the tokens, natural logarithm, under the model's distribution before temperature and cuts.
      text: the tokens as text, without the end token; a stop string and what follows it are cut off.  Empty
        without a tokenizer.  While the sequence runs, text that may yet turn out to be a stop string is held back.
      finish_reason: None while it runs.
      error: what went wrong, with FinishReason.ERROR.
    """

    sample_index: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclasses.dataclass(eq=False)
class Handle:
    """A submitted request: follow it by the engine's events, or read its outputs.

    Attributes:
      id: the engine's number of the request, in order of submission.
      request: as submitted.
      prompt: its token ids.
      outputs: one per sample.
      num_found: prompt tokens that the first start of its first sample found in the cache.
    """

    id: int
    request: Request
    prompt: tuple[int, ...]
    outputs: list[Output]
    num_found: int = 0

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclasses.dataclass(frozen=True)
class Event:
    """What one dispatch brought for one sequence.

    Attributes:
      handle: whose sequence.
      sample_index: which of its samples.
      tokens, logprobs, text: what is new; text may lag behind the tokens (see `Output.text`).
      finish_reason: None unless the sequence has ended with this event.
      error: what went wrong, with FinishReason.ERROR.
    """

    handle: Handle
    sample_index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
