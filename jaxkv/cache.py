"""The paged KV cache and its transitions.

Every transition is ``f(config, cache, ...) -> cache`` (or ``(cache, result)``), pure, jittable, and all or
nothing: if any row of a call cannot be served, every leaf but `status` is bit-identical to the input.
None of them does work proportional to the pool.  Callers jit and donate.

Invariants (`check_invariants` tests them on the host):
  * ref counts equal the number of table entries that name the block;
  * free and live blocks partition the pool, the free stack has no duplicates;
  * tables hold ceil(kv_len / block_size) blocks and NO_BLOCK beyond;
  * nobody writes a block with ref > 1: `reserve` copies a shared open block before it hands it out;
  * quantised formats: what has been sealed is never written again (see `open_block`);
  * with `scrub_on_free` every free block is all zero (see `scrub`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxkv import block_pool
from jaxkv import reuse as prefix_reuse
from jaxkv.access_log import tick
from jaxkv.block_pool import BlockPool, init_pool
from jaxkv.block_table import BlockTables, blocks_held, fold_entries, init_tables
from jaxkv.config import CacheConfig
from jaxkv.copy_on_write import copy_shared, shared_tails
from jaxkv.kv_store import Store, init_store
from jaxkv.open_block import (
    OpenBlocks,
    can_truncate,
    drop_open_blocks,
    fork_open_blocks,
    init_open_blocks,
    truncate_open_blocks,
)
from jaxkv.reuse import PrefixReuse
from jaxkv.scrub import scrub_freed, scrub_freed_open
from jaxkv.status import CapacityError, Status, StatusBit, TransitionError, flag, ok_status
from pallas_kernels.layout import BatchView

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "tables", "store", "status", "open_blocks", "reuse", "draft_store"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """All state of the cache, a pytree.

    `open_blocks` is None where the format has none, `reuse` unless prefixes are reused (see `admit`), `draft_store`
    unless a draft model keeps its K and V under the same block ids (see `draft_model`): every transition serves both.
    """

    pool: BlockPool
    tables: BlockTables
    store: Store
    status: Status
    open_blocks: OpenBlocks | None = None
    reuse: PrefixReuse | None = None
    draft_store: Store | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def map_stores(self, change: Callable[[Store], Store]) -> PagedKVCache:
        """Returns the cache with its store changed, and the draft model's where there is one."""
        draft = None if self.draft_store is None else change(self.draft_store)
        return dataclasses.replace(self, store=change(self.store), draft_store=draft)


def init_cache(config: CacheConfig) -> PagedKVCache:
    """Returns an empty cache of the given config."""
    return PagedKVCache(
        pool=init_pool(config.num_blocks),
        tables=init_tables(config),
        store=init_store(config),
        status=ok_status(),
        open_blocks=init_open_blocks(config),
    )


