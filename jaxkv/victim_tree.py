"""Finds the first victims of a policy at a cost that does not follow the pool.

A tree over the blocks: a node stands for the `FAN` children below it and has the key of the best victim among them, one
for each lane (tenant) of the policy.  The keys of siblings lie together, so that they are compared without going to the
access log: their blocks lie all over it.  The leaves are the blocks themselves, their keys stand in the log.

    level 1     kkkk kkkk ..                the top has at most TOP nodes
    level 0    kkkk kkkk kkkk kkkk ...      ceil(num_blocks / FAN) nodes, FAN of them a family
    blocks     ... every block, with the lane it may be evicted from, or NO_LANE

Invariants:
  * Between calls every node holds the smallest key below it, or NO_KEYs where nothing may be evicted.
  * No key of a block begins with NO_KEY.  Ids rise from left to right, so equal keys go by their place.
  * A block's key changes only while it has no lane; `enter` and `leave` mend the path above the blocks named.
  * `first_victims` gives exactly the order of `eviction.eviction_order`: the n smallest leaves lie below the n
    smallest nodes of every level.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkv.access_log import AccessLog
from jaxkv.eviction import Entries, Policy, Shares, choose
from jaxkv.flat_rows import FlatRows, flat_rows

Array = jax.Array

FAN = 16
TOP = 256
NO_LANE = -1
NO_KEY = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["lanes", "levels", "sizes"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class VictimTree:
    """Which blocks may be evicted, and the best of them.

    Attributes:
      lanes: i32[block], the lane of an evictable block, NO_LANE of any other.
      levels: from the leaves up, a row for each family and lane (row family * lanes + lane): the first words of the keys of
        its FAN nodes, then the next words.  A family of no nodes stands at the end.
      sizes: i32[lane], evictable blocks of each lane.
    """

    lanes: Array
    levels: tuple[FlatRows, ...]
    sizes: Array


def init_tree(policy: Policy, num_blocks: int) -> VictimTree:
    """Returns a tree in which nothing may be evicted."""
    nothing = jnp.full(FAN * len(policy.key(0, 0, 0)), NO_KEY, jnp.int32)
    levels: list[FlatRows] = []
    size = num_blocks
    while not levels or size > TOP:
        size = -(-size // FAN)
        levels.append(flat_rows((-(-size // FAN) + 1) * policy.num_lanes, nothing))
    return VictimTree(
        lanes=jnp.full(num_blocks, NO_LANE, jnp.int32),
        levels=tuple(levels),
        sizes=jnp.zeros(policy.num_lanes, jnp.int32),
    )


def enter(policy: Policy, log: AccessLog, tree: VictimTree, ids: Array, lanes: Array) -> VictimTree:
    """Makes blocks evictable.  REQUIRES: none of them is, no id twice.

    Args:
      policy, log: give the keys.
      tree: the tree.
      ids: i32[k]; NO_BLOCK is skipped.
      lanes: i32[k].
    """
    ids = after_reads(tree, ids)
    sizes = tree.sizes.at[jnp.where(ids < tree.lanes.shape[0], lanes, tree.sizes.shape[0])].add(
        1, mode="drop"
    )
    placed = dataclasses.replace(
        tree, lanes=tree.lanes.at[ids].set(lanes, mode="drop"), sizes=sizes
    )
    return _mend(policy, log, placed, ids, lanes)


def leave(policy: Policy, log: AccessLog, tree: VictimTree, ids: Array) -> VictimTree:
    """Makes blocks not evictable.  REQUIRES: all of them are, no id twice; NO_BLOCK is skipped."""
    num_blocks = tree.lanes.shape[0]
    lanes = tree.lanes[jnp.minimum(ids, num_blocks - 1)]
    ids = jnp.where(jnp.any(lanes < NO_LANE), num_blocks, after_reads(tree, ids))
    counted = jnp.where(ids < num_blocks, lanes, tree.sizes.shape[0])
    taken = dataclasses.replace(
        tree,
        lanes=tree.lanes.at[ids].set(NO_LANE, mode="drop"),
        sizes=tree.sizes.at[counted].add(-1, mode="drop"),
    )
    return _mend(policy, log, taken, ids, lanes)


def after_reads(tree: VictimTree, ids: Array) -> Array:
    """Returns ids as they are, but only once every earlier step on the tree has read what it reads.

    What is written at these ids, lanes or keys in the log, is then known to come after those reads.  Without that
    order XLA would copy the whole array to keep what they need.
    """
    num_blocks = tree.lanes.shape[0]
    wrong = jnp.any(tree.levels[-1].words < NO_KEY) & jnp.any(tree.sizes > num_blocks)  # never
    return jnp.where(wrong, num_blocks, ids)


def first_victims(
    policy: Policy, log: AccessLog, tree: VictimTree, count: int, shares: Shares | None = None
) -> Array:
    """Returns the first `count` victims, i32[count], NO_BLOCK beyond; the cost follows count * log(pool).

    Args:
      policy, log, tree: what decides.
      count: static.
      shares: for a fair policy; its `evictable` must be the tree's sizes.
    """
    num_blocks, num_lanes = tree.lanes.shape[0], tree.sizes.shape[0]
    lane = jnp.arange(num_lanes, dtype=jnp.int32)[:, None]
    top = tree.levels[-1].num_rows // num_lanes - 1
    nodes = jnp.broadcast_to(jnp.arange(top, dtype=jnp.int32), (num_lanes, top))
    for level in reversed(tree.levels):
        families = jnp.minimum(nodes, level.num_rows // num_lanes - 1)
        keys = _siblings(level, families * num_lanes + lane).reshape(
            -1, num_lanes, nodes.shape[1] * FAN
        )
        (nodes,) = _at(_smallest(keys, count), _children(families))
    ids = _children(nodes)
    keys = _keys(policy, log, tree, ids, lane)
    ids, *words = _at(_smallest(keys, count), ids, *keys)
    lanes = jnp.broadcast_to(lane, ids.shape).reshape(-1)
    ids = jnp.where(words[0] < NO_KEY, ids, num_blocks).reshape(-1)
    entries = Entries(ids, tuple(word.reshape(-1) for word in words), jnp.zeros_like(ids), lanes)
    chosen = choose(policy, entries, num_blocks, shares)[:count]
    return jnp.pad(chosen, (0, count - chosen.shape[0]), constant_values=num_blocks)


def _children(nodes: Array) -> Array:
    """Returns i32[..., n * FAN], what stands below nodes i32[..., n]."""
    child = jax.lax.broadcasted_iota(jnp.int32, (*nodes.shape, FAN), nodes.ndim)
    return (nodes[..., None] * FAN + child).reshape(*nodes.shape[:-1], -1)


def _siblings(level: FlatRows, rows: Array) -> Array:
    """Returns i32[word, ..., FAN], the keys that stand in rows i32[...]."""
    return jnp.moveaxis(level.read(rows).reshape(*rows.shape, -1, FAN), -2, 0)


def _keys(policy: Policy, log: AccessLog, tree: VictimTree, ids: Array, lanes: Array) -> Array:
    """Returns i32[word, ...], the keys of blocks ids[...]; NO_KEYs of those that are not in their lanes[...]."""
    num_blocks = tree.lanes.shape[0]
    safe = jnp.minimum(ids, num_blocks - 1)
    mine = (ids < num_blocks) & (tree.lanes[safe] == lanes)
    keys = policy.key(log.last_access[safe], log.use_count[safe], log.score[safe])
    return jnp.where(mine[None], jnp.stack(keys), NO_KEY)


def _smallest(keys: Array, count: int) -> Array:
    """Returns where the smallest of keys i32[word, lane, n] stand, i32[lane, min(count, n)], rising.

    Finds the worst of them word by word: on a CPU a sort of single words costs a fraction of one with several keys.
    """
    _, num_lanes, size = keys.shape
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (num_lanes, size))
    if size <= count:
        return place
    sure, tied = jnp.zeros_like(place, jnp.bool_), jnp.ones_like(place, jnp.bool_)
    for word in keys:
        left = count - jnp.sum(sure, axis=1, keepdims=True, dtype=jnp.int32)
        ordered = jax.lax.sort(jnp.where(tied, word, NO_KEY))
        edge = jnp.take_along_axis(ordered, left - 1, axis=1)
        sure |= tied & (word < edge)
        tied &= word == edge
    order = jax.lax.sort(jnp.where(sure, place, jnp.where(tied, place + size, 2 * size)))
    return jax.lax.sort(order[:, :count] % size)


def _at(places: Array, *values: Array) -> list[Array]:
    """Returns the values i32[lane, n] at places i32[lane, k]."""
    return [jnp.take_along_axis(x, places, axis=1) for x in values]


def _mend(policy: Policy, log: AccessLog, tree: VictimTree, ids: Array, lanes: Array) -> VictimTree:
    """Recomputes the nodes above the blocks named, in their lanes; costs nothing where none is."""

    def once(state: tuple[Array, tuple[FlatRows, ...]]) -> tuple[Array, tuple[FlatRows, ...]]:
        return jnp.bool_(False), _mended(policy, log, tree, state[1], ids, lanes)

    some = jnp.any(ids < tree.lanes.shape[0])
    _, levels = jax.lax.while_loop(lambda state: state[0], once, (some, tree.levels))
    return dataclasses.replace(tree, levels=levels)


def _mended(
    policy: Policy,
    log: AccessLog,
    tree: VictimTree,
    old: tuple[FlatRows, ...],
    ids: Array,
    lanes: Array,
) -> tuple[FlatRows, ...]:
    """Returns the levels `old` as they are with the tree's lanes; other arguments as `_mend`."""
    num_blocks, num_lanes = tree.lanes.shape[0], tree.sizes.shape[0]
    node = ids // FAN
    keys = _keys(policy, log, tree, _children(node[:, None]), lanes[:, None])
    levels = []
    for level in old:
        family, place = node // FAN, node % FAN
        row = jnp.where(ids < num_blocks, family * num_lanes + lanes, level.num_rows)
        columns = jnp.concatenate([word * FAN + place for word in range(len(keys))])
        winners = jnp.concatenate(_least(keys))
        levels.append(level.set(jnp.tile(row, len(keys)), columns, winners))
        node, keys = family, _siblings(levels[-1], jnp.minimum(row, level.num_rows - 1))
    return tuple(levels)


def _least(keys: Array) -> list[Array]:
    """Returns the words, i32[k] each, of the smallest of each row of keys i32[word, k, FAN]."""
    least: list[Array] = []
    tied = jnp.ones_like(keys[0], jnp.bool_)
    for word in keys:
        least.append(jnp.min(jnp.where(tied, word, NO_KEY), axis=1))
        tied &= word == least[-1][:, None]
    return least
