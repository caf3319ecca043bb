"""How much the property tests of the cache try: HYPOTHESIS_PROFILE names a profile, CI=true means "ci"."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

# The state machine runs `max_examples` sequences of up to `stateful_step_count` transitions.
settings.register_profile(
    "ci", max_examples=2000, stateful_step_count=15, derandomize=True, **_COMMON
)
settings.register_profile("reuse", settings.get_profile("ci"))
settings.register_profile("dev", max_examples=150, stateful_step_count=15, **_COMMON)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev")
)
