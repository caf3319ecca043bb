"""Synthetic requests, and what serving them took: throughput and latency.

Invariants: a workload depends on its seed alone; times are wall clock seconds of the host.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jaxkv.engine import Engine
from jaxkv.request import Request

PERCENTILES = (50, 95, 99)


def mixed_requests(
    vocab_size: int,
    num_requests: int,
    *,
    prompt_lens: tuple[int, int] = (16, 512),
    max_tokens: tuple[int, int] = (16, 256),
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[Request]:
    """Returns greedy requests of random ids; their lengths are log-uniform between the two bounds.

    Args:
      vocab_size: ids are drawn from [0, vocab_size).
      num_requests: how many.
      prompt_lens, max_tokens: least and most tokens of a prompt, and to generate; end tokens are ignored, so
        that the work is what was asked for.
      shared_prefix: so many first tokens are the same in every prompt.
      seed: of the draws.

    Raises:
      ValueError: bounds that hold no length.
    """
    for name, (low, high) in (("prompt_lens", prompt_lens), ("max_tokens", max_tokens)):
        if not 1 <= low <= high:
            raise ValueError(f"{name}: expected 1 <= least <= most, got {low} and {high}")
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, shared_prefix)

    def lens(bounds: tuple[int, int]) -> np.ndarray:
        low, high = np.log(bounds[0]), np.log(bounds[1])
        return np.round(np.exp(rng.uniform(low, high, num_requests))).astype(int)

    requests = []
    for prompt_len, new in zip(lens(prompt_lens), lens(max_tokens), strict=True):
        own = rng.integers(0, vocab_size, prompt_len)
        prompt = tuple(int(token) for token in (*prefix, *own))
        requests.append(Request(prompt, max_tokens=int(new), ignore_eos=True))
    return requests


@dataclasses.dataclass(frozen=True)
class ServingReport:
    """What a workload took.

    Attributes:
      wall_s: from the first submit to the last event.
      prompt_tokens, new_tokens: of all requests.
      first_token_s: submit to first token, one per request.
      between_tokens_s: time between two events over the tokens of the second, one per event but the first.
      request_s: submit to end, one per request.
      host_share: time of the host outside device calls, over wall_s.
    """

    wall_s: float
    prompt_tokens: int
    new_tokens: int
    first_token_s: tuple[float, ...]
    between_tokens_s: tuple[float, ...]
    request_s: tuple[float, ...]
    host_share: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over wall_s."""
        return self.new_tokens / self.wall_s

    def percentiles(self, name: str) -> dict[str, float]:
        """Returns {"p50": ..., "p95": ..., "p99": ...} of one of the three lists, in seconds; zeros if it is empty."""
        values = getattr(self, name) or (0.0,)
        return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def serve_all(
    engine: Engine, requests: Sequence[Request], arrivals_s: Sequence[float] | None = None
) -> ServingReport:
    """Serves requests to their end and measures.

    Args:
      engine: idle; compile what it needs before (`warm_up`), or compiles are part of the times.
      requests: what to serve.
      arrivals_s: seconds after the start at which each arrives, ascending; None: all at once.
    """
    arrivals = list(arrivals_s) if arrivals_s is not None else [0.0] * len(requests)
    if len(arrivals) != len(requests):
        raise ValueError(f"arrivals_s: expected {len(requests)} times, got {len(arrivals)}")
    host_s = engine.stats.host_s
    begin = time.perf_counter()
    submitted: dict[int, float] = {}
    last: dict[int, float] = {}
    first_s, between_s, request_s = [], [], []
    num_new, num_sent = 0, 0
    while num_sent < len(requests) or not engine.idle:
        now = time.perf_counter() - begin
        while num_sent < len(requests) and arrivals[num_sent] <= now:
            submitted[engine.submit(requests[num_sent]).id] = arrivals[num_sent]
            num_sent += 1
        if engine.idle:
            time.sleep(max(0.0, arrivals[num_sent] - now))
            continue
        events = engine.step()
        now = time.perf_counter() - begin
        for event in events:
            key = event.handle.id
            if event.tokens and key not in last:
                first_s.append(now - submitted[key])
            elif event.tokens:
                between_s.append((now - last[key]) / len(event.tokens))
            last[key] = now
            num_new += len(event.tokens)
            if event.handle.done:
                request_s.append(now - submitted[key])
    wall_s = time.perf_counter() - begin
    return ServingReport(
        wall_s=wall_s,
        prompt_tokens=sum(len(request.prompt) for request in requests),
        new_tokens=num_new,
        first_token_s=tuple(first_s),
        between_tokens_s=tuple(between_s),
        request_s=tuple(request_s),
        host_share=(engine.stats.host_s - host_s) / wall_s,
    )
