"""Options for programs that a test compiles and runs a few times on tiny arrays.

Most of such a test's time is LLVM optimising code.  Level 0 halves it; what XLA does before (fusion, aliasing,
copies, memory) is the same.
"""

from __future__ import annotations

FAST_COMPILE = {"xla_backend_optimization_level": 0}
