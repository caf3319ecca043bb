"""A socket, the app on it, and an orderly end.

Invariants: SIGINT and SIGTERM let what runs finish within a grace period, during which new requests are answered 503;
then it is cancelled.  A second signal cancels at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 5  # for cancelled requests to tell their clients


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; it does not listen yet.

    Args:
      host: a name or an address of this machine.
      port: 0 takes a free one.

    Raises:
      ValueError: the port is out of range.
      OSError: there is no such address here, or the port is taken.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port: expected one in [0, {2**16}), got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            if sys.platform != "win32":  # there it would let two servers share a port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(
            f"host, port: expected an address that is free, got {host}, {port}: {error.strerror}"
        ) from error
    return bound


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to `Server`, and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]):
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the app, then listens."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_listening()


class Server:
    """Serves one app on one socket.

    Args:
      app: of `create_app`.
      listener: of `bind`; closed at the end.
      grace_s: for running requests to finish once the server is asked to stop.
      on_ready: called when the server listens, with its URL.

    Attributes:
      url: where it listens, for instance "http://127.0.0.1:8000".
    """

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        grace_s: float = 30.0,
        on_ready: Callable[[str], None] = lambda url: None,
    ):
        self._service = app.state.service
        self._listener = listener
        self.url = _url(listener)
        self._grace_s = grace_s
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        self._uvicorn = _Uvicorn(config, lambda: on_ready(self.url))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: asyncio.Event | None = None

    async def serve(self) -> None:
        """Serves until it is asked to stop."""
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        asked = asyncio.create_task(self._asked.wait())
        with self._signals():
            await asyncio.wait((serving, asked), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._service.drain(self._grace_s)
                self._uvicorn.should_exit = True
            asked.cancel()
            await serving

    def stop(self) -> None:
        """Asks the server to stop; asked again, it cancels what runs.  May be called from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has stopped, and its loop is closed
                self._loop.call_soon_threadsafe(self._ask)

    def _ask(self) -> None:
        assert self._asked is not None
        if self._asked.is_set():
            self._service.closed.set()
        self._asked.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Takes the signals that ask for an end, where this thread may."""
        assert self._loop is not None
        main = threading.current_thread() is threading.main_thread()
        taken = _SIGNALS if main and sys.platform != "win32" else ()
        for number in taken:
            self._loop.add_signal_handler(number, self._ask)
        try:
            yield
        finally:
            for number in taken:
                self._loop.remove_signal_handler(number)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
