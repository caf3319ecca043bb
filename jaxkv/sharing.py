"""Prefix reuse as transitions of the cache: admit, register, evict.

Invariants (beside those of `cache` and `reuse`):
  * A block is findable only after `register`, which the caller calls once the tokens are written (and, with
    speculation, accepted).
  * `admit` never evicts a block it matched, and computes at least one token of every prompt.
  * Every transition is all or nothing, like those of `cache`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv import prefix
from jaxkv.access_log import tick, touch
from jaxkv.block_table import BlockTables
from jaxkv.cache import PagedKVCache, check_rows, reserve, slot_bits, slots
from jaxkv.config import CacheConfig
from jaxkv.eviction import Policy, Shares, lru
from jaxkv.reuse import (
    PrefixReuse,
    disown_again,
    drop,
    init_reuse,
    make_room,
    num_evictable,
    own,
    set_namespaces,
)
from jaxkv.scrub import scrub_freed
from jaxkv.status import Status, StatusBit, flag, ok_status
from jaxkv.victim_tree import after_reads
from pallas_kernels.layout import BatchView

Array = jax.Array


def with_prefix_reuse(
    config: CacheConfig, cache: PagedKVCache, policy: Policy = lru
) -> PagedKVCache:
    """Returns an empty cache with prefix reuse switched on."""
    return dataclasses.replace(cache, reuse=init_reuse(config, policy))


def admit(
    config: CacheConfig,
    cache: PagedKVCache,
    seq_ids: Array,
    tokens: Array,
    prompt_lens: Array,
    namespaces: Array,
    query_len: int | None = None,
) -> tuple[PagedKVCache, BatchView, Array]:
    """Starts sequences: finds what is there of their prompts, pins it, and reserves the rest, in one transition.

    Args:
      config: the cache's config.
      cache: the cache, with prefix reuse.  DONATES under the caller's jit.
      seq_ids: i32[row], empty slots; `config.no_seq` marks a padding row.  No slot twice.
      tokens: i32[row, width], prompts; what lies past their lengths is not read.
      prompt_lens: i32[row], 0 <= prompt_len <= width.
      namespaces: i32[row, 8], `Namespace.words`.
      query_len: static; at most so many tokens of each prompt are reserved now, and later calls of `reserve` take the
        others.  None reserves whole prompts.

    Returns:
      cache: on failure unchanged but for `status`.
      view: of the tokens to compute, query_len (or width) columns; the first stands at position num_hit_tokens.  On
        failure its q_lens are 0.
      num_hit_tokens: i32[row], tokens already there, a multiple of block_size and less than prompt_len.

    Status:
      SLOT_IN_USE, INVALID_TENANT, and those of `reserve`.
    """
    width = tokens.shape[1]
    slot = slots(config, check_rows(("seq_ids", seq_ids))[0])[1]
    in_use = jnp.any(slots(config, seq_ids)[0] & (cache.tables.kv_lens[slot] > 0))
    most = max(width, 1) if query_len is None else query_len
    bits = flag(StatusBit.SLOT_IN_USE, in_use)
    return _advance(config, cache, seq_ids, tokens, prompt_lens, namespaces, most, bits)


def advance(
    config: CacheConfig,
    cache: PagedKVCache,
    seq_ids: Array,
    tokens: Array,
    num_tokens: Array,
    namespaces: Array,
    query_len: int,
) -> tuple[PagedKVCache, BatchView, Array]:
    """Reserves the next chunk of sequences that start and of sequences that run, in one transition.

    A row whose slot is empty is admitted (see `admit`); any other goes on behind the kv_len tokens it holds.

    Args:
      config: the cache's config.
      cache: the cache, with prefix reuse.  DONATES under the caller's jit.
      seq_ids: i32[row], slots; `config.no_seq` marks a padding row.  No slot twice.
      tokens: i32[row, width], all tokens of each sequence so far.
      num_tokens: i32[row], how many they are, kv_len <= num_tokens <= width.
      namespaces: i32[row, 8], read for rows that start.
      query_len: static; at most so many tokens of each row.

    Returns:
      cache, view, num_hit_tokens as `admit` returns them; the view has query_len columns.

    Status:
      INVALID_TENANT, and those of `reserve`.
    """
    return _advance(config, cache, seq_ids, tokens, num_tokens, namespaces, query_len, jnp.int32(0))


def _advance(
    config: CacheConfig,
    cache: PagedKVCache,
    seq_ids: Array,
    tokens: Array,
    num_tokens: Array,
    namespaces: Array,
    query_len: int,
    bits: Array,
) -> tuple[PagedKVCache, BatchView, Array]:
    """`advance`, refused from the start if there are bits already."""
    reuse = _reuse(cache)
    seq_ids, num_tokens = check_rows(("seq_ids", seq_ids), ("prompt_lens", num_tokens))
    real, slot = slots(config, seq_ids)
    kv_lens = cache.tables.kv_lens[slot]
    starts = real & (kv_lens == 0)
    width = tokens.shape[1]
    tenants = namespaces[:, 0]
    most = reuse.policy.num_lanes if reuse.policy.num_lanes > 1 else 2**31 - 1
    bits |= (
        slot_bits(config, seq_ids)
        | flag(StatusBit.INVALID_TENANT, jnp.any(starts & ((tenants < 0) | (tenants >= most))))
        | flag(StatusBit.INVALID_Q_LEN, jnp.any(real & ((num_tokens < 0) | (num_tokens > width))))
    )
    starts &= bits == 0
    lens = jnp.where(starts, num_tokens, 0)
    ids, num_hits = prefix.match(config, reuse.index, tokens, lens, namespaces)
    # A prompt may be longer than the table; reserve refuses it, so how much of it is pinned is no matter.
    num_hits = jnp.minimum(num_hits, config.max_blocks_per_seq)
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    ids = jnp.where(column < num_hits[:, None], ids, config.no_block)

    used = jnp.where(lens > 0, slot, config.no_seq)
    pinned, revived = _pin(config, cache, reuse, used, ids, num_hits, namespaces)
    held = jnp.where(starts, num_hits * config.block_size, kv_lens)
    rest = jnp.where(real & (bits == 0), jnp.minimum(num_tokens - held, query_len), 0)
    after, view = reserve(config, pinned, seq_ids, rest, query_len)
    failed = (bits | after.status.bits) != 0
    status = Status(
        bits=cache.status.bits | bits | after.status.bits,
        need_blocks=jnp.where(
            after.status.bits & StatusBit.OUT_OF_BLOCKS,
            after.status.need_blocks,
            cache.status.need_blocks,
        ),
    )
    after = _unpin(
        config,
        after,
        jnp.where(failed, used, config.no_seq),
        jnp.where(failed, ids, config.no_block),
        jnp.where(failed, revived, config.no_block),
    )
    ids = jnp.where(failed, config.no_block, ids)
    hit_blocks = jnp.where(failed, 0, num_hits)
    reuse = _reuse(after)
    log = tick(reuse.log, jnp.max(hit_blocks, initial=0))
    depths = jnp.broadcast_to(column, ids.shape).reshape(-1)
    used = after_reads(reuse.tree, ids.reshape(-1))
    log = touch(reuse.policy, log, used, depths, 1, config.block_size)
    after = dataclasses.replace(after, reuse=dataclasses.replace(reuse, log=log), status=status)
    view = dataclasses.replace(
        view,
        block_tables=jnp.where(failed, config.no_block, view.block_tables),
        kv_lens=jnp.where(failed, 0, view.kv_lens),
    )
    return after, view, hit_blocks * config.block_size


def register(
    config: CacheConfig, cache: PagedKVCache, seq_ids: Array, tokens: Array
) -> tuple[PagedKVCache, Array]:
    """Makes the full blocks of admitted sequences findable; the first writer of a prefix keeps it.

    A block whose content is findable already is given up for the one that is there, and the table re-pointed.
    REQUIRES: every token that kv_lens counts is written and accepted, and `tokens` says which it is.

    Args:
      config: the cache's config.
      cache: the cache, with prefix reuse.  DONATES under the caller's jit.
      seq_ids: i32[row], slots; `config.no_seq` marks a padding row.  No slot twice.
      tokens: i32[row, width], all tokens of each sequence from its start; blocks past the width are left out.

    Returns:
      cache: on failure unchanged but for `status`.
      num_findable: i32[row], blocks from the start that are findable now.

    Status:
      NOT_ADMITTED (a slot was not started by `admit`), INVALID_SEQ, DUPLICATE_SEQ.
    """
    reuse = _reuse(cache)
    (seq_ids,) = check_rows(("seq_ids", seq_ids))
    real, slot = slots(config, seq_ids)
    namespaces = reuse.namespaces[slot]
    unknown = jnp.all(namespaces == 0, axis=1)
    bits = slot_bits(config, seq_ids) | flag(StatusBit.NOT_ADMITTED, jnp.any(real & unknown))
    real &= bits == 0
    width = min(tokens.shape[1] // config.block_size, config.max_blocks_per_seq)
    num_full = jnp.where(real, cache.tables.kv_lens[slot] // config.block_size, 0)
    num_full = jnp.minimum(num_full, width)
    old_ids = cache.tables.blocks[slot, :width]
    index = reuse.index
    place = index.places(old_ids)
    was_findable = place < index.num_places
    # No place is below 0: the ids are what they are, but insert writes places only once these are read.
    own_ids = jnp.where(jnp.any(place < 0), config.no_block, old_ids)
    index, ids, num_findable = prefix.insert(
        config, index, tokens[:, : width * config.block_size], num_full, namespaces, own_ids
    )
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    moved = (ids != old_ids) & (column < num_findable[:, None])

    log = tick(reuse.log, jnp.max(num_findable, initial=0))
    reuse = dataclasses.replace(reuse, index=index, log=log)
    flat = jnp.where(moved, ids, config.no_block).reshape(-1)
    pool, reuse, _ = own(config, cache.pool, reuse, flat)
    depths = jnp.broadcast_to(column, ids.shape).reshape(-1)
    uses = (~was_findable).astype(jnp.int32).reshape(-1)
    used = after_reads(reuse.tree, ids.reshape(-1))
    log = touch(reuse.policy, reuse.log, used, depths, uses, config.block_size)
    reuse = dataclasses.replace(reuse, log=log)
    given_up = jnp.where(moved, old_ids, config.no_block).reshape(-1)
    pool, after = drop(config, pool, reuse, given_up, depths)
    row = jnp.where(moved, slot[:, None], config.no_seq)
    blocks = cache.tables.blocks.at[row, column].set(ids, mode="drop")
    tables = BlockTables(blocks=blocks, kv_lens=cache.tables.kv_lens)
    status = dataclasses.replace(cache.status, bits=cache.status.bits | bits)
    cache = scrub_freed(config, cache, pool)
    cache = dataclasses.replace(cache, pool=pool, tables=tables, status=status, reuse=after)
    return cache, num_findable


def evict(
    config: CacheConfig, cache: PagedKVCache, count: Array | int
) -> tuple[PagedKVCache, Array]:
    """Frees up to `count` (i32[]) cached blocks in the policy's order; returns how many, i32[]."""
    reuse = _reuse(cache)
    none = jnp.zeros_like(reuse.usage)
    shares = Shares(reuse.usage, none, none, reuse.tree.sizes, config.num_blocks)
    count = jnp.clip(jnp.asarray(count, jnp.int32), 0, num_evictable(reuse, shares))
    pool, after = make_room(config, cache.pool, reuse, shares, count, config.num_blocks)
    cache = scrub_freed(config, cache, pool)
    return dataclasses.replace(cache, pool=pool, reuse=after), count


