"""What a quantised cache must hold: benchmarks/capacity.py reaches its limits, and counts what the ledger counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from jaxkv import format_bytes

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def capacity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import capacity

    yield capacity
    for name in ("capacity", "harness"):
        sys.modules.pop(name, None)


def test_every_format_holds_what_it_must(capacity: Any) -> None:
    results = capacity.run(quick=True)
    assert not [result.line() for result in results if result.misses]
    held = {result.metric.split(".")[1]: result.least for result in results}
    assert {name: least for name, least in held.items() if least} == {
        "int8": 1.85, "fp8_e4m3": 1.85, "int4": 3.3, "int4_smallest": 3.5,
    }  # fmt: skip
    for name in held:
        assert {r.shapes["head_dim"] for r in results if f".{name}." in r.metric} == {64, 128}
    assert {(r.shapes["num_blocks"], r.shapes["max_seqs"]) for r in results} == {(8192, 64)}


def test_figures_are_the_ledgers(capacity: Any) -> None:
    """Arrays of the store against the formulas, variant by variant."""
    for variant in capacity.VARIANTS:
        for head_dim in capacity.HEAD_DIMS:
            config = capacity.config_of(variant, head_dim)
            options = {
                "block_size": config.block_size,
                "symmetric_keys": config.symmetric_keys,
                "value_group": config.value_group,
            }
            counted = format_bytes.store_bytes(
                24, 8, head_dim, config.format, num_blocks=8192, max_seqs=64, **options
            )
            per_token = counted.total / (8192 * config.block_size)
            result = capacity.measure(variant, head_dim)
            assert result.value == pytest.approx(24 * 8 * head_dim * 4 / per_token, rel=1e-12)


def test_a_figure_below_its_least_is_a_miss(capacity: Any) -> None:
    result = capacity.measure(capacity.Variant("int8", "int8", 1.9), 64)
    assert result.misses
