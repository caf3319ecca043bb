"""Status bits on the device and the errors they become on the host."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from driver import SMALL

from jaxkv import (
    CapacityError,
    PagedKVCache,
    StatusBit,
    TransitionError,
    clear_status,
    fork,
    init_cache,
    raise_for_status,
    release,
    reserve,
    truncate,
    with_prefix_reuse,
)
from jaxkv.status import Status

_reserve = jax.jit(functools.partial(reserve, SMALL), static_argnums=3)
_fork = jax.jit(functools.partial(fork, SMALL))
_truncate = jax.jit(functools.partial(truncate, SMALL))
_release = jax.jit(functools.partial(release, SMALL))


def _cache_with(bits: StatusBit) -> PagedKVCache:
    status = Status(bits=jnp.int32(bits), need_blocks=jnp.int32(0))
    return dataclasses.replace(init_cache(SMALL), status=status)


@pytest.mark.parametrize("bit", [bit for bit in StatusBit if bit != StatusBit.OUT_OF_BLOCKS])
def test_raise_for_status_each_bit_names_and_explains_it(bit: StatusBit) -> None:
    with pytest.raises(TransitionError, match=rf"^{bit.name}: .+ Nothing was changed\.$") as error:
        raise_for_status(_cache_with(bit))
    assert error.value.bits == bit


def test_raise_for_status_several_bits_names_all() -> None:
    both = StatusBit.EMPTY_SLOT | StatusBit.DUPLICATE_SEQ
    with pytest.raises(TransitionError, match=r"^DUPLICATE_SEQ\|EMPTY_SLOT: .+; .+"):
        raise_for_status(_cache_with(both))


def test_raise_for_status_without_bits_is_silent() -> None:
    raise_for_status(init_cache(SMALL))


def test_raise_for_status_out_of_blocks_says_need_and_free() -> None:
    cache, _ = _reserve(init_cache(SMALL), jnp.array([0, 1, 5]), jnp.array([16, 16, 0]), 16)
    cache, _ = _reserve(cache, jnp.array([2, 5, 5]), jnp.array([13, 0, 0]), 16)
    with pytest.raises(CapacityError, match="a reserve needs 4, 3 of 11 are free") as error:
        raise_for_status(cache)
    assert (error.value.need, error.value.free, error.value.cached) == (4, 3, 0)
    reuse = with_prefix_reuse(SMALL, cache).reuse
    assert reuse is not None
    sizes = reuse.tree.sizes + 2  # as if two blocks were findable
    reuse = dataclasses.replace(reuse, tree=dataclasses.replace(reuse.tree, sizes=sizes))
    words = "needs 4, 3 of 11 are free and 2 cached. Nothing"
    with pytest.raises(CapacityError, match=words) as error:
        raise_for_status(dataclasses.replace(cache, reuse=reuse))
    assert error.value.cached == 2


def test_raise_for_status_fork_from_empty_slot_explains() -> None:
    cache = _fork(init_cache(SMALL), jnp.array([3]), jnp.array([1]))
    with pytest.raises(
        TransitionError, match=r"^EMPTY_SLOT: a fork names a source slot that holds"
    ):
        raise_for_status(cache)


def test_raise_for_status_double_release_explains() -> None:
    cache, _ = _reserve(init_cache(SMALL), jnp.array([0, 1, 2]), jnp.array([3, 3, 3]), 16)
    mask = jnp.arange(SMALL.max_seqs) == 1
    cache = _release(cache, mask)
    raise_for_status(cache)
    with pytest.raises(
        TransitionError, match=r"^DOUBLE_RELEASE: a release names a slot that holds"
    ):
        raise_for_status(_release(cache, mask))


def test_status_after_failure_stays_until_cleared() -> None:
    cache, _ = _reserve(init_cache(SMALL), jnp.array([0, 1, 2]), jnp.array([3, 3, 3]), 16)
    cache = _truncate(cache, jnp.array([0]), jnp.array([9]))
    cache = _truncate(cache, jnp.array([0]), jnp.array([2]))
    assert int(cache.tables.kv_lens[0]) == 2, "a later good call works"
    assert StatusBit(int(cache.status.bits)) == StatusBit.INVALID_KV_LEN
    cache = _fork(cache, jnp.array([4]), jnp.array([1]))
    both = StatusBit.INVALID_KV_LEN | StatusBit.EMPTY_SLOT
    assert StatusBit(int(cache.status.bits)) == both
    raise_for_status(clear_status(cache))
