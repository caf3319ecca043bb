"""Which blocks (or sequences) to give up first: policies as pure functions on arrays.

Invariants:
  * A policy orders by (key, -depth, id), smallest first; keys of a chain never rise with depth, so children go
    before their parents.
  * All arithmetic is on integers: NumPy and every device choose the same victims.
  * `eviction_order` is the definition and sorts everything.  `victim_tree` finds the same victims at a cost
    that does not follow the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.access_log import TURNOVER, AccessLog

Array = jax.Array

_LOG_BITS = 8
_LOG_LIMIT = 2**22
_MAX = 2**31 - 1


def log2_fixed(x: Any) -> Any:
    """Returns 256 * log2(x) of integers x >= 1, linear between powers of two, constant from 2**22 on.

    Works on NumPy and JAX arrays and on Python integers alike.
    """
    x = x - (x - _LOG_LIMIT + 1) * (x >= _LOG_LIMIT)
    whole = sum((x >= 2**bit) * 1 for bit in range(1, 22))
    return (whole << _LOG_BITS) + ((x << _LOG_BITS) >> whole) - (1 << _LOG_BITS)


@dataclasses.dataclass(frozen=True)
class Policy:
    """An eviction policy.  Calling it gives an order; `score` is what it notes at each use."""

    @property
    def num_lanes(self) -> int:
        """Groups among which the policy chooses before it looks at keys: tenants, or 1."""
        return 1

    def key(self, last_access: Any, use_count: Any, score: Any) -> tuple[Any, ...]:
        """Returns the words that order entries, most significant first; the first is below 2**31 - 1."""
        raise NotImplementedError(f"{type(self).__name__}: expected a subclass that defines key")

    def score(self, use_count: Any, cost: Any, turnover: Any, inflation: Any) -> Any:
        """Returns what to note at a use; policies that do not age note 0.

        Args:
          use_count, cost: uses with this one, and tokens to recompute; any integer shape.
          turnover, inflation: see `AccessLog`.
        """
        del cost, turnover, inflation
        return use_count * 0

    def __call__(
        self,
        log: AccessLog,
        candidates: Array,
        count: int,
        depths: Array | None = None,
        **fair: Any,
    ) -> Array:
        """Returns the first `count` victims, i32[count], n (NO_BLOCK) where there are no more.

        Args:
          log: of n sequences or blocks.
          candidates: bool[n], what may be evicted.
          count: static.
          depths: i32[n], places in the chain; None for sequences.
          **fair: see `Fair`.
        """
        return eviction_order(self, log, candidates, count, depths, **fair)


class Lru(Policy):
    """Least recently used first: argmin last_access (seeds/000 section 5.1)."""

    def key(self, last_access: Any, use_count: Any, score: Any) -> tuple[Any, ...]:
        return (last_access,)


class Lfu(Policy):
    """Least often used first, then least recently: argmin (use_count, last_access) (seeds/000 section 5.2)."""

    def key(self, last_access: Any, use_count: Any, score: Any) -> tuple[Any, ...]:
        return use_count, last_access


class AgedLfu(Policy):
    """LFU whose counts start from the highest score evicted so far, so that old fame fades.

    References:
      Arlitt et al. 2000, "Evaluating content management techniques for Web proxy caches" (LFU with dynamic
      aging).
    """

    def key(self, last_access: Any, use_count: Any, score: Any) -> tuple[Any, ...]:
        return score, last_access

    def score(self, use_count: Any, cost: Any, turnover: Any, inflation: Any) -> Any:
        return inflation + use_count


@dataclasses.dataclass(frozen=True)
class CostAware(Policy):
    """Recency with credit for what losing the block would cost, per byte of the pool.

    An entry is kept as if it had been used ``credit * log2(use_count * cost / full_cost)`` turnovers of the pool
    later than it was: each doubling of the expected recompute cost earns `credit` turnovers.  All blocks have
    the same bytes, so cost per byte is cost.

    Attributes:
      credit: in turnovers of the pool; 0 is LRU at the grain of 1 / 1024 of a turnover.
      full_cost: the cost of a full block, in the units that `touch` is given.
    """

    credit: float = 0.5
    full_cost: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.credit <= 16:
            raise ValueError(f"credit: expected turnovers in [0, 16], got {self.credit!r}")
        if not 1 <= self.full_cost < _LOG_LIMIT:
            raise ValueError(
                f"full_cost: expected an integer in [1, 2**22), got {self.full_cost!r}"
            )

    def key(self, last_access: Any, use_count: Any, score: Any) -> tuple[Any, ...]:
        return score, last_access

    def score(self, use_count: Any, cost: Any, turnover: Any, inflation: Any) -> Any:
        worth = log2_fixed(use_count) + log2_fixed(cost) - log2_fixed(self.full_cost)
        return turnover + ((round(self.credit * TURNOVER) * worth) >> _LOG_BITS)


@dataclasses.dataclass(frozen=True)
class Fair(Policy):
    """Tenants over their quota lose first, the one furthest over most; within a tenant, LRU.

    The quota of tenant t is ``weights[t] / sum(weights) * num_blocks``.  A quota is no fence: a tenant may use
    what others leave unused, until they ask for it.  While anybody is over, nobody within their quota loses
    a block; when nobody is over, LRU over all (seeds/000 section 5.3).  A block is charged to the tenant whose
    sequence took it from the pool, whoever shares it later: charges sum to the blocks used.

    Arguments of a call beyond those of `Policy.__call__`:
      charges: i32[n], blocks that an entry holds (sequences hold many); None: 1 each.
      usage: i32[tenant], blocks charged to each tenant; None: the charges of the candidates.
      demand: i32[tenant], blocks that the call is about to take for each tenant; None: none.  They count as used,
        so a tenant that floods pays for its own flood.
        A tenant within its quota loses blocks of its own, while another is over and has nothing to give, only
        for its own demand.
      num_blocks: the budget, static.

    Attributes:
      weights: of the tenants 0, 1, ...; positive integers.
    """

    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.weights or any(
            isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in self.weights
        ):
            raise ValueError(f"weights: expected positive integers, got {self.weights!r}")

    @property
    def num_lanes(self) -> int:
        return len(self.weights)

    def key(self, last_access: Any, use_count: Any, score: Any) -> tuple[Any, ...]:
        return (last_access,)

    def quotas(self, num_blocks: int) -> tuple[Array, Array]:
        """Returns the quotas as (whole blocks, place of the fraction): a larger place, a larger fraction."""
        total = sum(self.weights)
        parts = [divmod(w * num_blocks, total) for w in self.weights]
        places = sorted({rest for _, rest in parts})
        return (
            jnp.array([whole for whole, _ in parts], jnp.int32),
            jnp.array([places.index(rest) for _, rest in parts], jnp.int32),
        )


lru = Lru()
lfu = Lfu()
aged_lfu = AgedLfu()


def fair(weights: Sequence[int]) -> Fair:
    """Returns the policy with quotas in proportion to `weights`, one a tenant."""
    return Fair(tuple(weights))


def cost_aware(credit: float = 0.5, full_cost: int = 1) -> CostAware:
    """Returns the policy that credits recompute cost; see `CostAware` for the arguments."""
    return CostAware(credit, full_cost)


class Entries(NamedTuple):
    """What `choose` orders: m entries in any order.  Ids past the end of the log are padding.

    Attributes:
      ids, depths: i32[m].
      key: i32[m] each, the policy's words.
      lanes: i32[m], tenants; None where the policy has one lane.
      charges: i32[m]; None means 1 each.
    """

    ids: Array
    key: tuple[Array, ...]
    depths: Array
    lanes: Array | None = None
    charges: Array | None = None


class Shares(NamedTuple):
    """What `Fair` weighs, i32[tenant] each but for the budget.

    Attributes:
      usage: blocks charged to each tenant.
      demand: blocks that the call takes for each tenant.
      allowance: blocks that each tenant may still lose to its own demand.
      evictable: blocks that each could give.
      num_blocks: the budget, static.
    """

    usage: Array
    demand: Array
    allowance: Array
    evictable: Array
    num_blocks: int


def eviction_order(
    policy: Policy,
    log: AccessLog,
    candidates: Array,
    count: int,
    depths: Array | None = None,
    *,
    charges: Array | None = None,
    usage: Array | None = None,
    demand: Array | None = None,
    num_blocks: int | None = None,
) -> Array:
    """Returns the first `count` victims, i32[count], n (NO_BLOCK) beyond them.  Arguments as `Policy.__call__`.

    Raises:
      ValueError: candidates are no bool[n], or a fair policy is not told its budget.
    """
    num_entries = log.last_access.shape[0]
    if candidates.shape != (num_entries,) or candidates.dtype != jnp.bool_:
        raise ValueError(
            f"candidates: expected bool[{num_entries}], got {candidates.dtype}{list(candidates.shape)}"
        )
    ids = jnp.where(candidates, jnp.arange(num_entries, dtype=jnp.int32), num_entries)
    key = policy.key(log.last_access, log.use_count, log.score)
    depths = jnp.zeros_like(ids) if depths is None else depths
    entries = Entries(ids, key, depths, log.tenant, charges)
    shares = None
    if isinstance(policy, Fair):
        if num_blocks is None:
            raise ValueError("num_blocks: expected the budget that quotas are shares of, got None")
        none = jnp.zeros(policy.num_lanes, jnp.int32)
        held = none.at[log.tenant].add(
            jnp.where(candidates, 1 if charges is None else charges, 0), mode="drop"
        )
        demand = none if demand is None else demand
        shares = Shares(held if usage is None else usage, demand, demand, held, num_blocks)
    chosen = choose(policy, entries, num_entries, shares)[:count]
    return jnp.pad(chosen, (0, count - chosen.shape[0]), constant_values=num_entries)


def choose(policy: Policy, entries: Entries, no_id: int, shares: Shares | None) -> Array:
    """Returns the ids i32[m] in the order of their going; what may not go, and padding, is `no_id` at the end."""
    if isinstance(policy, Fair):
        if shares is None:
            raise ValueError("shares: expected the tenants' usage for a fair policy, got None")
        return _choose_fair(policy, entries, no_id, shares)
    keys = (entries.ids >= no_id, *entries.key, -entries.depths, entries.ids)
    return jax.lax.sort(keys, num_keys=len(keys))[-1]


def num_allowed(policy: Policy, shares: Shares) -> Array:
    """Returns i32[], how many entries of one block each `choose` would let go."""
    if not isinstance(policy, Fair):
        return jnp.sum(shares.evictable)
    whole, _ = policy.quotas(shares.num_blocks)
    excess = shares.usage + shares.demand - whole
    some = jnp.clip(jnp.maximum(excess, shares.allowance), 0, shares.evictable)
    return jnp.where(jnp.all(excess <= shares.evictable), jnp.sum(shares.evictable), jnp.sum(some))


def _choose_fair(policy: Fair, entries: Entries, no_id: int, shares: Shares) -> Array:
    """Merges the tenants' LRU orders by how far each is over its quota when its turn comes."""
    charges = jnp.ones_like(entries.ids) if entries.charges is None else entries.charges
    assert entries.lanes is not None
    charges = jnp.where(entries.ids < no_id, charges, 0)
    keys = (entries.lanes, entries.ids >= no_id, *entries.key, -entries.depths, entries.ids)
    lanes, _, first, shallow, ids, charges = jax.lax.sort((*keys, charges), num_keys=5)
    before = jnp.cumsum(charges) - charges
    lane = jnp.clip(lanes, 0, policy.num_lanes - 1)
    begin = jnp.searchsorted(lanes, jnp.arange(policy.num_lanes, dtype=jnp.int32))
    gone = (
        before - jnp.append(before, 0)[begin][lane]
    )  # charged to the same tenant and evicted earlier

    whole, fraction = policy.quotas(shares.num_blocks)
    excess = shares.usage + shares.demand - whole
    level = excess[lane] - gone
    over = level > 0
    calm = jnp.all(excess <= shares.evictable)  # once the first phase is through, nobody is over
    allowed = over | calm | (gone < shares.allowance[lane])
    allowed &= (ids < no_id) & (lanes == lane)
    merged = (
        ~allowed,
        jnp.where(over, -level, _MAX),
        jnp.where(over, fraction[lane], 0),
        jnp.where(over, -lanes, 0),
        first,
        shallow,
        jnp.where(allowed, ids, no_id),
    )
    return jax.lax.sort(merged, num_keys=7)[-1]
