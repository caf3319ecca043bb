"""docs/prefix_reuse.md: its example runs, and it names every policy."""

from __future__ import annotations

import doctest
from pathlib import Path

import jax

import jaxkv

PAGE = Path(__file__).parents[1] / "docs" / "prefix_reuse.md"


def test_prefix_reuse_page_examples_give_what_they_show() -> None:
    # Most of its time is LLVM optimising programs that run three times.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert result.attempted > 10
    assert result.failed == 0


def test_prefix_reuse_page_names_every_policy_and_picture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    policies = [
        name for name in jaxkv.__all__ if name in ("lru", "lfu", "aged_lfu", "cost_aware", "fair")
    ]
    assert len(policies) == 5
    assert [name for name in policies if f"`{name}" not in text] == []
    assert PAGE.with_name("pool.png").stat().st_size < 60_000
