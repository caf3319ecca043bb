"""A paged KV cache for JAX: block ownership, bytes and generation as pure functions on pytrees.

The names below are imported when they are first used: parts that need no JAX (the ledger, the command
line's help) start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.async_engine import AsyncEngine
    from jaxkv.beam import BeamResult, Hypothesis, beam_search
    from jaxkv.block_pool import BlockPool
    from jaxkv.block_table import BlockTables
    from jaxkv.cache import (
        PagedKVCache,
        clear_status,
        fork,
        init_cache,
        raise_for_status,
        release,
        reserve,
        truncate,
    )
    from jaxkv.config import CacheConfig
    from jaxkv.engine import Engine, EngineStats
    from jaxkv.invariants import check_invariants
    from jaxkv.model import DecoderModel
    from jaxkv.namespace import Namespace
    from jaxkv.permute import reorder
    from jaxkv.profile import MemoryProfile, memory_profile
    from jaxkv.request import Event, FinishReason, Handle, Output, Request
    from jaxkv.sampling import SamplingParams
    from jaxkv.speculate import max_draft_lens
    from jaxkv.status import CapacityError, Status, StatusBit, TransitionError
    from pallas_kernels.layout import BatchView, KVFormat, KVLayout, KVStore

__all__ = [
    "AsyncEngine",
    "BatchView",
    "BeamResult",
    "BlockPool",
    "BlockTables",
    "CacheConfig",
    "CapacityError",
    "DecoderModel",
    "Engine",
    "EngineStats",
    "Event",
    "FinishReason",
    "Handle",
    "Hypothesis",
    "KVFormat",
    "KVLayout",
    "KVStore",
    "MemoryProfile",
    "Namespace",
    "Output",
    "PagedKVCache",
    "Request",
    "SamplingParams",
    "Status",
    "StatusBit",
    "TransitionError",
    "beam_search",
    "check_invariants",
    "clear_status",
    "fork",
    "init_cache",
    "max_draft_lens",
    "memory_profile",
    "raise_for_status",
    "release",
    "reorder",
    "reserve",
    "truncate",
]

_MODULES = {
    "jaxkv.beam": ("BeamResult", "Hypothesis", "beam_search"),
    "jaxkv.block_pool": ("BlockPool",),
    "jaxkv.block_table": ("BlockTables",),
    "jaxkv.cache": (
        "PagedKVCache", "clear_status", "fork", "init_cache", "raise_for_status", "release", "reserve",
        "truncate",
    ),
    "jaxkv.config": ("CacheConfig",),
    "jaxkv.invariants": ("check_invariants",),
    "jaxkv.model": ("DecoderModel",),
    "jaxkv.permute": ("reorder",),
    "jaxkv.profile": ("MemoryProfile", "memory_profile"),
    "jaxkv.status": ("CapacityError", "Status", "StatusBit", "TransitionError"),
    "pallas_kernels.layout": ("BatchView", "KVFormat", "KVLayout", "KVStore"),
    "jaxkv.async_engine": ("AsyncEngine",),
    "jaxkv.engine": ("Engine", "EngineStats",),
    "jaxkv.request": ("Event", "FinishReason", "Handle", "Output", "Request",),
    "jaxkv.sampling": ("SamplingParams",),
    "jaxkv.namespace": ("Namespace",),
    "jaxkv.speculate": ("max_draft_lens",),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Returns a public name, importing its module; the name is then an ordinary attribute."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
