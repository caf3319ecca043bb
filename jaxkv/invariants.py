"""What must hold between any two transitions, checked on the host; tests call it after every step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxkv.block_pool import BlockPool
from jaxkv.cache import PagedKVCache
from jaxkv.config import CacheConfig
from jaxkv.prefix import WAYS
from jaxkv.reuse import PrefixReuse
from jaxkv.victim_tree import FAN, NO_KEY
from pallas_kernels.sealed import QuantisedStore


def check_invariants(config: CacheConfig, cache: PagedKVCache) -> None:
    """Checks the ownership state of a cache.

    Args:
      config: the cache's config.
      cache: a concrete cache; the function waits for the device.

    Raises:
      AssertionError: names every invariant that does not hold.
    """
    refs = np.asarray(cache.pool.ref_counts)
    num_free = int(cache.pool.num_free)
    blocks, kv_lens = np.asarray(cache.tables.blocks), np.asarray(cache.tables.kv_lens)
    broken: list[str] = []
    cached = _cached(config, cache)

    if not 0 <= num_free <= config.num_blocks:
        raise AssertionError(f"num_free {num_free} outside [0, {config.num_blocks}]")
    free = np.asarray(cache.pool.free_stack)[:num_free]
    if np.any((free < 0) | (free >= config.num_blocks)):
        broken.append(f"free stack holds ids out of range: {free}")
    elif len(np.unique(free)) != num_free:
        broken.append(f"free stack holds an id twice: {free}")
    if set(free.tolist()) != set(np.flatnonzero((refs == 0) & ~cached).tolist()):
        broken.append(f"free ids {sorted(free)} are not those with ref 0 that are not cached")

    if np.any((kv_lens < 0) | (kv_lens > config.max_seq_len)):
        broken.append(f"kv_lens {kv_lens} outside [0, {config.max_seq_len}]")
    held = -(-kv_lens // config.block_size)
    inside = np.arange(config.max_blocks_per_seq)[None, :] < held[:, None]
    if np.any(blocks[~inside] != config.no_block):
        broken.append("a table entry past a sequence's blocks is not NO_BLOCK")
    live = blocks[inside]
    if np.any((live < 0) | (live >= config.num_blocks)):
        broken.append(f"a table entry inside a sequence is out of range: {live}")
    else:
        owners = np.bincount(live, minlength=config.num_blocks)
        if not np.array_equal(owners, refs):
            wrong = np.flatnonzero(owners != refs)
            broken.append(f"blocks {wrong}: refs {refs[wrong]}, owners {owners[wrong]}")
    broken += _broken_open_blocks(config, cache)
    if cache.reuse is not None:
        broken += _broken_reuse(config, cache.reuse, refs, cached)
    if config.scrub_on_free:
        broken += _not_scrubbed(cache)
    if broken:
        raise AssertionError("; ".join(broken))


def _not_scrubbed(cache: PagedKVCache) -> list[str]:
    """Returns which free blocks hold something."""
    pools: list[tuple[str, BlockPool, Any]] = []
    for store in (cache.store, cache.draft_store):
        if cache.open_blocks is not None and isinstance(store, QuantisedStore):
            pools.append(("block", cache.pool, (store.sealed, store.wide)))
            pools.append(("open block", cache.open_blocks.pool, store.open))
        else:
            pools.append(("block", cache.pool, store))
    broken = []
    for name, pool, part in pools:
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(part)]
        for block in np.asarray(pool.free_stack)[: int(pool.num_free)].tolist():
            if any(x[:, block].tobytes().strip(b"\0") for x in arrays):
                broken.append(f"free {name} {block} is not zero")
    return broken


def _cached(config: CacheConfig, cache: PagedKVCache) -> np.ndarray:
    """Returns bool[block]: blocks without owner that are findable."""
    if cache.reuse is None:
        return np.zeros(config.num_blocks, np.bool_)
    return (np.asarray(cache.pool.ref_counts) == 0) & np.asarray(cache.reuse.index.findable)


def _broken_reuse(
    config: CacheConfig, reuse: PrefixReuse, refs: np.ndarray, cached: np.ndarray
) -> list[str]:
    """Returns what does not hold of the prefix state."""
    broken = []
    lanes, tenant = np.asarray(reuse.tree.lanes), np.asarray(reuse.log.tenant)
    lane_of = np.minimum(tenant, reuse.policy.num_lanes - 1)
    if not np.array_equal(lanes, np.where(cached, lane_of, -1)):
        broken.append("the tree's lanes are not those of the cached blocks")
    for name, mask, counts in (
        ("tree sizes", cached, reuse.tree.sizes),
        ("usage", cached | (refs > 0), reuse.usage),
    ):
        want = np.bincount(lane_of[mask], minlength=reuse.policy.num_lanes)
        if not np.array_equal(want, counts):
            broken.append(f"{name} {np.asarray(counts)}, expected {want}")
    broken += _broken_tree(config, reuse)

    table = np.asarray(reuse.index.table.unpacked())[:, :WAYS].reshape(-1)
    place = np.asarray(reuse.index.all_places)
    entered = np.full(table.size, config.no_block)
    findable = np.flatnonzero(place < table.size)
    entered[place[findable]] = findable
    if not np.array_equal(entered, table):
        broken.append("the index's table is not the inverse of the blocks' places")
    return broken


def _broken_tree(config: CacheConfig, reuse: PrefixReuse) -> list[str]:
    """Returns which nodes of the tree do not hold the best victim below them."""
    log, tree = reuse.log, reuse.tree
    words = [np.asarray(w) for w in reuse.policy.key(log.last_access, log.use_count, log.score)]
    keys = np.full((config.num_blocks, reuse.policy.num_lanes, len(words)), NO_KEY)
    cached = np.flatnonzero(np.asarray(tree.lanes) >= 0)
    keys[cached, np.asarray(tree.lanes)[cached]] = np.stack(words, axis=1)[cached]
    below = [[tuple(key) for key in node] for node in keys.tolist()]
    broken = []
    for height, level in enumerate(tree.levels):
        groups = [below[at : at + FAN] for at in range(0, len(below), FAN)]
        below = [[min(lane) for lane in zip(*group, strict=True)] for group in groups]
        rows = np.asarray(level.unpacked()).reshape(-1, reuse.policy.num_lanes, len(words), FAN)
        found = rows.transpose(0, 3, 1, 2).reshape(-1, reuse.policy.num_lanes, len(words))
        want = np.full(found.shape, NO_KEY)
        want[: len(below)] = below
        if not np.array_equal(want, found):
            broken.append(f"level {height} of the tree is {found}, expected {want}")
    return broken


def _broken_open_blocks(config: CacheConfig, cache: PagedKVCache) -> list[str]:
    """Returns what does not hold of the open blocks (see `open_block`)."""
    if cache.open_blocks is None:
        return ["no open blocks in a quantised cache"] if config.is_quantised else []
    pool, ids = cache.open_blocks.pool, np.asarray(cache.open_blocks.ids)
    kv_lens, none = np.asarray(cache.tables.kv_lens), config.max_seqs
    refs, free = np.asarray(pool.ref_counts), np.asarray(pool.free_stack)[: int(pool.num_free)]
    broken = []
    if np.any((ids < 0) | (ids > none)):
        broken.append(f"open blocks {ids} outside [0, {none}]")
    elif not np.array_equal(np.bincount(ids, minlength=none + 1)[:none], refs):
        broken.append(f"open blocks: refs {refs}, owners of {ids}")
    if sorted(free.tolist()) != np.flatnonzero(refs == 0).tolist():
        broken.append(f"free open blocks {sorted(free)} are not those with ref 0")
    if np.any((kv_lens % config.block_size != 0) & (ids == none)):
        broken.append(f"a sequence with unsealed tokens has no open block: {kv_lens}, {ids}")
    if np.any((kv_lens == 0) & (ids != none)):
        broken.append("an empty slot has an open block")
    return broken
