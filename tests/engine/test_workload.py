"""Workloads and their figures, on an engine that counts instead of computing; `jaxkv bench` from file to table."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_driver import CountingEngine, Letters

from jaxkv.cli_bench import Workload, figures, parse_range, read_dataset, save_plot, table
from jaxkv.request import Request
from jaxkv.workload import mixed_requests, serve_all


def test_mixed_requests_keep_to_their_bounds_and_seed() -> None:
    how: dict[str, Any] = {"prompt_lens": (3, 40), "max_tokens": (2, 9), "shared_prefix": 4}
    requests = mixed_requests(31, 50, seed=5, **how)
    assert requests == mixed_requests(31, 50, seed=5, **how) != mixed_requests(31, 50, **how)
    assert {request.prompt[:4] for request in requests} == {requests[0].prompt[:4]}
    lens = [len(request.prompt) - 4 for request in requests]
    assert min(lens) < 8
    assert 20 < max(lens) <= 40
    assert {request.max_tokens for request in requests} <= set(range(2, 10))
    with pytest.raises(ValueError, match="prompt_lens: expected 1 <= least <= most, got 5 and 4"):
        mixed_requests(31, 1, prompt_lens=(5, 4))


def test_every_token_is_counted_once() -> None:
    requests = mixed_requests(31, 9, prompt_lens=(1, 4), max_tokens=(1, 5))
    report = serve_all(CountingEngine(), requests, [0.0] * 5 + [0.01] * 4)  # type: ignore[arg-type]
    total = sum(request.max_tokens for request in requests)
    assert report.new_tokens == total
    assert len(report.first_token_s) == len(report.request_s) == 9
    assert len(report.between_tokens_s) == total - 9
    assert report.wall_s >= 0.01
    with pytest.raises(ValueError, match="arrivals_s: expected 9 times, got 1"):
        serve_all(CountingEngine(), requests, [0.0])  # type: ignore[arg-type]


def test_figures_table_and_plot(tmp_path: Path) -> None:
    engine = CountingEngine()
    report = serve_all(engine, [Request([1], max_tokens=3)])  # type: ignore[arg-type]
    found = figures(report, engine.stats)
    assert found["new_tokens"] == 3
    assert found["first_token_s"]["p50"] <= found["request_s"]["p99"]
    json.dumps(found)
    assert table(report, engine.stats).row_count == 7
    save_plot(report, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes()[:4] == b"\x89PNG"


def test_a_dataset_of_conversations_becomes_requests(tmp_path: Path) -> None:
    loaded: Any = SimpleNamespace(tokenizer=Letters())
    workload = Workload(3, (1, 1), (1, 1))
    turns = [["abc", "de"], ["a" * 30, "b"], ["only one"], ["", "x"], ["zz", "y"]]
    entries = [{"conversations": [{"from": "x", "value": text} for text in pair]} for pair in turns]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(entries))
    requests = read_dataset(path, loaded, workload, 20)
    assert [(r.prompt, r.max_tokens) for r in requests] == [
        ((0, 1, 2), 2),
        ((25, 25), 1),
        ((0, 1, 2), 2),
    ]
    for text in ("[", '[{"turns": []}]', "3"):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a list of conversations"):
            read_dataset(path, loaded, workload, 20)
    path.write_text("[]")
    with pytest.raises(ValueError, match="got none of 0"):
        read_dataset(path, loaded, workload, 20)


def test_bad_workloads_are_refused() -> None:
    assert parse_range("x", "3:7") == (3, 7)
    assert parse_range("x", "5") == (5, 5)
    for text in ("", "a:b", "0:3", "7:3", "1:2:3"):
        with pytest.raises(ValueError, match="x: expected a range such as 16:512, got"):
            parse_range("x", text)
    for change, words in (({"num_requests": 0}, "requests"), ({"rate": -1.0}, "rate")):
        with pytest.raises(ValueError, match=words):
            Workload(**{"num_requests": 1, "prompt_lens": (1, 1), "max_tokens": (1, 1)} | change)
    arrivals = Workload(50, (1, 1), (1, 1), rate=100.0).arrivals_s()
    assert arrivals == sorted(arrivals)
    assert 0.2 < arrivals[-1] < 1.2
