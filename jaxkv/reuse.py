"""What a cache keeps beside its ownership when prefixes are reused, and how transitions move blocks through it.

    free  --take-->  live  --last owner gone-->  cached (if findable)  --evict-->  free
                      ^                            |
                      +---------- admit -----------+

Invariants:
  * free, cached and live blocks partition the pool: a cached block has no owner and is findable.
  * The tree holds exactly the cached blocks, in the lane of the tenant they are charged to.
  * usage sums to the blocks that are not free.
  * A slot that holds nothing has the namespace 0, which no digest equals; so has one that was not admitted.
  * With `reuse` None every function here does what the cache did without it, in the same program.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkv import block_pool, prefix
from jaxkv.access_log import AccessLog, init_log, note_evicted, start, touch
from jaxkv.block_pool import BlockPool
from jaxkv.config import CacheConfig
from jaxkv.eviction import Policy, Shares, num_allowed
from jaxkv.namespace import NUM_WORDS
from jaxkv.prefix import PrefixIndex, init_index
from jaxkv.victim_tree import VictimTree, after_reads, enter, first_victims, init_tree, leave

Array = jax.Array

_BATCH = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["index", "log", "tree", "usage", "namespaces"],
    meta_fields=["policy"],
)
@dataclasses.dataclass(frozen=True)
class PrefixReuse:
    """Optional state of a cache, a pytree.

    Attributes:
      index: which blocks are findable.
      log: of blocks.
      tree: of cached blocks.
      usage: i32[lane], live and cached blocks charged to each tenant; one lane unless the policy is fair.
      namespaces: i32[seq, 8], what each admitted slot may share with.
      policy: static.
    """

    index: PrefixIndex
    log: AccessLog
    tree: VictimTree
    usage: Array
    namespaces: Array
    policy: Policy

    @property
    def num_cached(self) -> Array:
        """i32[], blocks without owner that are findable."""
        return jnp.sum(self.tree.sizes)


def init_reuse(config: CacheConfig, policy: Policy) -> PrefixReuse:
    """Returns the state of a cache in which nothing is findable."""
    return PrefixReuse(
        index=init_index(config),
        log=init_log(config.num_blocks),
        tree=init_tree(policy, config.num_blocks),
        usage=jnp.zeros(policy.num_lanes, jnp.int32),
        namespaces=jnp.zeros((config.max_seqs, NUM_WORDS), jnp.int32),
        policy=policy,
    )


def shares_of(config: CacheConfig, reuse: PrefixReuse, slot: Array, wanted: Array) -> Shares:
    """Returns what a call that takes wanted[row] blocks for slot[row] (i32 both) means for the tenants."""
    demand = jnp.zeros_like(reuse.usage).at[_lane(reuse, reuse.namespaces[slot, 0])].add(wanted)
    return Shares(reuse.usage, demand, demand, reuse.tree.sizes, config.num_blocks)


def num_evictable(reuse: PrefixReuse | None, shares: Shares | None) -> Array:
    """Returns i32[], how many blocks the policy would give up for a call."""
    if reuse is None or shares is None:
        return jnp.int32(0)
    return num_allowed(reuse.policy, shares)


def make_room(
    config: CacheConfig,
    pool: BlockPool,
    reuse: PrefixReuse | None,
    shares: Shares | None,
    shortage: Array,
    most: int,
) -> tuple[BlockPool, PrefixReuse | None]:
    """Evicts `shortage` (i32[]) blocks in the policy's order, in batches; none if it is not positive.

    REQUIRES: shortage <= num_evictable.  `most`, static, bounds the shortage: batches are no larger.
    """
    if reuse is None or shares is None:
        return pool, reuse
    size = max(1, min(_BATCH, most))
    place = jnp.arange(size, dtype=jnp.int32)

    def batch(state: _Room) -> _Room:
        pool, reuse, allowance, left = state
        now = Shares(reuse.usage, shares.demand, allowance, reuse.tree.sizes, config.num_blocks)
        victims = first_victims(reuse.policy, reuse.log, reuse.tree, size, now)
        victims = jnp.where(place < left, victims, config.no_block)
        before = reuse.usage
        pool, reuse = evict_blocks(config, pool, reuse, victims)
        return pool, reuse, allowance - (before - reuse.usage), left - size

    state = (pool, reuse, shares.allowance, shortage)
    pool, reuse, _, _ = jax.lax.while_loop(lambda state: state[3] > 0, batch, state)
    return pool, reuse


_Room = tuple[BlockPool, PrefixReuse, Array, Array]


def evict_blocks(
    config: CacheConfig, pool: BlockPool, reuse: PrefixReuse, ids: Array
) -> tuple[BlockPool, PrefixReuse]:
    """Makes cached blocks (i32[k], NO_BLOCK is skipped, none twice) free and unfindable."""
    log = note_evicted(reuse.log, ids)
    reuse = dataclasses.replace(
        reuse,
        index=prefix.remove(config, reuse.index, ids),
        log=log,
        tree=leave(reuse.policy, log, reuse.tree, ids),
        usage=_charge(config, reuse, ids, -1),
    )
    return block_pool.push(pool, ids), reuse


def begin(
    config: CacheConfig, reuse: PrefixReuse | None, slot: Array, ids: Array
) -> PrefixReuse | None:
    """Charges blocks just taken, i32[row, column] with NO_BLOCK beyond, to the tenants of their rows' slots."""
    if reuse is None:
        return None
    tenant = jnp.broadcast_to(reuse.namespaces[slot, 0][:, None], ids.shape).reshape(-1)
    flat = after_reads(reuse.tree, ids.reshape(-1))
    reuse = dataclasses.replace(reuse, log=start(reuse.log, flat, tenant))
    return dataclasses.replace(reuse, usage=_charge(config, reuse, flat, 1))


