"""Options of single programs: quick ones for interpreted kernels, which are many small fusions, and the compiler's own.

The old emitters (gone from jax 0.11) compile an interpreted kernel in a third of the time.
"""

from __future__ import annotations

from typing import Any

import jax


def known(**options: Any) -> dict[str, Any]:
    """Returns those of the options that the installed XLA has; some come and go with its versions."""

    def has(name: str, value: Any) -> bool:
        try:
            jax.jit(lambda x: x).lower(0.0).compile({name: value})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {name: value for name, value in options.items() if has(name, value)}


FAST_INTERPRET = known(xla_llvm_disable_expensive_passes=True, xla_cpu_use_fusion_emitters=False)
# What XLA:CPU does outside of these tests: for tests of the compiled program itself (see conftest.py).
SHIPPED = known(xla_cpu_use_fusion_emitters=True)
