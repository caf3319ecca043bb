"""Hit rates of the eviction policies on request traces, beside Belady's bound."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
from replay import BLOCK_TOKENS, Request, belady, read_trace, replay, with_tenants

from jaxkv.eviction import Policy, aged_lfu, cost_aware, fair, lfu, lru

DESCRIPTION = "Prefix hits of eviction policies on request traces, second half of the requests"
CAPACITIES = (20_000, 5_000, 10_000, 40_000)
WEIGHTS = (1, 2, 5)
FLOOD_BLOCKS = 24
POLICIES: dict[str, Policy] = {
    "lru": lru,
    "lfu": lfu,
    "aged_lfu": aged_lfu,
    "cost_aware": cost_aware(credit=0.5, full_cost=BLOCK_TOKENS),
}


def hit_rates(trace: str, requests: list[Request], capacity: int) -> list[harness.Result]:
    """Replays one trace at one capacity under every policy, under both rules of what is findable."""
    results = []
    for full_only in (False, True):
        bound = belady(requests, capacity, full_only).hit_percent
        shapes = {"num_blocks": capacity, "findable": "full blocks" if full_only else "all blocks"}
        kind = "full_hit_percent" if full_only else "hit_percent"
        for name, policy in POLICIES.items():
            value = replay(requests, policy, capacity, full_only=full_only).hit_percent
            metric = f"eviction.{trace}.{name}.{kind}"
            results.append(
                harness.Result(metric, value, "%", shapes, "belady", bound, value / bound)
            )
    return results


def fairness(trace: str, requests: list[Request], capacity: int) -> list[harness.Result]:
    """Replays a trace of three tenants of which one floods, fair and with LRU."""
    results = []
    flooded = with_tenants(requests, len(WEIGHTS), FLOOD_BLOCKS)
    for name, policy in (("fair", fair(WEIGHTS)), ("lru", lru)):
        tally = replay(flooded, policy, capacity, WEIGHTS)
        shapes = {"num_blocks": capacity, "weights": WEIGHTS, "flood_blocks": FLOOD_BLOCKS}
        metric = f"eviction.{trace}.{name}.flood"
        limit = 0 if name == "fair" else None
        results.append(
            harness.Result(f"{metric}.wronged_blocks", tally.wronged, "blocks", shapes, limit=limit)
        )
        for tenant in range(len(WEIGHTS)):
            rate = 100 * tally.hits[tenant] / max(1, tally.blocks[tenant])
            share = 100 * tally.held[tenant] / capacity
            own = {**shapes, "tenant": tenant}
            results.append(harness.Result(f"{metric}.tenant{tenant}.hit_percent", rate, "%", own))
            results.append(
                harness.Result(f"{metric}.tenant{tenant}.share_percent", share, "%", own)
            )
    return results


def run(paths: list[Path], quick: bool) -> list[harness.Result]:
    """Replays every trace; one capacity if quick."""
    results = []
    for path in paths:
        requests = read_trace(path)
        trace = path.stem.removesuffix("_trace")
        for capacity in CAPACITIES[: 1 if quick else None]:
            results += hit_rates(trace, requests, capacity)
        results += fairness(trace, requests, CAPACITIES[0])
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("traces", nargs="*", type=Path, help="JSON lines in the Mooncake form")
    harness.add_options(parser)
    options = parser.parse_args()
    harness.report(DESCRIPTION, run(options.traces, options.quick), options.json)
