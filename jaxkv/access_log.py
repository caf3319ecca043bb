"""Who used what, when and how often: what the eviction policies decide by.

One log covers sequences, another the blocks of a pool; the fields mean the same in both.

Invariants:
  * Stamps never go back: whatever is touched after a tick is newer than everything touched before it.
  * A block at depth d touched in a tick gets the stamp ``clock - d``, so within one tick a child is older than
    its parent, and stamps alone put children before parents.
  * A score never falls while an entry lives; `start` resets it.
  * Everything here costs the entries named, never the pool.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxkv.eviction import Policy

Array = jax.Array

TURNOVER = 1024  # units of `AccessLog.turnover` for one eviction of the whole pool
_LOWEST = -(2**31)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "last_access", "use_count", "tenant", "score", "clock", "turnover", "remainder", "inflation",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class AccessLog:
    """The history of n sequences or of n blocks.

    Attributes:
      last_access: i32[n], stamp of the last use.
      use_count: i32[n], uses since the entry began.
      tenant: i32[n], who is charged for the entry.
      score: i32[n], what a policy that ages noted at the last use.
      clock: i32[], the newest stamp.  It advances by the longest chain a call touches, so it lasts for
        2**31 block touches; a cache that lives longer must be made anew before.
      turnover: i32[], blocks evicted so far in units of 1 / 1024 of the pool; remainder: i32[], the rest.
      inflation: i32[], the highest score evicted so far.
    """

    last_access: Array
    use_count: Array
    tenant: Array
    score: Array
    clock: Array
    turnover: Array
    remainder: Array
    inflation: Array


def init_log(num_entries: int) -> AccessLog:
    """Returns a log in which nothing was ever used."""
    # Arrays of their own: one array in two leaves could not be donated.
    return AccessLog(
        last_access=jnp.zeros(num_entries, jnp.int32),
        use_count=jnp.zeros(num_entries, jnp.int32),
        tenant=jnp.zeros(num_entries, jnp.int32),
        score=jnp.full(num_entries, _LOWEST, jnp.int32),
        clock=jnp.int32(0),
        turnover=jnp.int32(0),
        remainder=jnp.int32(0),
        inflation=jnp.int32(0),
    )


def tick(log: AccessLog, span: Array) -> AccessLog:
    """Begins a call that touches chains of up to `span` (i32[]) blocks."""
    return dataclasses.replace(log, clock=log.clock + span)


def start(log: AccessLog, ids: Array, tenant: Array) -> AccessLog:
    """Begins entries anew: no uses, charged to `tenant` (i32 like ids); ids past the end are skipped."""
    return dataclasses.replace(
        log,
        last_access=log.last_access.at[ids].set(log.clock, mode="drop"),
        use_count=log.use_count.at[ids].set(0, mode="drop"),
        tenant=log.tenant.at[ids].set(tenant, mode="drop"),
        score=log.score.at[ids].set(_LOWEST, mode="drop"),
    )


def touch(
    policy: Policy,
    log: AccessLog,
    ids: Array,
    depths: Array,
    uses: Array | int,
    cost: Array | int = 1,
) -> AccessLog:
    """Notes a use of entries.  REQUIRES: `tick` with a span above every depth came before.

    Args:
      policy: computes the scores.
      log: the log.
      ids: i32[k]; ids past the end are skipped, an id named twice is used twice.
      depths: i32[k], place in the chain, 0 for its first block.
      uses: i32[] or i32[k], what to add to the use counts: 0 renews only the stamp and the score.
      cost: i32[] or i32[k], tokens to recompute if the entry is lost, per full entry 1 or more.

    Returns:
      The log.
    """
    last = log.last_access.at[ids].set(log.clock - depths, mode="drop")
    count = log.use_count.at[ids].add(uses, mode="drop")
    safe = jnp.minimum(ids, count.shape[0] - 1)
    noted = policy.score(count[safe], jnp.asarray(cost, jnp.int32), log.turnover, log.inflation)
    score = log.score.at[ids].max(noted, mode="drop")
    return dataclasses.replace(log, last_access=last, use_count=count, score=score)


def note_evicted(log: AccessLog, ids: Array) -> AccessLog:
    """Ages the log by blocks that were evicted (i32[k], ids past the end are skipped)."""
    num_entries = log.score.shape[0]
    gone = ids < num_entries
    highest = jnp.max(jnp.where(gone, log.score[jnp.minimum(ids, num_entries - 1)], _LOWEST))
    units = log.remainder + jnp.sum(gone, dtype=jnp.int32) * TURNOVER
    return dataclasses.replace(
        log,
        turnover=log.turnover + units // num_entries,
        remainder=units % num_entries,
        inflation=jnp.maximum(log.inflation, highest),
    )
