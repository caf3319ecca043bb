"""Finds the first victims of a policy at a cost that does not follow the pool.

A tree over the blocks: a node names the best victim among the `FAN` children below it, one for each lane
(tenant) of the policy, and repeats its key, so that a node's children are compared without going to the access log:
their blocks lie all over it.  The leaves are the blocks themselves, their keys stand in the log.

    level 1     w   w   w   w   w  ...      the top has at most FAN nodes
    level 0    www www www www www ...      ceil(num_blocks / FAN) nodes
    blocks     ... every block, with the lane it may be evicted from, or NO_LANE

Invariants:
  * Between calls every node holds the smallest (key, id) below it, or NO_KEY twice and NO_BLOCK.
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
      levels: from the leaves up, a row for each node and lane (row node * lanes + lane): the two words of a block's key,
        and its id or NO_BLOCK.
      sizes: i32[lane], evictable blocks of each lane.
    """

    lanes: Array
    levels: tuple[FlatRows, ...]
    sizes: Array


def init_tree(num_blocks: int, num_lanes: int) -> VictimTree:
    """Returns a tree in which nothing may be evicted."""
    levels: list[FlatRows] = []
    size = num_blocks
    while not levels or size > FAN:
        size = -(-size // FAN)
        nothing = jnp.array([NO_KEY, NO_KEY, num_blocks], jnp.int32)
        levels.append(flat_rows(size * num_lanes, nothing))
    return VictimTree(
        lanes=jnp.full(num_blocks, NO_LANE, jnp.int32),
        levels=tuple(levels),
        sizes=jnp.zeros(num_lanes, jnp.int32),
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
    wrong = jnp.any(tree.levels[-1].unpacked()[:, 2] < 0)  # no id is below 0
    return jnp.where(wrong, tree.lanes.shape[0], ids)


def first_victims(
    policy: Policy, log: AccessLog, tree: VictimTree, count: int, shares: Shares | None = None
) -> Array:
    """Returns the first `count` victims, i32[count], NO_BLOCK beyond; the cost follows count * log(pool).

    Args:
      policy, log, tree: what decides.
      count: static.
      shares: for a fair policy; its `evictable` must be the tree's sizes.
    """
    num_blocks = tree.lanes.shape[0]
    num_lanes = tree.sizes.shape[0]
    top = tree.levels[-1].num_rows // num_lanes
    nodes = jnp.broadcast_to(jnp.arange(top, dtype=jnp.int32)[:, None], (top, num_lanes))
    lane = jnp.arange(num_lanes, dtype=jnp.int32)[None, :]
    for height in reversed(range(len(tree.levels))):
        level = tree.levels[height]
        num_nodes = level.num_rows // num_lanes
        winners = level.columns(jnp.minimum(nodes, num_nodes - 1) * num_lanes + lane)
        _, _, ids = _best(_where(nodes < num_nodes, winners, num_blocks), count)
        nodes = jnp.where(ids < num_blocks, ids // FAN ** (height + 1), num_nodes)
        nodes = (nodes[:, None] * FAN + jnp.arange(FAN, dtype=jnp.int32)[None, :, None]).reshape(
            -1, num_lanes
        )
    inside = nodes < num_blocks
    leaves = jnp.where(inside, tree.lanes[jnp.minimum(nodes, num_blocks - 1)], NO_LANE)
    entries = _entries(policy, log, jnp.where(leaves == lane, nodes, num_blocks))
    first, second, ids = _best(entries, count)
    flat, first, second = (x.reshape(-1) for x in (ids, first, second))
    lanes = jnp.broadcast_to(lane, ids.shape).reshape(-1)
    chosen = choose(
        policy, Entries(flat, first, second, jnp.zeros_like(flat), lanes), num_blocks, shares
    )[:count]
    return jnp.pad(chosen, (0, count - chosen.shape[0]), constant_values=num_blocks)


def _entries(policy: Policy, log: AccessLog, ids: Array) -> Array:
    """Returns i32[3, ...], what a node holds of the blocks ids[...]: key and id."""
    num_blocks = log.score.shape[0]
    safe = jnp.minimum(ids, num_blocks - 1)
    keys = policy.key(log.last_access[safe], log.use_count[safe], log.score[safe])
    return _where(ids < num_blocks, jnp.stack([*keys, ids]), num_blocks)


def _where(real: Array, entries: Array, no_block: int) -> Array:
    """Returns the entries i32[3, ...], but of no block where not real[...]."""
    nothing = jnp.array([NO_KEY, NO_KEY, no_block], jnp.int32)
    return jnp.where(real[None], entries, nothing.reshape(3, *[1] * real.ndim))


def _best(entries: Array, count: int) -> tuple[Array, Array, Array]:
    """Returns the words, i32[<= count, lane] each, of each lane's smallest entries i32[3, n, lane]."""
    first, second, ids = jax.lax.sort(tuple(entries), dimension=0, num_keys=3)
    return first[:count], second[:count], ids[:count]


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
    child = jnp.arange(FAN, dtype=jnp.int32)[None, :]
    node = ids // FAN
    leaves = node[:, None] * FAN + child
    mine = tree.lanes[jnp.minimum(leaves, num_blocks - 1)] == lanes[:, None]
    below = _entries(policy, log, jnp.where(mine & (leaves < num_blocks), leaves, num_blocks))
    levels = []
    for height, level in enumerate(old):
        row = jnp.where(ids < num_blocks, node * num_lanes + lanes, level.num_rows)
        levels.append(level.write(row, _smallest(below)))
        if height + 1 == len(old):
            break
        node = node // FAN
        children = node[:, None] * FAN + child
        safe = jnp.minimum(children, level.num_rows // num_lanes - 1)
        below = levels[-1].columns(safe * num_lanes + jnp.maximum(lanes, 0)[:, None])
        below = _where(children < level.num_rows // num_lanes, below, num_blocks)
    return tuple(levels)


def _smallest(entries: Array) -> Array:
    """Returns i32[k, 3], the smallest entry of each row of i32[3, k, FAN]."""
    first, second, ids = entries
    least_first = jnp.min(first, axis=1, keepdims=True)
    best = first == least_first
    second = jnp.where(best, second, NO_KEY)
    least_second = jnp.min(second, axis=1, keepdims=True)
    best &= second == least_second
    least_id = jnp.min(jnp.where(best, ids, NO_KEY), axis=1, keepdims=True)
    return jnp.concatenate([least_first, least_second, least_id], axis=1)
