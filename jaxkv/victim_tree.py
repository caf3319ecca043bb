"""Finds the first victims of a policy at a cost that does not follow the pool.

A tree over the blocks: a node names the best victim among the `FAN` children below it, one for each lane
(tenant) of the policy.  The leaves are the blocks themselves, their keys stand in the access log.

    level 1     w   w   w   w   w  ...      the top has at most FAN nodes
    level 0    www www www www www ...      ceil(num_blocks / FAN) nodes
    blocks     ... every block, with the lane it may be evicted from, or NO_LANE

Invariants:
  * Between calls every node names the smallest (key, id) below it, or NO_BLOCK.
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

Array = jax.Array

FAN = 16
NO_LANE = -1
_MAX = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["lanes", "levels", "sizes"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class VictimTree:
    """Which blocks may be evicted, and the best of them.

    Attributes:
      lanes: i32[block], the lane of an evictable block, NO_LANE of any other.
      levels: i32[node, lane] from the leaves up, ids of blocks or NO_BLOCK.
      sizes: i32[lane], evictable blocks of each lane.
    """

    lanes: Array
    levels: tuple[Array, ...]
    sizes: Array


def init_tree(num_blocks: int, num_lanes: int) -> VictimTree:
    """Returns a tree in which nothing may be evicted."""
    levels: list[Array] = []
    size = num_blocks
    while not levels or size > FAN:
        size = -(-size // FAN)
        levels.append(jnp.full((size, num_lanes), num_blocks, jnp.int32))
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
    return jnp.where(jnp.any(tree.levels[-1] < 0), tree.lanes.shape[0], ids)  # no node is below 0


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
    top = tree.levels[-1].shape[0]
    nodes = jnp.broadcast_to(jnp.arange(top, dtype=jnp.int32)[:, None], (top, num_lanes))
    lane = jnp.arange(num_lanes, dtype=jnp.int32)[None, :]
    for level in reversed(tree.levels):
        real = nodes < level.shape[0]
        winners = jnp.where(real, level[jnp.minimum(nodes, level.shape[0] - 1), lane], num_blocks)
        _, nodes = _best(policy, log, winners, nodes, count)
        nodes = (nodes[:, None] * FAN + jnp.arange(FAN, dtype=jnp.int32)[None, :, None]).reshape(
            -1, num_lanes
        )
    inside = nodes < num_blocks
    leaves = jnp.where(inside, tree.lanes[jnp.minimum(nodes, num_blocks - 1)], NO_LANE)
    ids, _ = _best(policy, log, jnp.where(leaves == lane, nodes, num_blocks), nodes, count)
    flat = ids.reshape(-1)
    first, second = _keys(policy, log, flat)
    lanes = jnp.broadcast_to(lane, ids.shape).reshape(-1)
    chosen = choose(
        policy, Entries(flat, first, second, jnp.zeros_like(flat), lanes), num_blocks, shares
    )[:count]
    return jnp.pad(chosen, (0, count - chosen.shape[0]), constant_values=num_blocks)


def _keys(policy: Policy, log: AccessLog, ids: Array) -> tuple[Array, Array]:
    """Returns the two words of the keys of blocks, the largest possible for NO_BLOCK."""
    num_blocks = log.score.shape[0]
    safe = jnp.minimum(ids, num_blocks - 1)
    first, second = policy.key(log.last_access[safe], log.use_count[safe], log.score[safe])
    real = ids < num_blocks
    return jnp.where(real, first, _MAX), jnp.where(real, second, _MAX)


def _best(
    policy: Policy, log: AccessLog, winners: Array, nodes: Array, count: int
) -> tuple[Array, Array]:
    """Returns the `count` smallest winners of each lane and their nodes, i32[<= count, lane] both."""
    first, second = _keys(policy, log, winners)
    order = jax.lax.sort((first, second, winners, nodes), dimension=0, num_keys=3)
    return order[2][:count], order[3][:count]


def _mend(policy: Policy, log: AccessLog, tree: VictimTree, ids: Array, lanes: Array) -> VictimTree:
    """Recomputes the nodes above the blocks named, in their lanes."""
    num_blocks = tree.lanes.shape[0]
    child = jnp.arange(FAN, dtype=jnp.int32)[None, :]
    node = jnp.where(ids < num_blocks, ids, num_blocks) // FAN
    node = jnp.where(ids < num_blocks, node, tree.levels[0].shape[0])
    leaves = node[:, None] * FAN + child
    mine = (leaves < num_blocks) & (
        tree.lanes[jnp.minimum(leaves, num_blocks - 1)] == lanes[:, None]
    )
    below = jnp.where(mine, leaves, num_blocks)
    levels = []
    for height, level in enumerate(tree.levels):
        winner = _smallest(policy, log, below)
        level = level.at[node, lanes].set(winner, mode="drop")
        levels.append(level)
        if height + 1 == len(tree.levels):
            break
        node = jnp.where(ids < num_blocks, node // FAN, tree.levels[height + 1].shape[0])
        children = node[:, None] * FAN + child
        real = children < level.shape[0]
        safe = jnp.minimum(children, level.shape[0] - 1)
        below = jnp.where(real, level[safe, jnp.maximum(lanes, 0)[:, None]], num_blocks)
    return dataclasses.replace(tree, levels=tuple(levels))


def _smallest(policy: Policy, log: AccessLog, ids: Array) -> Array:
    """Returns the best victim of each row of ids i32[k, FAN], NO_BLOCK where the row names none."""
    num_blocks = log.score.shape[0]
    first, second = _keys(policy, log, ids)
    best = first == jnp.min(first, axis=1, keepdims=True)
    second = jnp.where(best, second, _MAX)
    best &= second == jnp.min(second, axis=1, keepdims=True)
    return jnp.min(jnp.where(best, ids, num_blocks), axis=1)
