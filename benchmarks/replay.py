"""Replays request traces through the eviction policies; plain Python around the policies' own arithmetic.

A trace is JSON lines in the public Mooncake form: timestamp, input_length, output_length, and hash_ids, one id for
each 512-token block (equal ids: equal block behind an equal prefix).

Invariants:
  * No policy sees the future; `belady` does and is the bound.
  * Keys and scores come from the `Policy` objects themselves, on Python integers; a test holds the victims
    against `eviction_order` on the arrays.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Sequence
from pathlib import Path

from jaxkv.access_log import TURNOVER
from jaxkv.eviction import Fair, Policy

BLOCK_TOKENS = 512

Key = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a trace: its tokens, its blocks, and who sent it."""

    num_tokens: int
    blocks: tuple[int, ...]
    tenant: int = 0


@dataclasses.dataclass
class Entry:
    """The log of one block."""

    depth: int
    tenant: int
    last_access: int = 0
    use_count: int = 0
    score: int = -(2**31)


@dataclasses.dataclass
class Tally:
    """What happened in the second half of a trace.

    Attributes:
      hits, blocks: of each tenant.
      held: blocks of each tenant at the end.
      wronged: blocks that tenants within their quota lost to others, in the whole trace.
    """

    hits: list[int]
    blocks: list[int]
    held: list[int]
    wronged: int = 0

    @property
    def hit_percent(self) -> float:
        """Blocks found, of all blocks asked for."""
        return 100 * sum(self.hits) / sum(self.blocks)


def read_trace(path: str | Path) -> list[Request]:
    """Returns the requests of a trace file."""
    with open(path) as lines:
        records = [json.loads(line) for line in lines]
    return [Request(r["input_length"], tuple(r["hash_ids"])) for r in records]


class Replay:
    """A pool of `capacity` blocks that serves one request after the other.

    Args:
      policy: decides who goes.
      capacity: blocks.
      weights: of the tenants, for the tally and, if the policy is fair, the same as its own.
      full_only: whether only full blocks are findable and a token is always computed, as in the cache; else
        every block of a request is findable, as in simulations that look at ids alone.
    """

    def __init__(
        self, policy: Policy, capacity: int, weights: Sequence[int] = (1,), full_only: bool = False
    ) -> None:
        self.policy, self.capacity, self.full_only = policy, capacity, full_only
        self.quotas = [weight * capacity / sum(weights) for weight in weights]
        self.entries: dict[int, Entry] = {}
        self.held = [0] * len(weights)
        self.clock = self.turnover = self.remainder = self.inflation = 0
        self.victims: list[int] = []
        self.wronged = 0
        self._heaps: list[list[tuple[Key, int]]] = [[] for _ in range(policy.num_lanes)]

    def serve(self, request: Request) -> int:
        """Serves a request; returns how many of its blocks were there."""
        findable = request.num_tokens // BLOCK_TOKENS if self.full_only else len(request.blocks)
        limit = (request.num_tokens - 1) // BLOCK_TOKENS if self.full_only else findable
        hits = 0
        while hits < limit and request.blocks[hits] in self.entries:
            hits += 1
        need = len(request.blocks) - hits
        matched = set(request.blocks[:hits])
        self._evict(need - (self.capacity - len(self.entries)), matched, request.tenant, need)
        self.clock += len(request.blocks)
        for depth, block in enumerate(request.blocks[:findable]):
            if block not in self.entries:
                self.entries[block] = Entry(depth, request.tenant)
                self.held[request.tenant] += 1
            self._touch(block, depth, min(BLOCK_TOKENS, request.num_tokens - BLOCK_TOKENS * depth))
        return hits

    def _touch(self, block: int, depth: int, cost: int) -> None:
        entry = self.entries[block]
        entry.last_access = self.clock - depth
        entry.use_count += 1
        score = self.policy.score(entry.use_count, cost, self.turnover, self.inflation)
        entry.score = max(entry.score, score)
        lane = entry.tenant if self.policy.num_lanes > 1 else 0
        heapq.heappush(self._heaps[lane], (self._key(entry), block))

    def _key(self, entry: Entry) -> Key:
        key = self.policy.key(entry.last_access, entry.use_count, entry.score)
        return (*key, -entry.depth)

    def _evict(self, count: int, matched: set[int], tenant: int, demand: int) -> None:
        aside = []
        gone = []
        while len(gone) < count:
            lane = self._lane(tenant, demand)
            key, block = heapq.heappop(self._heaps[lane])
            entry = self.entries.get(block)
            if entry is None or self._key(entry) != key:
                continue  # used again, or evicted, since
            if block in matched:
                aside.append((lane, (key, block)))
                continue
            wanted = demand if entry.tenant == tenant else 0
            if self.held[entry.tenant] + wanted <= self.quotas[entry.tenant]:
                self.wronged += entry.tenant != tenant
            self.held[entry.tenant] -= 1
            del self.entries[block]
            gone.append(entry.score)
            self.victims.append(block)
        for lane, item in aside:
            heapq.heappush(self._heaps[lane], item)
        if gone:
            units = self.remainder + len(gone) * TURNOVER
            self.turnover += units // self.capacity
            self.remainder = units % self.capacity
            self.inflation = max(self.inflation, *gone)

    def _lane(self, tenant: int, demand: int) -> int:
        """Returns the tenant that is furthest over its quota and has something to give, else who asks."""
        if not isinstance(self.policy, Fair):
            return 0
        over = [
            (held + (demand if t == tenant else 0) - self.quotas[t], t)
            for t, held in enumerate(self.held)
            if self._heaps[t]
        ]
        excess, lane = max(over)
        return lane if excess > 0 else tenant