def _reuse(cache: PagedKVCache) -> PrefixReuse:
    if cache.reuse is None:
        raise ValueError(
            "cache: expected one with prefix reuse (see with_prefix_reuse), got one without"
        )
    return cache.reuse


def _pin(
    config: CacheConfig,
    cache: PagedKVCache,
    reuse: PrefixReuse,
    slot: Array,
    ids: Array,
    num_hits: Array,
    namespaces: Array,
) -> tuple[PagedKVCache, Array]:
    """Gives empty slots the blocks found; returns the cache with a clean status, and what was cached."""
    pool, reuse, revived = own(config, cache.pool, reuse, ids.reshape(-1))
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    tables = BlockTables(
        blocks=cache.tables.blocks.at[slot[:, None], column].set(ids, mode="drop"),
        kv_lens=cache.tables.kv_lens.at[slot].set(num_hits * config.block_size, mode="drop"),
    )
    pinned = dataclasses.replace(
        cache,
        pool=pool,
        tables=tables,
        reuse=set_namespaces(reuse, slot, namespaces),
        status=ok_status(),
    )
    return pinned, revived


def _unpin(
    config: CacheConfig, cache: PagedKVCache, slot: Array, ids: Array, revived: Array
) -> PagedKVCache:
    """Takes back what `_pin` did to the slots and blocks named, to the bit."""
    pool, reuse = disown_again(config, cache.pool, _reuse(cache), ids.reshape(-1), revived)
    tables = BlockTables(
        blocks=cache.tables.blocks.at[slot].set(config.no_block, mode="drop"),
        kv_lens=cache.tables.kv_lens.at[slot].set(0, mode="drop"),
    )
    return dataclasses.replace(
        cache, pool=pool, tables=tables, reuse=set_namespaces(reuse, slot, None)
    )
