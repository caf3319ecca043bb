"""Imports go one way: models -> jaxkv -> pallas_kernels; only jaxkv/cli.py knows all three."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "jaxkv", "models")  # each may import itself and what stands before it
COMPOSITION_ROOT = "jaxkv/cli.py"


def imported_packages(source: str, package: str) -> set[str]:
    """Returns the top-level packages that a file of `package` imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(package if node.level else (node.module or "").split(".")[0])
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value).split(".")[0])
    return found


def forbidden_imports(source: str, file: str) -> set[str]:
    """Returns what the file at that path imports and must not."""
    package = file.split("/")[0]
    if file == COMPOSITION_ROOT:
        return set()
    later = PACKAGES[PACKAGES.index(package) + 1 :]
    return imported_packages(source, package) & {*later, "tests", "benchmarks"}


_FILES = sorted(
    str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_every_file_point_one_way(package: str) -> None:
    files = [file for file in _FILES if file.startswith(f"{package}/")]
    assert files, f"no files found under {package}"
    wrong = {file: forbidden_imports((ROOT / file).read_text(), file) for file in files}
    assert not {file: names for file, names in wrong.items() if names}


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("import jaxkv.cache", "pallas_kernels/layout.py"),
        ("def f():\n    from jaxkv import cache", "pallas_kernels/kv_write/xla.py"),
        ("from models import qwen", "jaxkv/generate.py"),
        ("import os, models.qwen as q", "jaxkv/cli_generate.py"),
        ("import importlib\nimportlib.import_module('models.qwen')", "jaxkv/__init__.py"),
        ("from tests import fake_model", "models/qwen/modeling.py"),
    ],
)
def test_imports_against_the_direction_are_seen(source: str, file: str) -> None:
    assert forbidden_imports(source, file)


def test_imports_of_the_composition_root_are_free() -> None:
    assert not forbidden_imports("import models.qwen\nimport pallas_kernels", COMPOSITION_ROOT)
