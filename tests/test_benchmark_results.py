"""What benchmarks keep: merged lines, and the figures and table of the quality run from known losses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality

    yield quality
    for name in ("quality", "quality_report", "cpu_decode", "harness"):
        sys.modules.pop(name, None)


def test_merge_replaces_a_figure_measured_again_and_keeps_the_others(
    quality: Any, tmp_path: Path
) -> None:
    harness = quality.harness
    path = tmp_path / "made" / "x.jsonl"
    first = [harness.Result("a", n, "B", {"block": n}, spread=(0.0, 1.0)) for n in (1, 2)]
    assert harness.merge(path, first) == first
    again = harness.Result("a", 5, "B", {"block": 2}, limit=3)
    other = harness.Result("b", 7, "B", {"block": 2})
    assert harness.merge(path, [again, other]) == [first[0], again, other]
    assert len(path.read_text().splitlines()) == 3


def test_quality_rows_of_known_losses_are_exact(quality: Any, tmp_path: Path) -> None:
    """A loss larger by ln(1.02) is 2 % more perplexity; windows of +0 and twice that have half of it as standard error."""
    pytest.importorskip("matplotlib")
    base = (np.full((2, 6), 2.0), np.full((2, 3), 1.0))
    worse = (base[0] + [[0.0], [2 * np.log(1.02)]], base[1] + np.log(1.005))
    shapes = {"block_size": 64, "bits_per_element": 4.375, "tokens_per_byte_vs_bf16": 3.6}
    rows = quality.results("float32", base, base, shapes)
    rows += quality.results("int4.smallest", worse, base, shapes)
    control = (worse[0], np.zeros((2, 0)))
    rows += quality.results("control.int4", control, base, {"bits_per_element": 5.0})
    assert [r.metric.split("quality.")[1] for r in rows] == [
        "float32.ppl_change_percent", "float32.decode_ppl_change_percent",
        "int4.smallest.ppl_change_percent", "int4.smallest.decode_ppl_change_percent",
        "control.int4.ppl_change_percent",
    ]  # fmt: skip
    assert np.allclose([r.value for r in rows], [0, 0, 2, 0.5, 2], atol=1e-12)
    assert np.allclose(rows[2].spread, [0, 100 * (1.02**2 - 1)], atol=1e-12)
    assert (rows[2].versus_value, rows[2].limit, rows[3].limit) == (np.exp(2), 3.0, None)
    assert rows[2].shapes["tokens"] == 12
    quality.quality_report.save(tmp_path, rows[:4])
    quality.quality_report.save(tmp_path, rows[4:])
    table = (tmp_path / "quality.md").read_text()
    row = "| int4.smallest | 64 | 4.375 | 3.60 | +2.000 % | 2.020 | +3 % | +0.500 % | 0.000 |"
    assert row in table
    assert "| control.int4 | - | 5 | - | +2.000 % | 2.020 |  | - | - |" in table
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
