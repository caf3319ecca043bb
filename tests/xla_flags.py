"""Flags that make XLA:CPU compile fast, for programs that run a few times on tiny arrays; imports no JAX.

Most of a test's time is LLVM, and MLIR for each of hundreds of fusions.  The old emitters (gone from jax 0.11) need no MLIR.
With them XLA cuts a program into up to 32 objects with memory mappings of their own: one module of tests could pass the 65,530
that Linux allows, and XLA then aborts in a compile.  As one object a program needs three or four.
"""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

# Each holds an XLA that reads XLA_FLAGS and ends the process at a flag that it does not know.
LIBRARIES = {
    "jaxlib": "libjax_common.*",
    "libtpu": "libtpu.so",
    "jax_plugins": "*/xla_cuda_plugin.so",
}
LEVEL = "--xla_backend_optimization_level=0"
OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def quick_flags() -> str:
    """Returns the flags; those of the old emitters only if every installed XLA knows them."""
    names = [flag.split("=")[0].lstrip("-").encode() for flag in OLD_EMITTERS.split()]
    old = all(text.find(name) >= 0 for text in map(_mapped, _libraries()) for name in names)
    return f"{LEVEL} {OLD_EMITTERS}" if old else LEVEL


def _libraries() -> list[Path]:
    """Returns the installed files that hold an XLA."""
    specs = {package: importlib.util.find_spec(package) for package in LIBRARIES}
    return [
        path
        for package, spec in specs.items()
        for folder in (spec.submodule_search_locations or () if spec else ())
        for path in Path(folder).glob(LIBRARIES[package])
    ]


def _mapped(path: Path) -> mmap.mmap:
    """Returns a file's bytes, which are read as they are searched."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
