"""Which implementation of an op runs: the one the caller named, or the platform's; and whether a step runs at all.

Invariants:
  * A named implementation runs or raises; nothing falls back.
  * "auto" decides by the platform the program is lowered for, so one jitted (or exported) program serves
    all of them.  Where the platform's kernel cannot serve the call, lowering for that platform raises what
    the kernel raised; lowering for the others goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

AUTO = "auto"
_Carry = TypeVar("_Carry")

_only_on = Primitive("only_on")
_only_on.multiple_results = True


@_only_on.def_abstract_eval
def _(*operands: Any, platform: str, program: ClosedJaxpr | None, reason: str, shapes: Any) -> Any:
    del operands, platform, program, reason
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes]


def _only_on_lowering(
    ctx: Any,
    *operands: Any,
    platform: str,
    program: ClosedJaxpr | None,
    reason: str,
    shapes: Any,
) -> Any:
    """Lowers a program for one platform, whatever else the module is lowered for, or refuses to.

    `lax.platform_dependent` alone will not do: a module for several platforms (`jax.export`) lowers each of its
    branches for all of them, and a Pallas kernel knows but one.
    """
    del shapes
    if program is None:
        raise NotImplementedError(f'{reason} (implementation="xla" runs on every platform)')
    lower = mlir.lower_fun(jaxpr_as_fun(program), multiple_results=True)
    return lower(ctx.replace(platforms=(platform,)), *operands)


mlir.register_lowering(_only_on, _only_on_lowering)


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
        platform: _on(platform, implementations[chosen], result, operands)
        for platform, chosen in by_platform.items()
    }
    return jax.lax.platform_dependent(*operands, default=implementations[default], **branches)


def _on(
    platform: str, implementation: Callable[..., Any], result: Any, operands: tuple[Any, ...]
) -> Callable[..., Any]:
    """Returns the implementation as a program that is lowered for `platform` only.

    If it does not support the operands, lowering raises what it raised here.
    """
    leaves, structure = jax.tree.flatten(result)
    program, reason = None, ""
    try:
        program = jax.make_jaxpr(implementation)(*operands)
    except NotImplementedError as error:
        reason = str(error)

    def call(*operands: Any) -> Any:
        out = _only_on.bind(
            *jax.tree.leaves(operands),
            platform=platform,
            program=program,
            reason=reason,
            shapes=tuple(leaves),
        )
        return jax.tree.unflatten(structure, out)

    return call


def when(
    condition: jax.Array, function: Callable[[jax.Array, _Carry], _Carry], carry: _Carry
) -> _Carry:
    """Returns function(turn, carry) where the condition (bool[]) holds, else the carry.

    A loop of one turn or none and not `lax.cond`: XLA:GPU copies what passes through a branch, here whole pools.
    """
    return jax.lax.fori_loop(0, condition.astype("int32"), function, carry)
