"""What the bodies of the Triton attention kernels share: the knobs of a call, and products in split precision.

Invariants:
  * A knob is a constant of the kernel if it came as a Python number, and an operand read where it is used if it was traced.
  * Products sum in float32, whatever their operands are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import Array

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# How Python numbers become constants of the kernel, and what traced knobs are read as.
KNOBS = {
    "scale": (float, jnp.float32),
    "soft_cap": (float, jnp.float32),
    "window": (int, jnp.int32),
}


def read_knob(name: str, ref: Any) -> Array:
    """Reads a traced knob."""
    return ref[...].astype(KNOBS[name][1])


def spread(indices: tuple[Array, ...]) -> tuple[Array, ...]:
    """Broadcasts index arrays against each other."""
    return tuple(jnp.broadcast_arrays(*indices))


def dot(a: Array, b: Array, b_axis: int, terms: int) -> Array:
    """a[m, k] times b over its axis `b_axis`, in float32; `a` is rounded to `terms` numbers of b's dtype."""
    # float32 pools take true float32 products: one TF32 product has 11 bits.
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dims = (((1,), (b_axis,)), ((), ()))
    products = []
    for _ in range(terms):
        part = a.astype(b.dtype)
        products.append(
            lax.dot_general(part, b, dims, precision=precision, preferred_element_type=jnp.float32)
        )
        a = a - part.astype(a.dtype) if terms > 1 else a
    return functools.reduce(jnp.add, products)
