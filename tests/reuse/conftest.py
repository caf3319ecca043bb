"""The plain model and the driver of tests/cache serve here too, and so do its Hypothesis profiles."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

CACHE_TESTS = Path(__file__).parents[1] / "cache"
sys.path.insert(0, str(CACHE_TESTS))
_spec = importlib.util.spec_from_file_location("cache_profiles", CACHE_TESTS / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))
