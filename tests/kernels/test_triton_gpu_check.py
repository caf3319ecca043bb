"""The correctness half of benchmarks/gpu_check.py, as it runs where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    yield gpu_check
    for name in ("gpu_check", "harness"):
        sys.modules.pop(name, None)


def test_interpreted_half_finds_nothing_wrong(gpu_check: Any) -> None:
    rows = gpu_check.correctness(interpret=True)
    assert len(rows) == 2 * len(gpu_check.INTERPRETED)
    assert not [row for row in rows if row.error]


def test_a_wrong_kernel_is_reported(gpu_check: Any) -> None:
    """One part in a thousand is far outside the tolerance of float32."""
    case = gpu_check.find("decode_empty_rows")

    def loud(q: Any, store: Any, layer: Any, view: Any, **knobs: Any) -> Any:
        out, lse = gpu_check.paged_attention_reference(q, store, layer, view, **knobs)
        return out * np.float32(1.001), lse

    assert gpu_check.check_case(case, "loud", loud).error == "output"
