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
    from jaxkv.draft_model import DraftModel
    from jaxkv.engine import Engine
    from jaxkv.engine_stats import EngineStats
    from jaxkv.eviction import Policy, aged_lfu, cost_aware, fair, lfu, lru
    from jaxkv.invariants import check_invariants
    from jaxkv.model import DecoderModel
    from jaxkv.namespace import Namespace
    from jaxkv.permute import reorder
    from jaxkv.profile import MemoryProfile, memory_profile
    from jaxkv.request import Event, FinishReason, Handle, Output, Request
    from jaxkv.reuse import PrefixReuse
    from jaxkv.sampling import SamplingParams
    from jaxkv.sharing import admit, advance, evict, register, with_prefix_reuse
    from jaxkv.snapshot import PoolSnapshot, pool_snapshot
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
    "DraftModel",
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
    "Policy",
    "PoolSnapshot",
    "PrefixReuse",
    "Request",
    "SamplingParams",
    "Status",
    "StatusBit",
    "TransitionError",
    "admit",
    "advance",
    "aged_lfu",
    "beam_search",
    "check_invariants",
    "clear_status",
    "cost_aware",
    "evict",
    "fair",
    "fork",
    "init_cache",
    "lfu",
    "lru",
    "max_draft_lens",
    "memory_profile",
    "pool_snapshot",
    "raise_for_status",
    "register",
    "release",
    "reorder",
    "reserve",
    "truncate",
    "with_prefix_reuse",
]

# `admit` itself stays in its module of the same name: from jaxkv.sharing import admit.
_MODULES = {
    "jaxkv.async_engine": ("AsyncEngine",),
    "jaxkv.beam": ("BeamResult", "Hypothesis", "beam_search"),
    "jaxkv.block_pool": ("BlockPool",),
    "jaxkv.block_table": ("BlockTables",),
    "jaxkv.cache": (
        "PagedKVCache", "clear_status", "fork", "init_cache", "raise_for_status", "release", "reserve", "truncate",
    ),
    "jaxkv.config": ("CacheConfig",),
    "jaxkv.draft_model": ("DraftModel",),
    "jaxkv.engine": ("Engine",),
    "jaxkv.engine_stats": ("EngineStats",),
    "jaxkv.eviction": ("Policy", "aged_lfu", "cost_aware", "fair", "lfu", "lru"),
    "jaxkv.invariants": ("check_invariants",),
    "jaxkv.model": ("DecoderModel",),
    "jaxkv.namespace": ("Namespace",),
    "jaxkv.permute": ("reorder",),
    "jaxkv.profile": ("MemoryProfile", "memory_profile"),
    "jaxkv.request": ("Event", "FinishReason", "Handle", "Output", "Request"),
    "jaxkv.reuse": ("PrefixReuse",),
    "jaxkv.sampling": ("SamplingParams",),
    "jaxkv.sharing": ("admit", "advance", "evict", "register", "with_prefix_reuse"),
    "jaxkv.snapshot": ("PoolSnapshot", "pool_snapshot"),
    "jaxkv.speculate": ("max_draft_lens",),
    "jaxkv.status": ("CapacityError", "Status", "StatusBit", "TransitionError"),
    "pallas_kernels.layout": ("BatchView", "KVFormat", "KVLayout", "KVStore"),
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
