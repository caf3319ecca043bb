"""The examples run as they stand and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_minimal_loop_continues_its_patterns_and_frees_its_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLES / "minimal_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "abcab -> cabcabcabcabcabcabcabcab",
        "tick tock, t -> ick tick tick tick tick ",
        "123456789-1 -> 23456789-123456789-12345",
        "26 of 32 blocks were in use, 32 are free again",
    ]