def reserve(
    config: CacheConfig, cache: PagedKVCache, seq_ids: Array, q_lens: Array, query_len: int
) -> tuple[PagedKVCache, BatchView]:
    """Gives each row room for its new tokens and says where they are.

    Takes the free slots of the open block first, then new blocks: ceil(max(0, q_len - free_slots) /
    block_size) of them.  An open block that others share is copied before it is written; k siblings that
    write into a tail with ref k cost k - 1 copies.

    Args:
      config: the cache's config.
      cache: the cache.  DONATES under the caller's jit.
      seq_ids: i32[row], slots; `config.no_seq` marks a padding row.  No slot twice.
      q_lens: i32[row], new tokens of each row, 0 <= q_len <= query_len.
      query_len: static width of the call's token array, >= 1.

    Returns:
      cache: lengths advanced by q_lens; on failure unchanged but for `status`.
      view: what the model and the kernels need; on failure all its q_lens are 0, so that a model called
        with it writes nothing.

    Status:
      OUT_OF_BLOCKS (`need_blocks` says how many), SEQ_TOO_LONG, INVALID_SEQ, DUPLICATE_SEQ, INVALID_Q_LEN.

    References:
      seeds/000 sections 2.1, 2.2 and 3.2; Kwon et al. 2023 section 4.4 (copy-on-write).
    """
    seq_ids, q_lens = check_rows(("seq_ids", seq_ids), ("q_lens", q_lens))
    if query_len < 1:
        raise ValueError(f"query_len: expected at least 1, got {query_len}")
    real, slot = slots(config, seq_ids)
    old_lens = jnp.where(real, cache.tables.kv_lens[slot], 0)
    asked = jnp.where(real, q_lens, 0)
    held = blocks_held(config, old_lens)
    num_new = blocks_held(config, old_lens + asked) - held
    tail, copies = shared_tails(config, cache, slot, old_lens, asked)
    need = jnp.sum(num_new) + jnp.sum(copies)
    reuse, shares = cache.reuse, None
    if reuse is not None:
        shares = prefix_reuse.shares_of(config, reuse, slot, jnp.where(real, num_new + copies, 0))
    room = cache.pool.num_free + prefix_reuse.num_evictable(reuse, shares)

    bits = (
        slot_bits(config, seq_ids)
        | flag(StatusBit.INVALID_Q_LEN, jnp.any((asked < 0) | (asked > query_len)))
        | flag(StatusBit.SEQ_TOO_LONG, jnp.any(old_lens > config.max_seq_len - asked))
        | flag(StatusBit.OUT_OF_BLOCKS, need > room)
    )
    asked, num_new, copies = (jnp.where(bits == 0, x, 0) for x in (asked, num_new, copies))

    width = -(-query_len // config.block_size) + 1  # a copy of the open block, then new blocks
    shortage = jnp.where(bits == 0, need - cache.pool.num_free, 0)
    most = min(width * seq_ids.shape[0], config.num_blocks)
    pool, reuse = prefix_reuse.make_room(config, cache.pool, reuse, shares, shortage, most)
    cache = scrub_freed(config, cache, pool)
    pool, ids = block_pool.take(pool, copies + num_new, width)
    reuse = prefix_reuse.begin(config, reuse, slot, ids)
    in_place = jnp.where(copies > 0, config.no_block, tail)
    reuse = prefix_reuse.forget(config, reuse, jnp.where(bits == 0, in_place, config.no_block))
    copy_to = jnp.where(copies > 0, ids[:, 0], config.no_block)
    pool = block_pool.drop(pool, jnp.where(copies > 0, tail, config.no_block))
    cache = copy_shared(config, cache, (slot, old_lens, asked), tail, copy_to)

    column = (held - copies)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    row = jnp.where(ids < config.no_block, slot[:, None], config.no_seq)
    written = jnp.where(asked > 0, slot, config.no_seq)
    tables = BlockTables(
        blocks=cache.tables.blocks.at[row, column].set(ids, mode="drop"),
        kv_lens=cache.tables.kv_lens.at[written].set(old_lens + asked, mode="drop"),
    )
    status = Status(
        bits=cache.status.bits | bits,
        need_blocks=jnp.where(bits & StatusBit.OUT_OF_BLOCKS, need, cache.status.need_blocks),
    )
    open_ids = None
    if cache.open_blocks is not None:
        open_ids = jnp.where(asked > 0, cache.open_blocks.ids[slot], config.max_seqs)
    view = _batch_view(config, tables, real, slot, asked, query_len, open_ids)
    cache = dataclasses.replace(cache, pool=pool, tables=tables, status=status, reuse=reuse)
    return cache, view


def fork(config: CacheConfig, cache: PagedKVCache, src: Array, dst: Array) -> PagedKVCache:
    """Makes slot dst[i] a second owner of everything slot src[i] holds; copies no bytes.

    All pairs read the state before the call.  A dst in use is released first; a slot may be both src and dst.
    `reorder` does it for all slots at once.

    Args:
      config: the cache's config.
      cache: the cache.  DONATES under the caller's jit.
      src, dst: i32[n]; a pair whose dst is `config.no_seq` is padding.  No dst twice.

    Returns:
      The cache; on failure unchanged but for `status`.

    Status:
      EMPTY_SLOT (a source holds nothing), INVALID_SEQ, DUPLICATE_SEQ.

    References:
      seeds/000 section 3.2.
    """
    src, dst = check_rows(("src", src), ("dst", dst))
    real, target = slots(config, dst)
    source = jnp.clip(src, 0, config.max_seqs - 1)
    source_lens = cache.tables.kv_lens[source]
    bits = (
        slot_bits(config, dst)
        | flag(StatusBit.INVALID_SEQ, jnp.any(real & (src != source)))
        | flag(StatusBit.EMPTY_SLOT, jnp.any(real & (src == source) & (source_lens == 0)))
    )
    return share_slots(config, cache, bits, jnp.where(real, source, config.no_seq), target, real)


def truncate(
    config: CacheConfig, cache: PagedKVCache, seq_ids: Array, kv_lens: Array
) -> PagedKVCache:
    """Shortens sequences to `kv_lens` tokens and returns the blocks they no longer need.

    Speculative decoding rolls back with it.  Length 0 empties the slot.  The bytes stay in place but
    nothing reads them: every read is bounded by kv_len.

    Quantised formats cannot cut a sealed block in two, since its tokens are only codes: the new length is a multiple of
    block_size, or lies in the sequence's last block (also when that has just filled).  To go back further, truncate to the
    edge of a block and run the tokens after it again, which is exact.

    Args:
      config: the cache's config.
      cache: the cache.  DONATES under the caller's jit.
      seq_ids: i32[row], slots; `config.no_seq` marks a padding row.  No slot twice.
      kv_lens: i32[row], new lengths, 0 <= kv_len <= the length now.

    Returns:
      The cache; on failure unchanged but for `status`.

    Status:
      INVALID_KV_LEN, INVALID_SEQ, DUPLICATE_SEQ; SEALED_BLOCK (a quantised block would be cut in two).
    """
    seq_ids, kv_lens = check_rows(("seq_ids", seq_ids), ("kv_lens", kv_lens))
    real, slot = slots(config, seq_ids)
    old = cache.tables
    old_lens, open_blocks = old.kv_lens[slot], cache.open_blocks
    possible = (kv_lens >= 0) & (kv_lens <= old_lens)
    bits = slot_bits(config, seq_ids) | flag(StatusBit.INVALID_KV_LEN, jnp.any(real & ~possible))
    if open_blocks is not None:
        cuts = ~can_truncate(config, open_blocks, slot, old_lens, kv_lens)
        bits |= flag(StatusBit.SEALED_BLOCK, jnp.any(real & possible & cuts))
    real &= bits == 0
    if open_blocks is not None:
        open_blocks = truncate_open_blocks(config, open_blocks, slot, old_lens, kv_lens, real)
    owned = (cache.pool, cache.reuse)
    pool, reuse, blocks = _give_back(config, owned, old, slot, blocks_held(config, kv_lens), real)
    written = jnp.where(real, slot, config.no_seq)
    tables = BlockTables(blocks=blocks, kv_lens=old.kv_lens.at[written].set(kv_lens, mode="drop"))
    emptied = jnp.where(kv_lens == 0, written, config.no_seq)
    reuse = prefix_reuse.set_namespaces(reuse, emptied, None)
    return _after(config, cache, bits, pool, tables, open_blocks, reuse)


def release(config: CacheConfig, cache: PagedKVCache, seq_mask: Array) -> PagedKVCache:
    """Ends sequences and returns their blocks; a block that others share only loses an owner.

    The work is proportional to the number of blocks released (seeds/000 section 2.3).

    Args:
      config: the cache's config.
      cache: the cache.  DONATES under the caller's jit.
      seq_mask: bool[max_seqs], True for the slots that end.

    Returns:
      The cache; on failure unchanged but for `status`.

    Status:
      DOUBLE_RELEASE (a named slot is empty).
    """
    seq_mask = jnp.asarray(seq_mask)
    if seq_mask.shape != (config.max_seqs,) or seq_mask.dtype != jnp.bool_:
        raise ValueError(
            f"seq_mask: expected bool[{config.max_seqs}], got {seq_mask.dtype}{list(seq_mask.shape)}"
        )
    old = cache.tables
    bits = flag(StatusBit.DOUBLE_RELEASE, jnp.any(seq_mask & (old.kv_lens == 0)))
    real = seq_mask & (bits == 0)
    slot = jnp.arange(config.max_seqs, dtype=jnp.int32)
    owned = (cache.pool, cache.reuse)
    pool, reuse, blocks = _give_back(config, owned, old, slot, jnp.zeros_like(slot), real)
    tables = BlockTables(blocks=blocks, kv_lens=jnp.where(real, 0, old.kv_lens))
    open_blocks = cache.open_blocks
    if open_blocks is not None:
        open_blocks = drop_open_blocks(config, open_blocks, slot, real)
    reuse = prefix_reuse.set_namespaces(reuse, jnp.where(real, slot, config.no_seq), None)
    return _after(config, cache, bits, pool, tables, open_blocks, reuse)


def clear_status(cache: PagedKVCache) -> PagedKVCache:
    """Returns the cache with no status bits set."""
    return dataclasses.replace(cache, status=ok_status())


def raise_for_status(cache: PagedKVCache) -> None:
    """Raises what the status says; a host function, it waits for the device.

    Raises:
      CapacityError: a reserve needed more blocks than were free or could be evicted; carries `need`, `free`, `cached`.
      TransitionError: a call named something that does not exist; carries the bits.
    """
    bits = StatusBit(int(cache.status.bits))
    if bits & StatusBit.OUT_OF_BLOCKS:
        need, free = int(cache.status.need_blocks), int(cache.pool.num_free)
        cached = 0 if cache.reuse is None else int(cache.reuse.num_cached)
        beside = "" if cache.reuse is None else f" and {cached} cached"
        raise CapacityError(
            f"out of blocks: a reserve needs {need}, {free} of {cache.pool.num_blocks} are free{beside}. "
            "Nothing was changed.",
            need=need,
            free=free,
            cached=cached,
        )
    if bits:
        raise TransitionError(bits)


def check_rows(*named: tuple[str, Array]) -> list[Array]:
    """Returns the row vectors as int32 after checking that they are integers of one length."""
    arrays = [(name, jnp.asarray(x)) for name, x in named]
    first_name, first = arrays[0]
    for name, x in arrays:
        if x.ndim != 1 or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name}: expected an integer vector, got {x.dtype}{list(x.shape)}")
        if x.shape != first.shape:
            raise ValueError(
                f"{name}: expected the {first.shape[0]} rows of {first_name}, got {x.shape[0]}"
            )
    return [x.astype(jnp.int32) for _, x in arrays]


