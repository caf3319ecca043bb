"""Strictness shared by all tests: CPU only, no implicit promotion, warnings are errors, no network."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import socket
from collections.abc import Iterator
from typing import Any

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    yield
