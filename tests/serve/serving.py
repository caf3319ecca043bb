"""Servers on free ports of this machine, each in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from jaxkv.serve import Limits, Served, Server, bind, create_app, served_by


@dataclasses.dataclass
class Running:
    """A server that runs, its engine, and a client of it."""

    url: str
    server: Server
    engine: Any
    client: httpx.Client
    thread: threading.Thread

    def complete(self, **fields: Any) -> httpx.Response:
        """Posts to /v1/completions."""
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4} | fields
        return self.client.post("/v1/completions", json=body)

    def stop(self) -> None:
        """Stops the server and waits for its end."""
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(
    engine: Any,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    grace_s: float = 5.0,
    change: Callable[[Served], Served] = lambda served: served,
) -> Iterator[Running]:
    """Runs a server over an async engine while the body does."""
    served = change(served_by(engine.engine, "tiny"))
    app = create_app(engine, served, limits, api_key)
    ready = threading.Event()
    with bind("127.0.0.1", 0) as listener:
        server = Server(app, listener, grace_s, lambda url: ready.set())
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        assert ready.wait(20)
        with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
            handle = Running(server.url, server, engine, client, thread)
            try:
                yield handle
            finally:
                handle.stop()
