"""The documents' eviction formulas in plain Python (seeds/000 section 5), and how a log is kept."""

from __future__ import annotations

import dataclasses
from fractions import Fraction


@dataclasses.dataclass
class Entry:
    """A sequence, or a cached block of one."""

    last_access: int
    use_count: int = 1
    tenant: int = 0
    depth: int = 0
    blocks: int = 1
    score: int = 0


def lru(entries: dict[int, Entry]) -> int:
    """argmin last_access; depth, then id break ties."""
    return min(entries, key=lambda i: (entries[i].last_access, -entries[i].depth, i))


def lfu(entries: dict[int, Entry]) -> int:
    """argmin (use_count, last_access)."""
    return min(
        entries,
        key=lambda i: (entries[i].use_count, entries[i].last_access, -entries[i].depth, i),
    )


def scored(entries: dict[int, Entry]) -> int:
    """argmin (score, last_access)."""
    return min(
        entries, key=lambda i: (entries[i].score, entries[i].last_access, -entries[i].depth, i)
    )


def fair(
    entries: dict[int, Entry],
    weights: tuple[int, ...],
    num_blocks: int,
    usage: dict[int, int] | None = None,
) -> int | None:
    """The oldest entry of the tenant furthest over its quota; the oldest of all when nobody is over.

    None when a tenant is over and none of those over has an entry.
    """
    if usage is None:
        usage = dict.fromkeys(range(len(weights)), 0)
        for entry in entries.values():
            usage[entry.tenant] += entry.blocks
    quota = [Fraction(w * num_blocks, sum(weights)) for w in weights]
    over = {t: used - quota[t] for t, used in usage.items() if used > quota[t]}
    if not over:
        return lru(entries) if entries else None
    owners = {entry.tenant for entry in entries.values()}
    over = {t: excess for t, excess in over.items() if t in owners}
    if not over:
        return None
    tenant = max(over, key=lambda t: (over[t], t))
    return lru({i: entry for i, entry in entries.items() if entry.tenant == tenant})


def fair_with_demand(
    cached: dict[int, Entry],
    weights: tuple[int, ...],
    num_blocks: int,
    usage: list[int],
    demand: list[int],
) -> list[int]:
    """All victims of a call that takes `demand`: by the formula, then each tenant's own for its own demand."""
    left, order = dict(cached), []
    held = {t: used + wanted for t, (used, wanted) in enumerate(zip(usage, demand, strict=True))}
    while left:
        victim = fair(left, weights, num_blocks, held)
        if victim is None:
            gone = [sum(cached[v].tenant == t for v in order) for t in range(len(weights))]
            own = {i: e for i, e in left.items() if gone[e.tenant] < demand[e.tenant]}
            if not own:
                break
            victim = lru(own)
        held[left[victim].tenant] -= 1
        del left[victim]
        order.append(victim)
    return order
