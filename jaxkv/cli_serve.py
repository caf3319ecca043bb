"""What `jaxkv serve` does between the options and the open port.

Invariants: the model comes from outside (`Loaded`), nothing here imports one; the address is taken before the model is
loaded, and it answers only once every program is compiled; standard output holds one line, which says where the server
is; everything else goes to standard error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv.cli_engine import EngineOptions, build_engine, cache_config, draft_of
from jaxkv.cli_generate import Loaded
from jaxkv.cli_terminal import format_bytes, stderr

if TYPE_CHECKING:
    from jaxkv.serve import Limits

_PACKAGES = ("prometheus_client", "starlette", "uvicorn")


def check_packages() -> None:
    """Checks that the extra is installed, before anything costs time.

    Raises:
      ImportError: naming what is missing and how to get it.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"serve: expected {', '.join(missing)}, which is not installed; pip install 'jaxkv[serve]'"
        )


def check_api_key(key: str | None) -> None:
    """Checks a key that callers will have to send in a header.

    Raises:
      ValueError: it is empty, or holds what no header can.
    """
    if key is not None and (not key.isprintable() or not key or key != key.strip()):
        raise ValueError("api_key: expected printable characters without spaces around, got others")


def model_name(model: str | None, name: str | None) -> str:
    """Returns the name callers write: the one given, else the folder's or file's, or the hub id itself.

    Raises:
      ValueError: the name is empty.
    """
    if name is not None:
        if not name:
            raise ValueError("name: expected one that is not empty, got ''")
        return name
    if model is None:
        return "tiny"
    path = Path(model)
    return (
        (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else model
    )


def run(
    load: Callable[[], Loaded],
    name: str,
    listener: socket.socket,
    options: EngineOptions,
    limits: Limits,
    *,
    api_key: str | None,
    grace_s: float,
    load_draft: Callable[[], Loaded] | None = None,
) -> None:
    """Loads, compiles, and serves until a signal asks for the end.

    Raises:
      ValueError: see `cache_config`.
      FileNotFoundError, NotImplementedError, ImportError: from `load`.
    """
    from jaxkv.async_engine import AsyncEngine
    from jaxkv.serve import Server, create_app, served_by

    loaded = load()
    config, max_len = cache_config(loaded, options)
    draft = None
    if load_draft is not None:
        draft = draft_of(load_draft(), loaded, config, max_len)
    engine = build_engine(loaded, config, options, draft)
    if api_key is None and not _is_local(listener):
        stderr().print(
            "jaxkv: other machines may call this server, and no key is asked of them", markup=False
        )
    logging.basicConfig(format="jaxkv: %(message)s", level=logging.WARNING)
    app = create_app(AsyncEngine(engine), served_by(engine, name, max_len), limits, api_key)

    def announce(url: str) -> None:
        pool = format_bytes(config.layout.nbytes)
        if engine.draft is not None:
            pool += (
                f" and {format_bytes(engine.draft.cache_config(config).layout.nbytes)} for drafts"
            )
        print(
            f"jaxkv: serving {name} at {url}/v1 ({config.num_blocks} blocks of {config.block_size} tokens, "
            f"{config.format}, {pool})",
            flush=True,
        )

    asyncio.run(Server(app, listener, grace_s, announce).serve())


def _is_local(listener: socket.socket) -> bool:
    """Whether only this machine can call."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