def slots(config: CacheConfig, seq_ids: Array) -> tuple[Array, Array]:
    """Returns (real bool[row], slot i32[row]): whether a row names a slot, and a safe index for it."""
    real = (seq_ids >= 0) & (seq_ids < config.max_seqs)
    return real, jnp.clip(seq_ids, 0, config.max_seqs - 1)


def slot_bits(config: CacheConfig, seq_ids: Array) -> Array:
    """Returns the status bits for ids out of range and for slots named twice."""
    real, _ = slots(config, seq_ids)
    same = (seq_ids[:, None] == seq_ids[None, :]) & real[:, None]
    twice = jnp.any(jnp.sum(same, axis=1) > 1)
    return flag(StatusBit.INVALID_SEQ, jnp.any(~real & (seq_ids != config.no_seq))) | flag(
        StatusBit.DUPLICATE_SEQ, twice
    )


def share_slots(
    config: CacheConfig,
    cache: PagedKVCache,
    bits: Array,
    source: Array,
    target: Array,
    real: Array,
) -> PagedKVCache:
    """Makes each real target[row] hold what source[row] held before the call; copies no bytes.

    Args:
      config: the cache's config.
      cache: the cache.
      bits: i32[], what is wrong with the call; if anything is, only `status` changes.
      source: i32[row], slots; `config.no_seq`, or a slot that holds nothing, empties the target.
      target: i32[row], slots, none twice among the real ones.
      real: bool[row].

    Returns:
      The cache.
    """
    real &= bits == 0
    some, safe = slots(config, source)
    old = cache.tables
    lens = jnp.where(some, old.kv_lens[safe], 0)
    blocks = jnp.where(some[:, None], old.blocks[safe], config.no_block)

    def share_chunk(pool: BlockPool, _row: Array, _column: Array, ids: Array) -> BlockPool:
        return block_pool.share(pool, ids)

    first = jnp.zeros_like(target)
    shared = jnp.where(real, blocks_held(config, lens), 0)
    pool = fold_entries(config, blocks, first, shared, share_chunk, cache.pool)
    pool, reuse, kept = _give_back(config, (pool, cache.reuse), old, target, first, real)
    written = jnp.where(real, target, config.no_seq)
    tables = BlockTables(
        blocks=kept.at[written].set(blocks, mode="drop"),
        kv_lens=old.kv_lens.at[written].set(lens, mode="drop"),
    )
    open_blocks = cache.open_blocks
    if open_blocks is not None:
        open_blocks = fork_open_blocks(config, open_blocks, source, target, real)
    if cache.reuse is not None:
        namespaces = jnp.where(some[:, None], cache.reuse.namespaces[safe], 0)
        reuse = prefix_reuse.set_namespaces(reuse, written, namespaces)
    return _after(config, cache, bits, pool, tables, open_blocks, reuse)


