"""A paged KV cache for JAX: block ownership, bytes and generation as pure functions on pytrees."""

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
from jaxkv.invariants import check_invariants
from jaxkv.model import DecoderModel
from jaxkv.status import CapacityError, Status, StatusBit, TransitionError
from pallas_kernels.layout import BatchView, KVFormat, KVLayout, KVStore

__all__ = [
    "BatchView",
    "BlockPool",
    "BlockTables",
    "CacheConfig",
    "CapacityError",
    "DecoderModel",
    "KVFormat",
    "KVLayout",
    "KVStore",
    "PagedKVCache",
    "Status",
    "StatusBit",
    "TransitionError",
    "check_invariants",
    "clear_status",
    "fork",
    "init_cache",
    "raise_for_status",
    "release",
    "reserve",
    "truncate",
]
