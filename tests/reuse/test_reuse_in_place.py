"""Transitions with prefix reuse neither copy nor scan anything of the pool's size: what the compiler says, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fast_compile import SHIPPED

from jaxkv import CacheConfig, init_cache, release
from jaxkv.sharing import admit, register, with_prefix_reuse

ROWS, WIDTH = 4, 32
LARGE = CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_size=4,
    num_blocks=1_000_000,
    max_seqs=ROWS,
    max_blocks_per_seq=8,
)


# What may name an array of the pool: what passes it on, and what reads or writes the rows that an index names.
HARMLESS = {
    "parameter", "tuple", "get-tuple-element", "while", "conditional", "call", "fusion", "bitcast", "gather",
    "scatter", "dynamic-slice", "dynamic-update-slice",
}  # fmt: skip
TRANSITIONS = ["admit", "register", "release"]


def lowered(transition: str, config: CacheConfig) -> tuple[Any, Any]:
    """Returns an abstract empty cache and a transition on it, lowered and not compiled."""
    cache = jax.eval_shape(lambda: with_prefix_reuse(config, init_cache(config)))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
    words = jax.ShapeDtypeStruct((ROWS, 8), jnp.int32)
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "admit": (admit, (rows, tokens, rows, words)),
        "register": (register, (rows, tokens)),
        "release": (release, (jax.ShapeDtypeStruct((ROWS,), jnp.bool_),)),
    }
    function, args = functions[transition]
    program = jax.jit(functools.partial(function, config), donate_argnums=0)
    return cache, program.lower(cache, *args)


def whole_pool_work(hlo: str, least: int) -> set[str]:
    """Returns the instructions of a compiled module that touch `least` elements or more otherwise than by an index."""
    found, large = set(), set()
    for name, shape, op, args in re.findall(r"%?([\w.-]+) = (\(?.*?\)?) ([\w-]+)\(([^)]*)\)", hlo):
        sizes = [
            functools.reduce(lambda n, d: n * int(d), filter(None, dims.split(",")), 1)
            for dims in re.findall(r"[a-z]+\d+\[([\d,]*)\]", shape)
        ]
        if max(sizes, default=0) >= least:
            large.add(name)
        if (name in large or large & set(re.findall(r"%([\w.-]+)", args))) and op not in HARMLESS:
            found.add(f"{op} {name} of {shape}")
    return found


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_transition_on_a_million_blocks_touches_only_the_rows_it_names(transition: str) -> None:
    """An array of one word a block is 4 MB; everything temporary must fit a tenth of that."""
    cache, program = lowered(transition, LARGE)
    compiled = program.compile(SHIPPED)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)
    )
    assert memory.temp_size_in_bytes <= 400_000
    assert not whole_pool_work(compiled.as_text(), LARGE.num_blocks // 20)


def test_whole_pool_work_sees_copies_and_scans() -> None:
    def scans(x: jax.Array) -> jax.Array:
        return x.at[jnp.argmax(x)].set(1)

    shape = jax.ShapeDtypeStruct((50_000,), jnp.int32)
    found = whole_pool_work(jax.jit(scans).lower(shape).compile(SHIPPED).as_text(), 50_000)
    assert any("reduce" in work for work in found)
    assert any("copy" in work for work in found)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_transition_costs_grow_with_the_depth_of_the_tree_alone(transition: str) -> None:
    """Operations and bytes that the program names: sixteen times the blocks add a level, and every level costs the same."""
    pools = [dataclasses.replace(LARGE, num_blocks=2**bits) for bits in (12, 16, 20)]
    costs = [lowered(transition, config)[1].cost_analysis() for config in pools]
    for what in ("flops", "bytes accessed"):
        shallow, deep, deepest = (cost[what] for cost in costs)
        assert deepest - deep == pytest.approx(deep - shallow, rel=0.1)
        assert deepest <= 1.6 * shallow


def test_fresh_state_can_be_donated() -> None:
    """No two leaves share an array."""
    config = CacheConfig(1, 1, 1, 4, 8, 2, 2)
    leaves = jax.tree.leaves(with_prefix_reuse(config, init_cache(config)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
