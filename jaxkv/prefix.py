"""Finds blocks that already hold the K and V of a prompt's beginning.

The index lives on the device.  A block is findable under a key: its tokens, the block before it, and the
namespace.  A set-associative table leads from a hash of the whole prefix to a few candidates:

    table    a row a set      ids of blocks, NO_BLOCK where the way is empty; then their hashes, a filter
    records  a row a block    what it holds, what it stands behind, and where the table has it

What is read together lies together: every array of the pool that a lookup touches costs a kernel, and a miss, of its own.

Invariants:
  * A hit is exact: tokens, namespace, parent and the parent's generation are all compared.  The hash decides
    where to look and nothing else; if all prefixes collided, answers would be the same.
  * Removing a block raises its generation, so neither it nor what was registered behind it is found under
    another owner's content.
  * Equal prefixes are findable at one block each: `insert` gives later writers the block that is there.
  * A set that is full refuses the insertion: the block, and what would follow it, is not findable.
  * Costs follow the blocks of the prompts, never the pool.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config import CacheConfig
from jaxkv.flat_rows import FlatRows, flat_rows
from jaxkv.namespace import NUM_WORDS

Array = jax.Array

WAYS = 8
_PARENT, _PARENT_GENERATION, _GENERATION, _PLACE = range(-4, 0)  # the last words of a record
_STEP = 0x9E3779B1  # odd, so powers of it have inverses modulo 2**32


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["records", "table"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class PrefixIndex:
    """What every findable block holds, and where to look for it.

    Attributes:
      records: a row a block, of block_size + 12 words: the block's tokens; its namespace; its parent, the block before
        it (NO_BLOCK for a first block); the parent's generation when the block was inserted (0 for a first block); its
        own generation, how often it has been removed from the index; its place, set * WAYS + way, or `num_places` for
        a block that is not findable.
      table: a row a set, ids[way] and tags[way] (the bits of a u32).
    """

    records: FlatRows
    table: FlatRows

    @property
    def num_places(self) -> int:
        """Ways of all sets; static."""
        return self.table.num_rows * WAYS

    def places(self, ids: Array) -> Array:
        """Returns i32[...], the places of blocks i32[...]; `num_places` for NO_BLOCK."""
        return _links(self, ids).place

    @property
    def all_places(self) -> Array:
        """i32[block], the places of all blocks."""
        return self.records.unpacked()[:, _PLACE]

    @property
    def findable(self) -> Array:
        """bool[block]."""
        return self.all_places < self.num_places


def init_index(config: CacheConfig) -> PrefixIndex:
    """Returns an index in which nothing is findable.

    With all blocks findable a set of 8 ways holds 2 on average at most; one insertion in some thousands is
    refused.

    Raises:
      ValueError: the pool has more blocks than 32 bits can address records of.
    """
    num_sets = 1 << max(0, (config.num_blocks - 1) // 2).bit_length()
    record = jnp.zeros(config.block_size + NUM_WORDS + 4, jnp.int32).at[_PLACE].set(num_sets * WAYS)
    empty = jnp.repeat(jnp.array([config.no_block, 0], jnp.int32), WAYS)
    return PrefixIndex(flat_rows(config.num_blocks, record), flat_rows(num_sets, empty))


def match(
    config: CacheConfig, index: PrefixIndex, tokens: Array, prompt_lens: Array, namespaces: Array
) -> tuple[Array, Array]:
    """Finds the longest findable prefix of each prompt, but always leaves a token to compute.

    Args:
      config: the cache's config.
      index: the index.
      tokens: i32[row, width]; what lies past a prompt's length is not read.
      prompt_lens: i32[row].
      namespaces: i32[row, 8], `Namespace.words`.

    Returns:
      ids i32[row, width // block_size], NO_BLOCK from num_hits on; num_hits i32[row], at most
      floor((prompt_len - 1) / block_size).
    """
    _check(config, tokens, namespaces)
    return lookup(
        config, index, tokens, jnp.maximum(prompt_lens - 1, 0) // config.block_size, namespaces
    )


def lookup(
    config: CacheConfig, index: PrefixIndex, tokens: Array, limits: Array, namespaces: Array
) -> tuple[Array, Array]:
    """Like `match`, for up to `limits` (i32[row]) blocks of each row."""
    num_rows, width = tokens.shape[0], tokens.shape[1] // config.block_size
    limits = jnp.minimum(limits, width)
    blocks, tags, sets = _addresses(config, index, tokens, namespaces)
    found = index.table.read(sets)
    ways, same_tag = found[..., :WAYS], found[..., WAYS:] == tags[..., None]
    wanted = jnp.arange(width, dtype=jnp.int32)[None, :] < limits[:, None]
    asked = (ways < config.no_block) & same_tag & wanted[..., None]
    same = _same_content(config, index, ways, asked, blocks, namespaces)
    links = _links(index, jnp.where(same, ways, config.no_block))

    def extend(state: _Chain) -> _Chain:
        column, ids, parent, generation, alive = state
        here = jax.tree.map(lambda x: x[:, column], links)
        linked = same[:, column] & _is_child(here, parent, generation)
        found = alive & jnp.any(linked, axis=1)
        way = jnp.argmax(linked, axis=1)
        parent = jnp.where(found, ways[row, column, way], config.no_block)
        ids = ids.at[:, column].set(parent)
        return column + 1, ids, parent, here.generation[row, way], found

    row = jnp.arange(num_rows, dtype=jnp.int32)
    none = jnp.full(num_rows, config.no_block, jnp.int32)
    ids = jnp.full((num_rows, width), config.no_block, jnp.int32)
    state = (jnp.int32(0), ids, none, jnp.zeros_like(none), limits > 0)

    def more(state: _Chain) -> Array:
        return (state[0] < width) & jnp.any(state[-1])

    ids = jax.lax.while_loop(more, extend, state)[1]
    return ids, jnp.sum(ids < config.no_block, axis=1, dtype=jnp.int32)


_Chain = tuple[Array, Array, Array, Array, Array]


def insert(
    config: CacheConfig,
    index: PrefixIndex,
    tokens: Array,
    num_full: Array,
    namespaces: Array,
    own_ids: Array,
) -> tuple[PrefixIndex, Array, Array]:
    """Makes full, written blocks findable, and finds for each the block that holds the same already.

    REQUIRES: every own block before a new one in its row holds what tokens say, and no block is named by two
    rows unless the rows agree on everything up to it.

    Args:
      config: the cache's config.
      index: the index.
      tokens: i32[row, width], everything the sequence holds.
      num_full: i32[row], full blocks of the row to insert, from the first on.
      namespaces: i32[row, 8].
      own_ids: i32[row, width // block_size], the blocks of each row.

    Returns:
      index: with the new blocks in it.
      ids: i32[row, width // block_size], the block findable for each of the row's blocks: its own or an equal
        one; NO_BLOCK from `num_findable` on.
      num_findable: i32[row], less than num_full where a set was full.
    """
    _check(config, tokens, namespaces)
    num_rows, width = own_ids.shape
    num_full = jnp.minimum(num_full, width)
    ids, column = lookup(config, index, tokens, num_full, namespaces)
    blocks, tags, sets = _addresses(config, index, tokens, namespaces)
    row = jnp.arange(num_rows)

    def step(state: _Insertion) -> _Insertion:
        index, ids, column, todo = state
        at = jnp.minimum(column, width - 1)
        parent = jnp.where(column > 0, ids[row, jnp.maximum(column - 1, 0)], config.no_block)
        own, tag, home = own_ids[row, at], tags[row, at], sets[row, at]
        found = index.table.read(home)
        ways, same_tag = found[:, :WAYS], found[:, WAYS:] == tag[:, None]
        asked = (ways < config.no_block) & same_tag & todo[:, None]
        same = _same_content(
            config, index, ways[:, None], asked[:, None], blocks[row, at][:, None], namespaces
        )[:, 0]
        candidates = jnp.where(same, ways, config.no_block)
        links = _links(index, jnp.concatenate([candidates, parent[:, None], own[:, None]], axis=1))
        generation = links.generation[:, WAYS]
        same &= _is_child(jax.tree.map(lambda x: x[:, :WAYS], links), parent, generation)
        there = jnp.any(same, axis=1)
        found = ways[row, jnp.argmax(same, axis=1)]
        # Of the rows that would write into one set, the first does; the others look again.
        rival = (home[:, None] == home[None, :]) & (todo & ~there)[None, :]
        first = todo & ~there & ~jnp.any(jnp.tril(rival, k=-1), axis=1)
        empty = ways == config.no_block
        room = jnp.any(empty, axis=1)
        writes = first & room
        index = _enter(
            index,
            jnp.where(writes, own, config.no_block),
            jax.tree.map(lambda x: x[:, WAYS + 1], links),
            home * WAYS + jnp.argmax(empty, axis=1),
            tag,
            jnp.concatenate(
                [blocks[row, at], namespaces, jnp.stack([parent, generation], axis=1)], axis=1
            ),
        )
        here = (todo & there) | writes
        target = jnp.where(here, at, width)
        ids = ids.at[row, target].set(jnp.where(there, found, own), mode="drop")
        column = column + here
        return index, ids, column, todo & (column < num_full) & ~(first & ~room)

    state = (index, ids, column, column < num_full)
    index, ids, column, _ = jax.lax.while_loop(lambda state: jnp.any(state[3]), step, state)
    return index, ids, column


_Insertion = tuple[PrefixIndex, Array, Array, Array]


def remove(config: CacheConfig, index: PrefixIndex, ids: Array) -> PrefixIndex:
    """Makes blocks unfindable; ids i32[k], NO_BLOCK and blocks that are not findable are skipped, none twice."""
    links = _links(index, ids)
    gone = jnp.where(links.place < index.num_places, ids, config.no_block)
    tail = jnp.stack([links.generation + 1, jnp.full_like(ids, index.num_places)], axis=1)
    nobody = jnp.full_like(ids, config.no_block)
    return PrefixIndex(
        records=index.records.write(gone, tail, _GENERATION),
        table=index.table.set(links.place // WAYS, links.place % WAYS, nobody),
    )


def _enter(
    index: PrefixIndex, ids: Array, links: _Links, place: Array, tags: Array, content: Array
) -> PrefixIndex:
    """Enters blocks at free places of the table; one that is findable as something else leaves its old place.

    Args:
      index: the index.
      ids: i32[k]; NO_BLOCK is skipped.
      links: of the blocks, as they are.
      place, tags: i32[k].
      content: i32[k, block_size + 10], a record up to the parent's generation.
    """
    none, nowhere = index.records.num_rows, index.num_places
    moves = (links.place < nowhere).astype(jnp.int32)
    tail = jnp.stack([links.generation + moves, place], axis=1)
    place = jnp.where(ids < none, place, nowhere)
    old = jnp.where(ids < none, links.place, nowhere)
    rows = jnp.concatenate([place, place, old]) // WAYS
    columns = jnp.concatenate([place % WAYS, WAYS + place % WAYS, old % WAYS])
    table = index.table.set(rows, columns, jnp.concatenate([ids, tags, jnp.full_like(ids, none)]))
    records = index.records.write(ids, jnp.concatenate([content, tail], axis=1))
    return PrefixIndex(records, table)


class _Links(NamedTuple):
    """The last words of records, i32[...] each; of NO_BLOCK 0, and `num_places` for the place."""

    parent: Array
    parent_generation: Array
    generation: Array
    place: Array


def _links(index: PrefixIndex, ids: Array) -> _Links:
    """Reads the links of blocks i32[...]."""
    real = ids < index.records.num_rows
    words = index.records.columns(jnp.where(real, ids, 0), _PARENT)
    nothing = (0, 0, 0, index.num_places)
    return _Links(*(jnp.where(real, x, none) for x, none in zip(words, nothing, strict=True)))


def _is_child(links: _Links, parent: Array, generation: Array) -> Array:
    """Returns which of the blocks links[row, way] were inserted behind `parent` (i32[row]) as it is in that generation."""
    same = links.parent == parent[:, None]
    return same & (links.parent_generation == generation[:, None])


def _same_content(
    config: CacheConfig,
    index: PrefixIndex,
    ways: Array,
    asked: Array,
    blocks: Array,
    namespaces: Array,
) -> Array:
    """Returns which of the asked candidates hold the given tokens in the given namespace.

    Works on one candidate of every place at a time: more than one is asked only where hashes collide.

    Args:
      ways, asked: i32 and bool[row, column, way].
      blocks: i32[row, column, block_size].
      namespaces: i32[row, 8].
    """
    way = jnp.arange(ways.shape[-1])[None, None, :]
    spread = jnp.broadcast_to(namespaces[:, None], (*blocks.shape[:2], NUM_WORDS))
    content = jnp.concatenate([blocks, spread], axis=-1)

    def compare(state: tuple[Array, Array]) -> tuple[Array, Array]:
        asked, same = state
        pick = jnp.argmax(asked, axis=-1)
        ids = jnp.take_along_axis(ways, pick[..., None], axis=-1)[..., 0]
        ids = jnp.minimum(ids, config.num_blocks - 1)
        equal = jnp.all(index.records.read(ids, 0, content.shape[-1]) == content, axis=-1)
        picked = way == pick[..., None]
        return asked & ~picked, same | (picked & asked & equal[..., None])

    state = (asked, jnp.zeros_like(asked))
    return jax.lax.while_loop(lambda state: jnp.any(state[0]), compare, state)[1]


def _addresses(
    config: CacheConfig, index: PrefixIndex, tokens: Array, namespaces: Array
) -> tuple[Array, Array, Array]:
    """Returns the full blocks of each row, the hash (its bits as i32) of each prefix that ends with one, and its set."""
    num_rows, width = tokens.shape[0], tokens.shape[1] // config.block_size
    blocks = tokens[:, : width * config.block_size].reshape(num_rows, width, config.block_size)
    tags = jax.lax.bitcast_convert_type(_hash_prefixes(blocks, namespaces), jnp.int32)
    return blocks, tags, tags & (index.table.num_rows - 1)


def _hash_prefixes(blocks: Array, namespaces: Array) -> Array:
    """Returns u32[row, column] hashes of the namespace and all blocks up to each column.

    A prefix's hash is a polynomial in _STEP over its blocks' hashes, as one prefix sum: the coefficient of
    block j is _STEP**j, and powers of an odd number have inverses.
    """
    width = blocks.shape[1]
    of_block = _mix(_fold(blocks.astype(jnp.uint32)))
    powers = np.array([pow(_STEP, j, 2**32) for j in range(width)], np.uint32)
    inverse = np.array([pow(_STEP, -j, 2**32) for j in range(width)], np.uint32)
    chain = jnp.cumsum(of_block * powers[None, :], axis=1, dtype=jnp.uint32) * inverse[None, :]
    return _mix(chain ^ _fold(namespaces.astype(jnp.uint32))[:, None])


def _fold(words: Array) -> Array:
    """Returns a u32 of each last axis, every place with a factor of its own."""
    factors = np.array([pow(_STEP, 3 * j + 1, 2**32) for j in range(words.shape[-1])], np.uint32)
    mixed = _mix(words + factors.reshape((1,) * (words.ndim - 1) + (-1,)))
    return jnp.sum(
        mixed * factors.reshape((1,) * (words.ndim - 1) + (-1,)), axis=-1, dtype=jnp.uint32
    )


def _mix(x: Array) -> Array:
    """Spreads every bit of a u32 over the word; one to one."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _check(config: CacheConfig, tokens: Array, namespaces: Array) -> None:
    if tokens.ndim != 2 or tokens.dtype != jnp.int32:
        raise ValueError(
            f"tokens: expected i32[row, width], got {tokens.dtype}{list(tokens.shape)}"
        )
    if namespaces.shape != (tokens.shape[0], NUM_WORDS) or namespaces.dtype != jnp.int32:
        raise ValueError(
            f"namespaces: expected int32[{tokens.shape[0]}, {NUM_WORDS}], "
            f"got {namespaces.dtype}{list(namespaces.shape)}"
        )