def replay(
    requests: Sequence[Request],
    policy: Policy,
    capacity: int,
    weights: Sequence[int] = (1,),
    full_only: bool = False,
) -> Tally:
    """Replays a trace; counts the second half of its requests."""
    return _count(requests, Replay(policy, capacity, weights, full_only))


def _count(requests: Sequence[Request], pool: Replay) -> Tally:
    """Lets a pool serve all requests and counts the second half of them."""
    tally = Tally([0] * len(pool.held), [0] * len(pool.held), pool.held)
    for number, request in enumerate(requests):
        hits = pool.serve(request)
        if number >= len(requests) // 2:
            tally.hits[request.tenant] += hits
            tally.blocks[request.tenant] += len(request.blocks)
    tally.wronged = pool.wronged
    return tally


class Farthest(Policy):
    """Belady's rule: the block whose next use lies farthest ahead goes first."""

    def key(self, last_access: int, use_count: int, score: int) -> tuple[int, int]:
        raise NotImplementedError("key: Belady's rule needs the trace; use belady()")


class _Oracle(Replay):
    """A pool that knows the requests to come."""

    def __init__(self, requests: Sequence[Request], capacity: int, full_only: bool) -> None:
        tenants = 1 + max(request.tenant for request in requests)
        super().__init__(Farthest(), capacity, (1,) * tenants, full_only)
        self._uses: dict[int, list[int]] = {}
        for number in range(len(requests) - 1, -1, -1):
            for block in requests[number].blocks:
                self._uses.setdefault(block, []).append(number)

    def _touch(self, block: int, depth: int, cost: int) -> None:
        entry = self.entries[block]
        self._uses[block].pop()
        entry.last_access = -self._uses[block][-1] if self._uses[block] else -(2**62)
        heapq.heappush(self._heaps[0], (self._key(entry), block))

    def _key(self, entry: Entry) -> Key:
        return (entry.last_access, -entry.depth)


def belady(requests: Sequence[Request], capacity: int, full_only: bool = False) -> Tally:
    """Replays a trace with Belady's rule, the bound for every policy that takes all blocks in."""
    return _count(requests, _Oracle(requests, capacity, full_only))


def with_tenants(requests: Sequence[Request], num_tenants: int, flood_blocks: int) -> list[Request]:
    """Spreads a trace over tenants and lets tenant 0 flood the pool.

    A request's tenant follows the block behind the shared beginning, so a conversation stays with one tenant;
    tenants share nothing.  After each request tenant 0 asks for `flood_blocks` blocks nobody asks for again.
    """
    spread, fresh = [], 0
    for request in requests:
        tenant = request.blocks[min(1, len(request.blocks) - 1)] % num_tenants
        own = tuple(block * num_tenants + tenant for block in request.blocks)
        spread.append(Request(request.num_tokens, own, tenant))
        fresh -= flood_blocks
        flood = tuple(range(fresh, fresh + flood_blocks))
        spread.append(Request(flood_blocks * BLOCK_TOKENS, flood, 0))
    return spread
