"""Which implementation of an op runs: the one the caller named, or the platform's.

Invariants:
  * A named implementation runs or raises; nothing falls back.
  * "auto" decides by the platform the program is lowered for, so one jitted (or exported) program serves
    all of them.  Where the platform's kernel cannot serve the call, lowering for that platform raises what
    the kernel raised; lowering for the others goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

AUTO = "auto"

_refuse = Primitive("refuse")
_refuse.multiple_results = True


@_refuse.def_abstract_eval
def _(*operands: Any, shapes: Any, reason: str) -> Any:
    del operands, reason
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]


def _refuse_lowering(ctx: Any, *operands: Any, shapes: Any, reason: str) -> Any:
    del ctx, operands, shapes
    raise NotImplementedError(f'{reason} (implementation="xla" runs on every platform)')


mlir.register_lowering(_refuse, _refuse_lowering)


def check_name(name: str, known: Mapping[str, Any]) -> None:
    """Checks the name of an implementation.

    Raises:
      ValueError: it is neither "auto" nor one of `known`.
    """
    if name != AUTO and name not in known:
        raise ValueError(f"implementation: expected one of {(AUTO, *known)}, got {name!r}")


def run(
    name: str,
    implementations: Mapping[str, Callable[..., Any]],
    by_platform: Mapping[str, str],
    default: str,
    *operands: Any,
) -> Any:
    """Calls the implementation called `name`, or lets the platform choose.

    Args:
      name: a key of `implementations`, or "auto".
      implementations: all of the op; same operands, same result structure.
      by_platform: implementation of each platform ("cpu", "cuda", "tpu") that "auto" stands for.
      default: implementation of every other platform.
      *operands: pytrees of arrays.

    Raises:
      NotImplementedError: the named implementation does not support the operands.
    """
    if name != AUTO:
        return implementations[name](*operands)
    result = jax.eval_shape(implementations[default], *operands)
    branches = {
        platform: _or_refuse(implementations[chosen], result, operands)
        for platform, chosen in by_platform.items()
    }
    return jax.lax.platform_dependent(*operands, default=implementations[default], **branches)


def _or_refuse(
    implementation: Callable[..., Any], result: Any, operands: tuple[Any, ...]
) -> Callable[..., Any]:
    """Returns the implementation, or, if it does not support the operands, one that lowering refuses."""
    try:
        jax.eval_shape(implementation, *operands)
    except NotImplementedError as error:
        leaves, structure = jax.tree.flatten(result)
        reason = str(error)

        def refuse(*operands: Any) -> Any:
            out = _refuse.bind(*jax.tree.leaves(operands), shapes=tuple(leaves), reason=reason)
            return jax.tree.unflatten(structure, out)

        return refuse
    return implementation
