"""What `jaxkv serve` does between the options and the open port.

Invariants: the model comes from outside (`Loaded`), nothing here imports one; the address is taken before the model is
loaded, and it answers only once every program is compiled; standard output holds one line, which says where the server
is; everything else goes to standard error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import ipaddress
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv import ledger
from jaxkv.cli_generate import Loaded, check_memory
from jaxkv.cli_terminal import format_bytes, spinner, stderr
from jaxkv.config import CacheConfig
from jaxkv.format_bytes import default_block_size

if TYPE_CHECKING:
    from jaxkv.engine import Engine
    from jaxkv.serve import Limits

DEFAULT_MAX_LEN = 4096
_PACKAGES = ("prometheus_client", "starlette", "uvicorn")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """How the engine behind the server is built; None leaves the choice to the model.

    Attributes:
      max_seqs: sequences that run at once.
      max_len: tokens of a prompt with its answer; None: the model's context, at most 4096.
      kv_format, block_size, num_blocks: the pool; block_size None means the format's own, num_blocks None enough for
        max_seqs sequences of max_len.
      prefill_tokens: prompt tokens of one prefill dispatch.
      steps_per_dispatch: decode steps between two looks of the host: what streams arrives in bursts of so many tokens.
      draft_len: drafted tokens a step; 0: none.
    """

    max_seqs: int = 8
    max_len: int | None = None
    kv_format: str = "float32"
    block_size: int | None = None
    num_blocks: int | None = None
    prefill_tokens: int = 256
    steps_per_dispatch: int = 8
    draft_len: int = 0


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


def cache_config(loaded: Loaded, options: ServeOptions) -> tuple[CacheConfig, int]:
    """Returns the cache and the tokens a prompt with its answer may have.

    Raises:
      ValueError: a size out of range, beyond the model's context, or a pool larger than the machine's memory.
    """
    context = getattr(loaded.config, "max_position_embeddings", None)
    max_len = options.max_len
    if max_len is None:
        max_len = DEFAULT_MAX_LEN if context is None else min(context, DEFAULT_MAX_LEN)
    ledger.check_count("max_len", max_len, 2)
    if context is not None and max_len > context:
        raise ValueError(
            f"max_len: expected at most the model's {context} positions, got {max_len}"
        )
    size = options.block_size
    size = default_block_size(options.kv_format) if size is None else size
    ledger.check_count("block_size", size, 1)
    ledger.check_count("max_seqs", options.max_seqs, 1)
    per_seq = ledger.num_blocks_needed(max_len, size)
    config = CacheConfig(
        num_layers=loaded.config.num_layers,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        block_size=size,
        num_blocks=options.max_seqs * per_seq if options.num_blocks is None else options.num_blocks,
        max_seqs=options.max_seqs,
        max_blocks_per_seq=per_seq,
        format=options.kv_format,
    )
    check_memory(config)
    return config, max_len


def build_engine(loaded: Loaded, config: CacheConfig, options: ServeOptions) -> Engine:
    """Returns an engine with every program compiled.

    Raises:
      ValueError: a size out of range.
    """
    from jaxkv.engine import Engine

    engine = Engine(
        loaded.model,
        config,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        prefill_tokens=options.prefill_tokens,
        max_steps=options.steps_per_dispatch,
        draft_len=options.draft_len,
    )
    with spinner("compiling"):
        engine.warm_up()
    return engine


def run(
    load: Callable[[], Loaded],
    name: str,
    listener: socket.socket,
    options: ServeOptions,
    limits: Limits,
    *,
    api_key: str | None,
    grace_s: float,
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
    engine = build_engine(loaded, config, options)
    if api_key is None and not _is_local(listener):
        stderr().print(
            "jaxkv: other machines may call this server, and no key is asked of them", markup=False
        )
    logging.basicConfig(format="jaxkv: %(message)s", level=logging.WARNING)
    app = create_app(AsyncEngine(engine), served_by(engine, name, max_len), limits, api_key)

    def announce(url: str) -> None:
        pool = format_bytes(config.layout.nbytes)
        print(
            f"jaxkv: serving {name} at {url}/v1 ({config.num_blocks} blocks of {config.block_size} tokens, "
            f"{config.format}, {pool})",
            flush=True,
        )

    asyncio.run(Server(app, listener, grace_s, announce).serve())


def _is_local(listener: socket.socket) -> bool:
    """Whether only this machine can call."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
