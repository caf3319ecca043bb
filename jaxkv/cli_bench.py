"""What `jaxkv bench` does between the options and the table: a workload, served once, and its figures.

Invariants: the model comes from outside (`Loaded`); everything is checked before the model is compiled.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jaxkv.cli_engine import EngineOptions, build_engine, cache_config, draft_of
from jaxkv.cli_generate import Loaded
from jaxkv.cli_terminal import format_percent, spinner, stderr
from jaxkv.engine_stats import EngineStats
from jaxkv.request import Request
from jaxkv.workload import ServingReport, mixed_requests, serve_all

LATENCIES = {
    "first_token_s": "time to first token",
    "between_tokens_s": "time between tokens",
    "request_s": "whole request",
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be served.

    Attributes:
      num_requests: how many.
      prompt_lens, max_tokens: least and most; synthetic requests only.
      shared_prefix: first tokens that all prompts share; synthetic requests only.
      rate: requests a second, arriving at random (Poisson); 0: all at once.
      dataset: a ShareGPT-like JSON file; None: synthetic requests.
      seed: of lengths, ids and arrivals.
    """

    num_requests: int
    prompt_lens: tuple[int, int]
    max_tokens: tuple[int, int]
    shared_prefix: int = 0
    rate: float = 0.0
    dataset: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"requests: expected at least 1, got {self.num_requests}")
        if not 0 <= self.rate < float("inf"):
            raise ValueError(f"rate: expected requests a second, 0 or more, got {self.rate}")
        if self.shared_prefix < 0:
            raise ValueError(f"shared_prefix: expected 0 or more, got {self.shared_prefix}")

    def arrivals_s(self) -> list[float]:
        """Returns when each request arrives."""
        if self.rate == 0:
            return [0.0] * self.num_requests
        rng = np.random.default_rng(self.seed)
        gaps = rng.exponential(1 / self.rate, self.num_requests)
        return np.cumsum(gaps).tolist()


def parse_range(name: str, text: str) -> tuple[int, int]:
    """Returns the bounds of "16:512", or of "64" twice the same.

    Raises:
      ValueError: no such range.
    """
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{name}: expected a range such as 16:512, got {text!r}")
    return bounds


def read_dataset(path: Path, loaded: Loaded, workload: Workload, max_len: int) -> list[Request]:
    """Returns requests from conversations: the first human turn, and as many tokens as its answer has.

    Args:
      path: a JSON list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}.
      loaded: its tokenizer counts.
      workload: how many; a shorter file is gone through again.
      max_len: conversations that do not fit are left out.

    Raises:
      ValueError: another form, or no conversation that fits.
    """
    if loaded.tokenizer is None:
        raise ValueError("dataset: expected a model with a tokenizer, this one has none")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        turns = [[turn["value"] for turn in entry["conversations"][:2]] for entry in entries]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected a list of conversations, got {type(error).__name__}: {error}"
        ) from error
    requests = []
    for pair in turns:
        if len(pair) == 2 and all(pair):
            prompt, answer = (loaded.tokenizer.encode(text) for text in pair)
            if prompt and answer and len(prompt) + len(answer) <= max_len:
                requests.append(Request(tuple(prompt), max_tokens=len(answer), ignore_eos=True))
    if not requests:
        raise ValueError(
            f"{path}: expected conversations of at most {max_len} tokens, got none of {len(turns)}"
        )
    return [requests[i % len(requests)] for i in range(workload.num_requests)]


def run(
    loaded: Loaded, options: EngineOptions, workload: Workload, draft: Loaded | None = None
) -> tuple[ServingReport, EngineStats]:
    """Serves the workload on an engine whose programs are compiled before; `draft` drafts for it.

    Raises:
      ValueError: sizes that do not fit the model.
      CapacityError: a request that does not fit the pool.
    """
    config, max_len = cache_config(loaded, options)
    if workload.dataset is not None:
        requests = read_dataset(workload.dataset, loaded, workload, max_len)
    else:
        longest = workload.shared_prefix + workload.prompt_lens[1] + workload.max_tokens[1]
        if longest > max_len:
            raise ValueError(
                f"max_len: expected at least the {longest} tokens of the longest request, got {max_len}"
            )
        requests = mixed_requests(
            loaded.config.vocab_size,
            workload.num_requests,
            prompt_lens=workload.prompt_lens,
            max_tokens=workload.max_tokens,
            shared_prefix=workload.shared_prefix,
            seed=workload.seed,
        )
    drafts = None if draft is None else draft_of(draft, loaded, config, max_len)
    engine = build_engine(loaded, config, options, drafts)
    with spinner(f"serving {len(requests)} requests"):
        report = serve_all(engine, requests, workload.arrivals_s())
    return report, engine.stats


def figures(report: ServingReport, stats: EngineStats) -> dict[str, Any]:
    """Returns what `--json` prints; times in seconds."""
    return {
        "wall_s": report.wall_s,
        "tokens_per_s": report.tokens_per_s,
        "prompt_tokens": report.prompt_tokens,
        "found_tokens": stats.found_tokens,
        "new_tokens": report.new_tokens,
        "num_preemptions": stats.num_preemptions,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "acceptance": stats.acceptance,
        "dispatches": stats.dispatches,
        "compile_s": stats.compile_s,
        "host_share": report.host_share,
        **{name: report.percentiles(name) for name in LATENCIES},
    }


def table(report: ServingReport, stats: EngineStats) -> Table:
    """Returns the figures for people."""
    out = Table(title=f"{report.new_tokens} tokens in {report.wall_s:.1f} s")
    for heading in ("", "p50", "p95", "p99"):
        out.add_column(heading, justify="left" if not heading else "right")
    for name, words in LATENCIES.items():
        out.add_row(words, *(f"{x * 1e3:,.0f} ms" for x in report.percentiles(name).values()))
    rows = {
        "tokens a second": f"{report.tokens_per_s:,.1f}",
        "prompt tokens found": f"{stats.found_tokens:,} of {stats.prompt_tokens:,}",
        "preemptions": f"{stats.num_preemptions:,}",
        "host's share of the time": format_percent(report.host_share),
    }
    if stats.num_drafted:
        share = format_percent(stats.acceptance)
        rows["drafts accepted"] = f"{stats.num_accepted:,} of {stats.num_drafted:,}, {share}"
    out.add_section()
    for words, value in rows.items():
        out.add_row(words, value)
    return out


def save_plot(report: ServingReport, path: Path) -> None:
    """Draws the three latencies as cumulative shares of requests or tokens.

    Raises:
      ImportError: matplotlib is not installed; says how to get it.
      OSError, ValueError: the file cannot be written, or its ending is no picture's.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plot: expected matplotlib; pip install 'jaxkv[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(LATENCIES), figsize=(12, 3.5), layout="constrained")
    for axis, (name, words) in zip(axes, LATENCIES.items(), strict=True):
        values = np.sort(getattr(report, name))
        axis.step(values, np.arange(1, len(values) + 1) / max(len(values), 1), where="post")
        axis.set(xlabel="seconds", title=words, ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share")
    fig.savefig(path, dpi=150)
    plt.close(fig)
    stderr().print(f"wrote {path}", markup=False)