def _after(
    config: CacheConfig,
    cache: PagedKVCache,
    bits: Array,
    pool: BlockPool,
    tables: BlockTables,
    open_blocks: OpenBlocks | None,
    reuse: PrefixReuse | None,
) -> PagedKVCache:
    """Returns the cache with its ownership replaced and the bits added; only what was freed may be scrubbed.

    REQUIRES: blocks were freed, none was taken.
    """
    status = dataclasses.replace(cache.status, bits=cache.status.bits | bits)
    cache = scrub_freed_open(config, scrub_freed(config, cache, pool), open_blocks)
    return dataclasses.replace(
        cache, pool=pool, tables=tables, status=status, open_blocks=open_blocks, reuse=reuse
    )


def _give_back(
    config: CacheConfig,
    owned: _Owned,
    tables: BlockTables,
    slot: Array,
    first: Array,
    real: Array,
) -> tuple[BlockPool, PrefixReuse | None, Array]:
    """Drops the blocks of each real row from column `first` on.

    Returns:
      The pool, the prefix state, and the tables' blocks with the dropped entries set to NO_BLOCK.
    """
    last = jnp.where(real, blocks_held(config, tables.kv_lens[slot]), 0)
    pool, reuse = owned
    if reuse is not None:
        span = jnp.max(jnp.where(last > first, last, 0), initial=0)
        reuse = dataclasses.replace(reuse, log=tick(reuse.log, span))

    def step(
        state: tuple[_Owned, Array], row: Array, column: Array, ids: Array
    ) -> tuple[_Owned, Array]:
        (pool, reuse), blocks = state
        where = jnp.append(slot, config.no_seq)[row]
        return prefix_reuse.drop(config, pool, reuse, ids, column), blocks.at[where, column].set(
            config.no_block, mode="drop"
        )

    carry = ((pool, reuse), tables.blocks)
    (pool, reuse), blocks = fold_entries(config, tables.blocks[slot], first, last, step, carry)
    return pool, reuse, blocks


_Owned = tuple[BlockPool, PrefixReuse | None]


def _batch_view(
    config: CacheConfig,
    tables: BlockTables,
    real: Array,
    slot: Array,
    q_lens: Array,
    query_len: int,
    open_ids: Array | None,
) -> BatchView:
    """Returns the rows of the tables, with positions for their new tokens."""
    kv_lens = jnp.where(real, tables.kv_lens[slot], 0)
    offset = jnp.arange(query_len, dtype=jnp.int32)[None, :]
    positions = (kv_lens - q_lens)[:, None] + offset
    return BatchView(
        block_tables=jnp.where(real[:, None], tables.blocks[slot], config.no_block),
        kv_lens=kv_lens,
        q_lens=q_lens,
        positions=jnp.where(offset < q_lens[:, None], positions, 0),
        open_ids=open_ids,
    )
