"""Options for programs that a test compiles and runs a few times on tiny arrays.

Most of such a test's time is LLVM optimising code.  Level 0 halves it; what XLA does before (fusion, aliasing,
copies, memory) is the same.  An interpreted kernel becomes hundreds of tiny fusions; XLA's older emitters compile
those in half the time again (TPU decode kernel: 1.8 s, 1.0 s).
"""

from __future__ import annotations

FAST_COMPILE = {"xla_backend_optimization_level": 0}
INTERPRETER_COMPILE = FAST_COMPILE | {"xla_cpu_use_fusion_emitters": False}
