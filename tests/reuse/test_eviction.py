"""The policies against the documents' formulas, one victim after the other, and the tree against the policies."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import eviction as oracle

from jaxkv import victim_tree
from jaxkv.access_log import AccessLog, init_log, note_evicted, start, tick, touch
from jaxkv.eviction import (
    CostAware,
    Fair,
    Policy,
    Shares,
    aged_lfu,
    cost_aware,
    eviction_order,
    fair,
    lfu,
    log2_fixed,
    lru,
)
from jaxkv.victim_tree import enter, first_victims, init_tree, leave

WEIGHTS = (1, 2, 5)
BUDGET = 40
SEQS = 12


def log_of(entries: dict[int, oracle.Entry]) -> AccessLog:
    """Returns a log with the entries' history, ids 0, 1, ... in order."""
    return init_log(len(entries)).__class__(
        **{
            name: jnp.array([getattr(entries[i], name) for i in range(len(entries))], jnp.int32)
            for name in ("last_access", "use_count", "tenant", "score")
        },
        **{name: jnp.int32(0) for name in ("clock", "turnover", "remainder", "inflation")},
    )


def victims(entries: dict[int, oracle.Entry], pick: Callable[..., int | None]) -> list[int]:
    """Evicts one after the other by a formula of the documents."""
    left, order = dict(entries), []
    while left and (victim := pick(left)) is not None:
        order.append(victim)
        del left[victim]
    return order


@functools.cache
def order_program(policy: Policy) -> Callable[..., Any]:
    """Returns the jitted order of a policy over sequences."""

    def order(log: AccessLog, live: Any, depths: Any, charges: Any) -> Any:
        shares = {"charges": charges, "num_blocks": BUDGET} if isinstance(policy, Fair) else {}
        return policy(log, live, SEQS + 2, depths, **shares)

    return jax.jit(order)


@pytest.mark.parametrize(
    ("policy", "formula"),
    [
        (lru, oracle.lru),
        (lfu, oracle.lfu),
        (fair(WEIGHTS), functools.partial(oracle.fair, weights=WEIGHTS, num_blocks=BUDGET)),
        (aged_lfu, oracle.scored),
    ],
    ids=["lru", "lfu", "fair", "aged_lfu"],
)
def test_policy_sequences_and_blocks_go_in_the_order_of_the_formula(
    policy: Policy, formula: Callable[..., int | None]
) -> None:
    """Sequences of several blocks (the seed's data) and single blocks with depths, ties included."""
    rng = random.Random(5)
    for trial in range(60):
        blocks = trial % 2 == 1
        entries = {
            i: oracle.Entry(
                last_access=rng.randrange(6),
                use_count=rng.randrange(1, 4),
                tenant=rng.randrange(3),
                depth=rng.randrange(4) if blocks else 0,
                blocks=1 if blocks else rng.randrange(1, 9),
                score=rng.randrange(5),
            )
            for i in range(SEQS)
        }
        live = {i for i in entries if rng.random() < 0.8}
        got = order_program(policy)(
            log_of(entries),
            jnp.array([i in live for i in entries]),
            jnp.array([e.depth for e in entries.values()], jnp.int32),
            jnp.array([e.blocks for e in entries.values()], jnp.int32),
        )
        want = victims({i: entries[i] for i in sorted(live)}, formula)
        assert got.tolist() == want + [SEQS] * (SEQS + 2 - len(want))


def test_lfu_old_favourites_stay_and_newcomers_replace_each_other() -> None:
    """Field case H'4: capacity 4, keys 1 and 2 used four times, 3 and 4 three times, then 5, then 6."""
    entries = {k: oracle.Entry(last_access=k, use_count=4 if k <= 2 else 3) for k in (1, 2, 3, 4)}
    for new in (5, 6):
        ids = sorted(entries)
        log = log_of({i: entries[k] for i, k in enumerate(ids)})
        del entries[ids[int(lfu(log, jnp.ones(4, bool), 1)[0])]]
        entries[new] = oracle.Entry(last_access=new)
    assert sorted(entries) == [1, 2, 4, 6]


