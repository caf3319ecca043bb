"""What the engine asks of a request before it takes it.

Invariants: a request that passes runs to its end, if need be alone; nothing is changed by one that does not.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from jaxkv.config import CacheConfig
from jaxkv.eviction import Policy
from jaxkv.prompt_check import check_ids, check_prompt
from jaxkv.request import Request
from jaxkv.status import CapacityError
from jaxkv.stop_text import TextStream


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; `models.qwen.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]: ...
    def stream(self) -> TextStream: ...


@dataclasses.dataclass(frozen=True)
class Admission:
    """The limits of an engine.

    Attributes:
      config: its cache.
      policy: its eviction policy, which may know a number of tenants.
      tokenizer: None: token ids only.
      num_ids: its vocabulary.
      eos_token_ids: tokens that end a sequence.
      max_stop_ids: end tokens of a request at most, `eos_token_ids` among them.
    """

    config: CacheConfig
    policy: Policy
    tokenizer: Tokenizer | None
    num_ids: int
    eos_token_ids: tuple[int, ...]
    max_stop_ids: int

    def encode(self, request: Request) -> tuple[int, ...]:
        """Returns the prompt as token ids.

        Raises:
          ValueError: text, or stop strings, without a tokenizer.
        """
        if self.tokenizer is None and (isinstance(request.prompt, str) or request.stop):
            raise ValueError(
                "tokenizer: expected one for text prompts and stop strings, the engine has none"
            )
        if not isinstance(request.prompt, str):
            return tuple(int(token) for token in request.prompt)
        assert self.tokenizer is not None
        return tuple(self.tokenizer.encode(request.prompt))

    def check(self, request: Request, prompt: tuple[int, ...]) -> None:
        """Refuses what could never run.

        Raises:
          ValueError, CapacityError: see `Engine.submit`.
        """
        config = self.config
        check_prompt("prompt", prompt, request.max_tokens, self.num_ids, config.max_seq_len)
        check_ids("stop_ids", request.stop_ids, self.num_ids)
        if len(self.stop_ids(request)) > self.max_stop_ids:
            raise ValueError(
                f"stop_ids: expected at most {self.max_stop_ids} end tokens, got "
                f"{len(self.stop_ids(request))}"
            )
        tenant, lanes = request.namespace.tenant, self.policy.num_lanes
        if 1 < lanes <= tenant:
            raise ValueError(f"namespace.tenant: expected one in [0, {lanes}), got {tenant}")
        need = -(-(len(prompt) + request.max_tokens - 1) // config.block_size)
        if need > config.num_blocks:
            raise CapacityError(
                f"pool too small for the request: need {need} blocks of {config.block_size} tokens, the "
                f"pool has {config.num_blocks}",
                need=need,
                free=config.num_blocks,
            )

    def stop_ids(self, request: Request) -> tuple[int, ...]:
        """Returns the tokens that end a request, ascending."""
        eos = () if request.ignore_eos else self.eos_token_ids
        return tuple(sorted({*eos, *request.stop_ids}))
