"""What a pool holds at one moment, as small host arrays that outlive the cache they were taken from.

Invariants:
  * free, cached and live blocks partition the pool.
  * Taking a snapshot copies the ownership state alone, in one transfer; K and V stay where they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv.cache import PagedKVCache
from jaxkv.ledger import fragmentation

FREE, CACHED, LIVE = "free", "cached", "live"


@dataclasses.dataclass(frozen=True)
class PoolSnapshot:
    """The blocks of a pool and who holds them.

    Attributes:
      block_size: tokens a block holds.
      ref_counts: i32[block], owners of each.
      cached: bool[block], findable by their prefix, without owner.
      tables: for each slot in use its blocks, in order.
      kv_lens: for each slot in use its tokens.
      title: what had just happened, for people.
    """

    block_size: int
    ref_counts: np.ndarray
    cached: np.ndarray
    tables: dict[int, tuple[int, ...]]
    kv_lens: dict[int, int]
    title: str = ""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self.ref_counts)

    @property
    def num_live(self) -> int:
        """Blocks with an owner."""
        return int(np.count_nonzero(self.ref_counts))

    @property
    def num_shared(self) -> int:
        """Blocks with more than one owner."""
        return int(np.count_nonzero(self.ref_counts > 1))

    @property
    def num_cached(self) -> int:
        """Blocks that are findable and have no owner."""
        return int(np.count_nonzero(self.cached))

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing anybody could ask for."""
        return self.num_blocks - self.num_live - self.num_cached

    @property
    def fragmentation(self) -> float:
        """Free token slots of the live blocks over their capacity, in [0, 1)."""
        rows = list(self.tables.values())
        return fragmentation(rows, list(self.kv_lens.values()), self.block_size)

    @property
    def owners(self) -> np.ndarray:
        """i32[block], the first slot that holds each block, -1 for none."""
        owners = np.full(self.num_blocks, -1, np.int32)
        for slot, table in sorted(self.tables.items(), reverse=True):
            owners[list(table)] = slot
        return owners

    @property
    def num_tokens(self) -> np.ndarray:
        """i32[block], tokens in each: what its longest owner put there; cached blocks are full."""
        counts = np.where(self.cached, self.block_size, 0).astype(np.int32)
        for slot, table in self.tables.items():
            for column, block in enumerate(table):
                inside = min(self.block_size, self.kv_lens[slot] - column * self.block_size)
                counts[block] = max(counts[block], inside)
        return counts

    def caption(self) -> str:
        """Returns the counts and the fragmentation in one line."""
        return (
            f"{self.num_blocks:,} blocks of {self.block_size} tokens: {self.num_live:,} live "
            f"({self.num_shared:,} shared), {self.num_cached:,} cached, {self.num_free:,} free; "
            f"fragmentation {100 * self.fragmentation:.1f} %"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values only, ready for `json.dumps`."""
        counts, owners = self.num_tokens, self.owners
        states = np.where(self.ref_counts > 0, LIVE, np.where(self.cached, CACHED, FREE))
        return {
            "title": self.title,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "num_live": self.num_live,
            "num_shared": self.num_shared,
            "num_cached": self.num_cached,
            "num_free": self.num_free,
            "fragmentation": self.fragmentation,
            "blocks": [
                {
                    "state": str(states[block]),
                    "ref_count": int(self.ref_counts[block]),
                    "num_tokens": int(counts[block]),
                    "slot": None if owners[block] < 0 else int(owners[block]),
                }
                for block in range(self.num_blocks)
            ],
            "sequences": [
                {"slot": slot, "num_tokens": self.kv_lens[slot], "blocks": list(table)}
                for slot, table in self.tables.items()
            ],
        }


def pool_snapshot(cache: PagedKVCache, title: str = "") -> PoolSnapshot:
    """Returns what the pool of a cache holds; a host function, it waits for the device.

    Args:
      cache: a cache that has not been donated away; it may be donated afterwards.
      title: what had just happened.
    """
    place = None if cache.reuse is None else cache.reuse.index.findable
    refs, blocks, kv_lens, findable = jax.device_get(
        (cache.pool.ref_counts, cache.tables.blocks, cache.tables.kv_lens, place)
    )
    size = cache.store.layout.block_size
    slots = np.flatnonzero(kv_lens).tolist()
    return PoolSnapshot(
        block_size=size,
        ref_counts=np.array(refs),
        cached=np.zeros(len(refs), np.bool_) if findable is None else findable & (refs == 0),
        tables={slot: tuple(blocks[slot, : -(-kv_lens[slot] // size)].tolist()) for slot in slots},
        kv_lens={slot: int(kv_lens[slot]) for slot in slots},
        title=title,
    )