def test_fair_tenant_within_its_quota_loses_nothing_to_another() -> None:
    """Weights 1:2:5; usage and demand of any size.  What a tenant within its quota loses, it asked for itself."""
    policy = fair(WEIGHTS)
    rng = random.Random(8)

    @functools.partial(jax.jit)
    def order(log: AccessLog, cached: Any, usage: Any, demand: Any) -> Any:
        return eviction_order(
            policy, log, cached, SEQS, usage=usage, demand=demand, num_blocks=BUDGET
        )

    tight = 0
    for _ in range(150):
        entries = {
            i: oracle.Entry(last_access=rng.randrange(20), tenant=rng.randrange(3))
            for i in range(SEQS)
        }
        usage = [sum(e.tenant == t for e in entries.values()) for t in range(3)]
        live = [rng.randrange(12) for _ in range(3)]
        usage = [u + more for u, more in zip(usage, live, strict=True)]
        demand = [rng.choice([0, 0, 3, 20]) for _ in range(3)]
        got = order(
            log_of(entries),
            jnp.ones(SEQS, bool),
            jnp.array(usage, jnp.int32),
            jnp.array(demand, jnp.int32),
        ).tolist()
        got = got[: got.index(SEQS)] if SEQS in got else got
        assert got == oracle.fair_with_demand(entries, WEIGHTS, BUDGET, usage, demand)
        shortage = sum(usage) + sum(demand) - BUDGET
        for t, weight in enumerate(WEIGHTS):
            lost = sum(entries[v].tenant == t for v in got[: max(0, shortage)])
            tight += lost > 0
            assert lost <= max(0, usage[t] + demand[t] - weight * BUDGET // 8, demand[t])
    assert tight > 50


@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [(lru, 7), (lfu, 600), (aged_lfu, 600), (cost_aware(0.5), 600), (fair(WEIGHTS), 600)],
    ids=["lru-one-level", "lfu", "aged_lfu", "cost_aware", "fair"],
)
def test_victim_tree_any_history_gives_the_order_of_the_policy(
    policy: Policy, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks come and go with chains of touches; after each step the tree's victims are the definition's.

    With a top of one node 600 blocks make three levels, as 1,000,000 do otherwise.
    """
    monkeypatch.setattr(victim_tree, "TOP", 1)
    rng = np.random.default_rng(3)
    width, count = 40, 6

    @functools.partial(jax.jit)
    def step(
        log: AccessLog, tree: Any, gone: Any, used: Any, depths: Any, uses: Any, new: Any
    ) -> Any:
        tree = leave(policy, log, tree, gone)
        log = tick(note_evicted(log, gone), jnp.int32(width))
        log = start(log, gone, jnp.zeros_like(gone) + gone % policy.num_lanes)
        log = touch(policy, log, used, depths, uses)
        tree = enter(policy, log, tree, new, log.tenant[jnp.minimum(new, num_blocks - 1)])
        shares = None
        if isinstance(policy, Fair):
            demand = jnp.array([7, 0, 0], jnp.int32)
            shares = Shares(tree.sizes, demand, demand, tree.sizes, num_blocks // 4)
            shares_kw = {"usage": tree.sizes, "demand": demand, "num_blocks": num_blocks // 4}
        else:
            shares_kw = {}
        cached = tree.lanes >= 0
        return (
            log,
            tree,
            first_victims(policy, log, tree, count, shares),
            policy(log, cached, count, **shares_kw),
        )

    log = init_log(num_blocks)
    tree = init_tree(policy, num_blocks)
    assert len(tree.levels) == (3 if num_blocks == 600 else 1)
    cached: set[int] = set()

    def pad(ids: set[int]) -> np.ndarray:
        padding = [num_blocks] * (width - len(ids))
        return np.array([*sorted(ids), *padding], np.int32)

    shortest = num_blocks
    for round_ in range(52):
        filling = round_ < 30
        fewest, most = (0, width // 3) if filling else (width // 2, width)
        gone = set(rng.permutation(sorted(cached))[: rng.integers(fewest, most)].tolist())
        cached -= gone
        outside = sorted(set(range(num_blocks)) - cached)
        used = rng.permutation(outside)[:width]
        new = set(used[: rng.integers(0, width)].tolist()) if filling else set()
        cached |= new
        used = np.pad(used.astype(np.int32), (0, width - len(used)), constant_values=num_blocks)
        # Few depths, so that keys tie; uses that do not follow age, so that words disagree.
        depths, uses = rng.integers(0, 4, (2, width)).astype(np.int32)
        log, tree, got, want = step(log, tree, pad(gone), used, depths, uses, pad(new))
        assert got.tolist() == want.tolist()
        assert int(tree.sizes.sum()) == len(cached) == int((tree.lanes >= 0).sum())
        shortest = min(shortest, len(cached))
    assert shortest < count


def test_log2_fixed_is_exact_at_powers_of_two_and_equal_everywhere() -> None:
    x = np.array([*range(1, 600), 2**21, 2**22 - 1, 2**22, 2**31 - 1], np.int32)
    got = log2_fixed(x)
    np.testing.assert_array_equal(got, np.asarray(jax.jit(log2_fixed)(x)))
    np.testing.assert_allclose(got[:599] / 256, np.log2(x[:599]), atol=0.09)
    assert (np.diff(got) >= 0).all()
    assert [int(log2_fixed(2**k)) for k in range(22)] == [256 * k for k in range(22)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fair([]), r"weights: expected positive integers, got \(\)"),
        (lambda: fair([1, 0]), r"weights: expected positive integers, got \(1, 0\)"),
        (lambda: cost_aware(-1), r"credit: expected turnovers in \[0, 16\], got -1"),
        (lambda: CostAware(full_cost=0), "full_cost: expected an integer in"),
        (lambda: lru(init_log(3), jnp.ones(2, bool), 1), r"candidates: expected bool\[3\], got bool\[2\]"),
        (lambda: fair([1])(init_log(3), jnp.ones(3, bool), 1), "num_blocks: expected the budget"),
    ],
)  # fmt: skip
def test_policy_bad_arguments_raise(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
