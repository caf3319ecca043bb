"""Transitions with prefix reuse copy nothing of the pool's size: what the compiler says, from shapes alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fast_compile import FAST_COMPILE

from jaxkv import CacheConfig, init_cache, release
from jaxkv.admit import admit, register, with_prefix_reuse

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


@pytest.mark.parametrize("transition", ["admit", "register", "release"])
def test_transition_on_a_million_blocks_copies_no_array_of_the_pool(transition: str) -> None:
    """An array of one word a block is 4 MB; everything temporary must fit a tenth of that."""
    cache = jax.eval_shape(lambda: with_prefix_reuse(LARGE, init_cache(LARGE)))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
    words = jax.ShapeDtypeStruct((ROWS, 8), jnp.int32)
    functions: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "admit": (admit, (rows, tokens, rows, words)),
        "register": (register, (rows, tokens)),
        "release": (release, (jax.ShapeDtypeStruct((ROWS,), jnp.bool_),)),
    }
    function, args = functions[transition]
    program = jax.jit(functools.partial(function, LARGE), donate_argnums=0)
    memory = program.lower(cache, *args).compile(FAST_COMPILE).memory_analysis()
    assert memory.alias_size_in_bytes == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)
    )
    assert memory.temp_size_in_bytes <= 400_000


def test_fresh_state_can_be_donated() -> None:
    """No two leaves share an array."""
    config = CacheConfig(1, 1, 1, 4, 8, 2, 2)
    leaves = jax.tree.leaves(with_prefix_reuse(config, init_cache(config)))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