def drop(
    config: CacheConfig, pool: BlockPool, reuse: PrefixReuse | None, ids: Array, depths: Array
) -> tuple[BlockPool, PrefixReuse | None]:
    """Takes one owner from each id (i32[n], repeats count); what has none left becomes cached, or free.

    REQUIRES: `tick` with a span above every depth came before.
    """
    if reuse is None:
        return block_pool.drop(pool, ids), None
    pool, last = block_pool.disown(pool, ids)
    findable = _findable(reuse, ids)
    freed = jnp.where(last & ~findable, ids, config.no_block)
    kept = jnp.where(last & findable, ids, config.no_block)
    kept = after_reads(reuse.tree, kept)
    log = touch(reuse.policy, reuse.log, kept, depths, 0, config.block_size)
    lanes = _lane(reuse, log.tenant[jnp.minimum(kept, config.num_blocks - 1)])
    reuse = dataclasses.replace(
        reuse,
        log=log,
        tree=enter(reuse.policy, log, reuse.tree, kept, lanes),
        usage=_charge(config, reuse, freed, -1),
    )
    return block_pool.push(pool, freed), reuse


def own(
    config: CacheConfig, pool: BlockPool, reuse: PrefixReuse, ids: Array
) -> tuple[BlockPool, PrefixReuse, Array]:
    """Adds one owner to findable blocks (i32[n], repeats count, NO_BLOCK is skipped).

    Returns:
      The pool, the state, and i32[n] the blocks that were cached, each once, NO_BLOCK elsewhere.
    """
    safe = jnp.minimum(ids, config.num_blocks - 1)
    cached = (ids < config.no_block) & (reuse.tree.lanes[safe] >= 0)
    revived = jnp.where(cached & first_of_each(ids), ids, config.no_block)
    tree = leave(reuse.policy, reuse.log, reuse.tree, revived)
    return block_pool.share(pool, ids), dataclasses.replace(reuse, tree=tree), revived


def disown_again(
    config: CacheConfig, pool: BlockPool, reuse: PrefixReuse, ids: Array, revived: Array
) -> tuple[BlockPool, PrefixReuse]:
    """Takes back what `own` did, to the bit."""
    pool = dataclasses.replace(pool, ref_counts=pool.ref_counts.at[ids].add(-1, mode="drop"))
    lanes = _lane(reuse, reuse.log.tenant[jnp.minimum(revived, config.num_blocks - 1)])
    tree = enter(reuse.policy, reuse.log, reuse.tree, revived, lanes)
    return pool, dataclasses.replace(reuse, tree=tree)


def forget(config: CacheConfig, reuse: PrefixReuse | None, ids: Array) -> PrefixReuse | None:
    """Makes live blocks unfindable because their owner is about to write into them."""
    if reuse is None:
        return None
    return dataclasses.replace(reuse, index=prefix.remove(config, reuse.index, ids))


def set_namespaces(
    reuse: PrefixReuse | None, slot: Array, namespaces: Array | None
) -> PrefixReuse | None:
    """Gives slots (i32[row], max_seqs is skipped) namespaces i32[row, 8]; None clears them."""
    if reuse is None:
        return None
    words = 0 if namespaces is None else namespaces
    return dataclasses.replace(reuse, namespaces=reuse.namespaces.at[slot].set(words, mode="drop"))


def first_of_each(ids: Array) -> Array:
    """Returns bool[n]: whether a place is the first that names its id; the cost follows n log n."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    new = jnp.append(jnp.array([True]), ordered[1:] != ordered[:-1])[: ids.shape[0]]
    return jnp.zeros_like(new).at[order].set(new)


def _lane(reuse: PrefixReuse, tenant: Array) -> Array:
    """Returns the lane a tenant is charged in."""
    return jnp.minimum(tenant, reuse.policy.num_lanes - 1)


def _findable(reuse: PrefixReuse, ids: Array) -> Array:
    return reuse.index.places(ids) < reuse.index.num_places


def _charge(config: CacheConfig, reuse: PrefixReuse, ids: Array, amount: int) -> Array:
    """Returns the usage after blocks (i32[k], NO_BLOCK is skipped) were added or taken."""
    safe = jnp.minimum(ids, config.num_blocks - 1)
    lane = jnp.where(ids < config.no_block, _lane(reuse, reuse.log.tenant[safe]), len(reuse.usage))
    return reuse.usage.at[lane].add(amount, mode="drop")
