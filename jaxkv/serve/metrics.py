"""What /metrics tells: the engine's counts, read when asked, and the server's own times.

Invariants: every app has a registry of its own, nothing is global; all names begin with ``jaxkv_``; times are in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxkv.request import Event

_FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# Field of the engine's statistics -> what it counts; the metric is jaxkv_<name>_total.
_COUNTERS = {
    "num_submitted": ("requests_submitted", "Requests the engine took."),
    "num_finished": ("requests_finished", "Requests that ended in the engine."),
    "num_preemptions": ("preemptions", "Sequences that gave up their blocks to others."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "found_tokens": ("found_tokens", "Tokens of prompts that were found in the cache."),
    "resumed_tokens": ("resumed_tokens", "Tokens found again when preempted sequences went on."),
    "new_tokens": ("new_tokens", "Generated tokens."),
    "num_drafted": ("drafted_tokens", "Tokens that were guessed ahead."),
    "num_accepted": ("accepted_tokens", "Guessed tokens that were right."),
    "dispatches": ("dispatches", "Programs that were started."),
}


class _EngineCollector(Collector):
    """Reads the engine's statistics at the moment of the question."""

    def __init__(self, engine: Any):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Returns the engine's counters and gauges."""
        stats = self._engine.stats
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"jaxkv_{name}", text, value=getattr(stats, field))
        yield GaugeMetricFamily("jaxkv_waiting", "Sequences that wait.", value=stats.num_waiting)
        yield GaugeMetricFamily("jaxkv_running", "Sequences that run.", value=stats.num_running)
        blocks = GaugeMetricFamily("jaxkv_blocks", "Blocks of the pool.", labels=("state",))
        for state in ("free", "cached", "live"):
            blocks.add_metric((state,), getattr(stats, f"num_{state}"))
        yield blocks
        share = stats.found_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield GaugeMetricFamily(
            "jaxkv_hit_rate", "Share of prompt tokens found in the cache.", value=share
        )


class Metrics:
    """The metrics of one app.

    Args:
      engine: a `jaxkv.engine.Engine`; its statistics are read, nothing else.
    """

    def __init__(self, engine: Any):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._answers = Counter(
            "jaxkv_http_answers",
            "Answers by endpoint and status; status 499: the client left.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "jaxkv_in_flight",
            "Sequences asked for and not yet answered.",
            registry=self._registry,
        )
        self._first = self._histogram("first_token", "From the request to a token.", _FIRST_BUCKETS)
        self._between = self._histogram("between_tokens", "From token to token.", _BETWEEN_BUCKETS)
        self._whole = self._histogram("request", "From the request to its end.", _WHOLE_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jaxkv_{name}_seconds", text, buckets=buckets, registry=self._registry)

    def count_answer(self, endpoint: str, status: int) -> None:
        """Counts one answer."""
        self._answers.labels(endpoint, str(status)).inc()

    def clock(self) -> Clock:
        """Returns a clock that starts now."""
        return Clock(self._first, self._between, self._whole)

    def text(self) -> tuple[bytes, str]:
        """Returns the metrics in Prometheus' text form, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class Clock:
    """Times one request.

    Several tokens that arrive with one event share the time since the sequence's last event.
    """

    def __init__(self, first: Histogram, between: Histogram, whole: Histogram):
        self._start = time.perf_counter()
        self._first, self._between, self._whole = first, between, whole
        self._last: dict[tuple[int, int], float] = {}  # (prompt, sample) -> time of its last tokens

    def take(self, prompt_index: int, event: Event) -> None:
        """Notes the tokens of an event."""
        if not event.tokens:
            return
        now = time.perf_counter()
        key = (prompt_index, event.sample_index)
        if not self._last:
            self._first.observe(now - self._start)
        if key in self._last:
            gap = (now - self._last[key]) / len(event.tokens)
            for _ in event.tokens:
                self._between.observe(gap)
        self._last[key] = now

    def stop(self) -> None:
        """Notes the end of a request that was answered whole."""
        self._whole.observe(time.perf_counter() - self._start)
