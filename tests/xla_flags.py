"""Flags that make XLA:CPU compile fast, for programs that run a few times on tiny arrays; imports no JAX.

Most of a test's time is LLVM, and MLIR for each of hundreds of fusions.  The old emitters (gone from jax 0.11) need no MLIR.
With them XLA cuts a program into up to 32 objects with memory mappings of their own, of which Linux allows a process 65,530; as
one object a program needs three or four.

Each library with an XLA (jaxlib, libtpu, the CUDA plugin) reads XLA_FLAGS once, when it is first used, and ends the process at a
flag that it does not know: libtpu has no old emitters.  So their flags are in the environment only while jaxlib reads it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

LEVEL = "--xla_backend_optimization_level=0"
OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


@contextlib.contextmanager
def old_emitters() -> Iterator[None]:
    """Adds the flags of the old emitters, if jaxlib has them, for what first compiles inside."""
    before = os.environ.get("XLA_FLAGS", "")
    if all(_jaxlib_has(flag.split("=")[0].lstrip("-")) for flag in OLD_EMITTERS.split()):
        os.environ["XLA_FLAGS"] = f"{before} {OLD_EMITTERS}".strip()
    yield
    os.environ["XLA_FLAGS"] = before


def _jaxlib_has(flag: str) -> bool:
    """Returns whether the name of a flag is a string of jaxlib's library; fields of messages, which outlive flags, are none."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).glob("libjax_common.*"):
            with path.open("rb") as file:
                text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return text.find(b"\0" + flag.encode() + b"\0") >= 0
    return False
