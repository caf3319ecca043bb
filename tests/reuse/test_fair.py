"""Fair eviction as tenants see it, in plain Python: `test_replay` holds the replay's victims against the arrays."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.eviction import Policy, fair, lru

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from replay import BLOCK_TOKENS, Replay, Request, with_tenants

WEIGHTS = (1, 2, 5)


def requests(seed: int, count: int, longest: int) -> list[Request]:
    """Returns requests of three tenants that share beginnings within a tenant."""
    rng = np.random.default_rng(seed)
    known: dict[tuple[int, ...], int] = {}
    out = []
    for _ in range(count):
        path = [int(rng.integers(3))]
        blocks = []
        for _ in range(int(rng.integers(1, longest + 1))):
            path.append(int(rng.choice([0, 0, 0, 1, 2, 3])))
            blocks.append(known.setdefault(tuple(path), len(known)))
        out.append(Request(BLOCK_TOKENS * len(blocks), tuple(blocks), path[0]))
    return out


def losses(
    policy: Policy, capacity: int, trace: list[Request]
) -> Iterator[tuple[Request, int, list[int], Counter[int]]]:
    """Yields each request with its new blocks, the charges before it, and what each tenant lost to it."""
    pool = Replay(policy, capacity, WEIGHTS)
    owners: dict[int, int] = {}
    for request in trace:
        held, seen = list(pool.held), len(pool.victims)
        hits = pool.serve(request)
        lost = Counter(owners[block] for block in pool.victims[seen:])
        owners |= dict.fromkeys(request.blocks[hits:], request.tenant)
        assert Counter(entry.tenant for entry in pool.entries.values()) == +Counter(
            dict(enumerate(pool.held))
        ), "the charges are not those of the blocks in use"
        assert sum(pool.held) == len(pool.entries) <= capacity
        yield request, len(request.blocks) - hits, held, lost


@settings(max_examples=40)
@given(
    extra=st.integers(0, 100), flood=st.integers(1, 10), seed=st.integers(0, 2**16), longest=st.integers(1, 8)
)  # fmt: skip
def test_fair_no_tenant_within_its_quota_loses_a_block_to_a_flood(
    extra: int, flood: int, seed: int, longest: int
) -> None:
    """Tenant 0 of weights 1:2:5 asks for new blocks after every request; it alone pays, and never below its quota for others."""
    capacity = 8 * max(longest, flood) + extra  # the least quota holds the longest request
    trace = with_tenants(requests(seed, 60, longest), 3, flood)
    for request, need, held, lost in losses(fair(WEIGHTS), capacity, trace):
        for tenant, weight in enumerate(WEIGHTS):
            quota = weight * capacity / sum(WEIGHTS)
            own = need if tenant == request.tenant else 0
            # Beyond what puts it over its quota a tenant loses blocks for its own demand only.
            assert lost[tenant] <= max(0, held[tenant] + own - int(quota), own)
            if held[tenant] <= quota and tenant != request.tenant:
                assert not lost[tenant]


def test_fair_flood_by_lru_does_take_from_others() -> None:
    """The same property fails for LRU, so the trace is a hard one."""
    trace = with_tenants(requests(0, 60, 8), 3, 7)
    wronged = [
        lost[tenant] for request, _, held, lost in losses(lru, 60, trace)
        for tenant, weight in enumerate(WEIGHTS)
        if tenant != request.tenant and held[tenant] <= weight * 60 / 8
    ]  # fmt: skip
    assert sum(wronged) > 100


@settings(max_examples=20)
@given(capacity=st.integers(16, 120), alone=st.integers(0, 2), other=st.integers(0, 2))
def test_fair_unused_shares_are_lent_and_given_back(capacity: int, alone: int, other: int) -> None:
    """A tenant alone fills the whole pool; another that asks gets its quota and half of what is over; all three end at their quotas."""
    pool = Replay(fair(WEIGHTS), capacity, WEIGHTS)
    for block in range(2 * capacity):
        pool.serve(Request(BLOCK_TOKENS, (block,), alone))
    assert pool.held[alone] == capacity
    for block in range(2 * capacity):
        pool.serve(Request(BLOCK_TOKENS, (-1 - block,), other))
    if other == alone:
        assert pool.held[alone] == capacity
        return
    excess = [pool.held[t] - capacity * WEIGHTS[t] / sum(WEIGHTS) for t in (alone, other)]
    assert min(excess) > -1
    assert abs(excess[0] - excess[1]) <= 1, "what the third leaves is not shared evenly"
    assert sum(pool.held) == capacity
    for block in range(2 * capacity):
        pool.serve(Request(BLOCK_TOKENS, (-1 - 2 * capacity - block,), 3 - alone - other))
    for tenant, weight in enumerate(WEIGHTS):
        assert abs(pool.held[tenant] - capacity * weight / sum(WEIGHTS)) <= 1
