"""What a server serves and how much of it: the model's side, and the limits.

Invariants: frozen and checked when built; nothing here needs the packages of the extra `serve`.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one caller, and all together, may ask for.

    Attributes:
      max_body_bytes: of a request's body.
      max_prompt_len: tokens of a prompt; None: what the sequence length leaves.
      max_n: samples of one prompt.
      max_prompts: prompts of one request.
      max_stops: stop strings of one request.
      max_queue: sequences that run or wait, of all callers; more are answered 429.
      body_timeout_s: for a caller to send its body.
      write_timeout_s: for a caller to read what was sent, before it counts as gone.
      keep_alive_s: without a token, after which a stream gets a comment that keeps proxies and clients from giving up;
        None: no comments.

    Raises:
      ValueError: a limit below 1, or no number.
    """

    max_body_bytes: int = 4 * 2**20
    max_prompt_len: int | None = None
    max_n: int = 16
    max_prompts: int = 64
    max_stops: int = 16
    max_queue: int = 256
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: float | None = 15.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in ("max_prompt_len", "keep_alive_s"):
                continue
            whole = not field.name.endswith("_s")
            right = (
                isinstance(value, int) if whole else isinstance(value, (int, float)) and value > 0
            )
            if isinstance(value, bool) or not right or (whole and value < 1):
                expected = "an integer of at least 1" if whole else "a number above 0"
                raise ValueError(f"{field.name}: expected {expected}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Served:
    """The model as callers see it.

    Attributes:
      name: what callers write into the field `model`.
      max_len: tokens of a prompt with its answer.
      pool_tokens: tokens that all blocks together hold.
      kv_format: of the cache.
      tokenizer: None: prompts come as token ids, and answers have no text.
      created: Unix time in seconds.
    """

    name: str
    max_len: int
    pool_tokens: int
    kv_format: str
    tokenizer: Any = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


def served_by(engine: Any, name: str, max_len: int | None = None) -> Served:
    """Returns what an engine serves under a name.

    Args:
      engine: a `jaxkv.engine.Engine`.
      name: for callers.
      max_len: None: as long as the cache's block tables allow.
    """
    config = engine.config
    return Served(
        name=name,
        max_len=config.max_seq_len if max_len is None else min(max_len, config.max_seq_len),
        pool_tokens=config.num_blocks * config.block_size,
        kv_format=config.format,
        tokenizer=engine.tokenizer,
    )
