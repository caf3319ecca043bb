"""One sample of a request on the host: where it stands, and its tokens as they become text.

Invariants: a sequence has a slot exactly while the device runs it; an output only grows, also over preemptions.
"""

from __future__ import annotations

import dataclasses

from jaxkv.engine_state import LENGTH, NOT_FINITE, STOP
from jaxkv.request import FinishReason, Handle, Output
from jaxkv.stop_text import StopText


@dataclasses.dataclass(eq=False)
class EngineSequence:
    """One sample of a request, on the host.

    Attributes:
      handle, output: whose it is, and what it brings.
      rank: place in the order of service; smaller is earlier.
      text: its decoder, if there is a tokenizer.
      slot: None while it waits.
      num_tokens, kv_len: prompt and generated tokens; how many of them the cache holds.
      started: whether its prompt has been computed once.
    """

    handle: Handle
    output: Output
    rank: tuple[int, int, int]
    text: StopText | None
    slot: int | None = None
    num_tokens: int = 0
    kv_len: int = 0
    started: bool = False

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return self.num_tokens - self.kv_len

    @property
    def in_prefill(self) -> bool:
        """Whether it needs `feed`: it holds nothing yet, or lacks more than its last token."""
        return self.kv_len == 0 or self.left > 1

    @property
    def tenant(self) -> int:
        """Whom its blocks are charged to."""
        return self.handle.request.namespace.tenant

    @property
    def max_len(self) -> int:
        """Tokens at which it ends."""
        return len(self.handle.prompt) + self.handle.request.max_tokens

    @property
    def running_slot(self) -> int:
        """Its slot; REQUIRES that it has one."""
        assert self.slot is not None
        return self.slot

    def append(
        self, tokens: list[int], logprobs: list[float], code: int
    ) -> tuple[tuple[tuple[int, ...], tuple[float, ...], str], FinishReason | None]:
        """Appends what a dispatch brought, up to a stop string.

        Args:
          tokens, logprobs: new.
          code: the device's `finish` of the row.

        Returns:
          What was taken, as (tokens, logprobs, text); and why the sequence has ended, None if it goes on.
        """
        text, kept, stopped = self.decode_text(tokens, code)
        tokens, logprobs = tokens[:kept], logprobs[:kept]
        self.output.tokens += tokens
        self.output.logprobs += logprobs
        self.output.text += text
        reasons = {LENGTH: FinishReason.LENGTH, NOT_FINITE: FinishReason.ERROR}
        ends = stopped or code == STOP
        reason = FinishReason.STOP if ends else reasons.get(code)
        return (tuple(tokens), tuple(logprobs), text), reason

    def decode_text(self, tokens: list[int], code: int) -> tuple[str, int, bool]:
        """Returns new text, how many of the tokens it takes, and whether a stop string came."""
        if self.text is None:
            return "", len(tokens), False
        pieces = []
        ends = len(tokens) - (code == STOP)  # the end token is no text
        for i, token in enumerate(tokens[:ends]):
            piece, stopped = self.text.push(token)
            pieces.append(piece)
            if stopped:
                return "".join(pieces), i + 1, True
        if code:
            piece, stopped = self.text.flush()
            pieces.append(piece)
            if stopped:
                return "".join(pieces), len(tokens), True
        return "".join(pieces), len(tokens), False
