"""The replay's victims are those of the policies on arrays, and its bound is a bound."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.access_log import init_log, note_evicted, start, tick, touch
from jaxkv.eviction import Fair, Policy, aged_lfu, cost_aware, eviction_order, fair, lfu, lru

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from replay import BLOCK_TOKENS, Replay, Request, belady, read_trace, replay, with_tenants

CAPACITY, LONGEST = 80, 10  # the least quota holds the longest request
WEIGHTS = (1, 2, 5)


def random_trace(rng: np.random.Generator, count: int) -> list[Request]:
    """Returns requests that share beginnings, as conversations do; three tenants share nothing."""
    known: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(count):
        path: list[int] = [int(rng.integers(3))]
        blocks = []
        for _ in range(int(rng.integers(1, LONGEST + 1))):
            path.append(int(rng.choice([0, 0, 0, 1, 2])))
            blocks.append(known.setdefault(tuple(path), len(known)))
        tokens = BLOCK_TOKENS * len(blocks) - int(rng.integers(BLOCK_TOKENS))
        requests.append(Request(tokens, tuple(blocks), path[0]))
    return requests


class ArrayReplay:
    """The same pool on arrays: a slot for each block, the policy's order over a mask."""

    def __init__(self, policy: Policy) -> None:
        self.log = init_log(CAPACITY)
        self.slots: dict[int, int] = {}
        self.depths = np.zeros(CAPACITY, np.int32)
        self.victims: list[int] = []

        @functools.partial(jax.jit)
        def order(log: Any, cached: Any, demand: Any, usage: Any, depths: Any) -> Any:
            shares = (
                {"usage": usage, "demand": demand, "num_blocks": CAPACITY}
                if isinstance(policy, Fair)
                else {}
            )
            return eviction_order(policy, log, cached, LONGEST, depths, **shares)

        @functools.partial(jax.jit)
        def use(log: Any, gone: Any, span: Any, new: Any, tenant: Any, ids: Any, cost: Any) -> Any:
            log = tick(note_evicted(log, gone), span)
            log = start(log, new, jnp.full_like(new, tenant))
            return touch(policy, log, ids, jnp.arange(LONGEST, dtype=jnp.int32), 1, cost)

        self._order, self._use = order, use

    def serve(self, request: Request) -> None:
        """Serves one request."""
        blocks, slots = request.blocks, self.slots
        hits = next((i for i, b in enumerate(blocks) if b not in slots), len(blocks))
        cached = np.zeros(CAPACITY, bool)
        cached[[s for b, s in slots.items() if b not in blocks[:hits]]] = True
        need = len(blocks) - hits
        demand = np.zeros(3, np.int32)
        demand[request.tenant] = need
        tenants = np.asarray(self.log.tenant)[list(slots.values())]
        usage = np.bincount(tenants, minlength=3).astype(np.int32)
        count = max(0, need - (CAPACITY - len(slots)))
        gone = np.asarray(self._order(self.log, cached, demand, usage, self.depths))[:count]
        owners = {slot: block for block, slot in slots.items()}
        for slot in gone.tolist():
            self.victims.append(owners[slot])
            del slots[owners[slot]]
        free = iter(sorted(set(range(CAPACITY)) - set(slots.values())))
        new = [slots.setdefault(block, next(free)) for block in blocks[hits:]]
        for depth, block in enumerate(blocks):
            self.depths[slots[block]] = depth
        costs = [min(BLOCK_TOKENS, request.num_tokens - BLOCK_TOKENS * d) for d in range(LONGEST)]
        self.log = self._use(
            self.log,
            pad(gone),
            np.int32(len(blocks)),
            pad(new),
            np.int32(request.tenant),
            pad([slots[block] for block in blocks]),
            np.maximum(costs, 1).astype(np.int32),
        )


def pad(ids: Any) -> np.ndarray:
    """Returns ids as i32[LONGEST], padded with an id past the end."""
    return np.array([*ids, *[CAPACITY] * (LONGEST - len(ids))], np.int32)


@pytest.mark.parametrize(
    "policy",
    [lru, lfu, aged_lfu, cost_aware(0.5, BLOCK_TOKENS), fair(WEIGHTS)],
    ids=["lru", "lfu", "aged_lfu", "cost_aware", "fair"],
)
def test_replay_evicts_what_the_policy_on_arrays_evicts(policy: Policy) -> None:
    trace = random_trace(np.random.default_rng(4), 250)
    plain = Replay(policy, CAPACITY, WEIGHTS)
    arrays = ArrayReplay(policy)
    for request in trace:
        plain.serve(request)
        arrays.serve(request)
        assert plain.victims == arrays.victims
    assert len(plain.victims) > 5 * CAPACITY
    if isinstance(policy, Fair):
        assert plain.wronged == 0
    bound = belady(trace, CAPACITY).hit_percent
    assert replay(trace, policy, CAPACITY, WEIGHTS).hit_percent <= bound


def test_belady_small_traces_reach_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(6)
    for _ in range(30):
        names = rng.integers(0, 5, 10).tolist()

        @functools.cache
        def best(at: int, held: frozenset[int], names: tuple[int, ...]) -> int:
            if at == len(names):
                return 0
            hit = names[at] in held
            counted = int(hit and at >= len(names) // 2)
            if hit or len(held) < 3:
                return counted + best(at + 1, held | {names[at]}, names)
            return max(best(at + 1, (held - {gone}) | {names[at]}, names) for gone in held)

        trace = [Request(BLOCK_TOKENS, (name,)) for name in [*range(90, 100), *names]]
        full = tuple(range(90, 100)) + tuple(names)
        assert belady(trace, 3).hits[0] == best(0, frozenset(), full)


def test_read_trace_and_full_blocks_only(tmp_path: Path) -> None:
    """Only full blocks are findable in the cache, and a prompt of exactly the cached length computes a token."""
    lines = [
        {"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": ids}
        for n, ids in ((1024, [1, 2]), (1024, [1, 2]), (1025, [1, 2, 3]), (1030, [1, 2, 3]))
    ]
    path = tmp_path / "small_trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(path)
    assert trace[2] == Request(1025, (1, 2, 3))
    pools = Replay(lru, 9), Replay(lru, 9, full_only=True)
    assert [[pool.serve(r) for r in trace] for pool in pools] == [[0, 2, 2, 3], [0, 1, 2, 2]]


def test_with_tenants_floods_and_fair_protects() -> None:
    trace = with_tenants(random_trace(np.random.default_rng(9), 300), 3, flood_blocks=6)
    assert {request.tenant for request in trace} == {0, 1, 2}
    tallies = {p: replay(trace, p, CAPACITY, WEIGHTS) for p in (lru, fair(WEIGHTS))}
    assert tallies[fair(WEIGHTS)].wronged == 0
    assert tallies[lru].wronged > 0
    assert tallies[fair(WEIGHTS)].hits[2] > tallies[lru].hits[2]
