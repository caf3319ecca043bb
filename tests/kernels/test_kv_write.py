"""Writing new tokens, the xla and reference paths, against one NumPy assignment per token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compile import SHIPPED

from pallas_kernels.kv_write import write_kv
from pallas_kernels.layout import FORMATS, BatchView, KVLayout, KVStore, kv_format

NUM_BLOCKS = 9
both = pytest.mark.parametrize("implementation", ["xla", "reference"])
write = jax.jit(write_kv, static_argnames="implementation")


def make_layout(format: str = "float32") -> KVLayout:
    """Returns a small layout that stores narrow formats as bits."""
    return KVLayout(3, NUM_BLOCKS, 2, 4, 3, kv_format(format), as_bits=True)


def make_view(lens: list[tuple[int, int]], query_len: int, *, columns: int = 4) -> BatchView:
    """Returns a view of rows with the given (q_len, kv_len) in shuffled blocks, block 0 among them."""
    ids = iter(np.roll(np.random.default_rng(1).permutation(NUM_BLOCKS), 3).tolist())
    tables = np.full((len(lens), columns), NUM_BLOCKS, np.int32)
    for row, (_, kv_len) in enumerate(lens):
        for column in range(-(-kv_len // 4)):
            tables[row, column] = next(ids)
    q_lens, kv_lens = np.array(lens, np.int32).T
    index = np.arange(query_len, dtype=np.int32)[None]
    positions = np.where(index < q_lens[:, None], (kv_lens - q_lens)[:, None] + index, 0)
    return BatchView(*(jnp.asarray(x, jnp.int32) for x in (tables, kv_lens, q_lens, positions)))


def random_store(layout: KVLayout) -> KVStore:
    """Returns a store of random bits, so that any slot that changes by accident shows."""
    bits = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    return KVStore(jnp.asarray(bits.view(layout.dtype).reshape(layout.shape)), layout)


def random_kv(view: BatchView, layout: KVLayout) -> tuple[np.ndarray, np.ndarray]:
    """Returns k and v that differ everywhere, with NaN in padding."""
    rng = np.random.default_rng(2)
    shape = (*view.positions.shape, layout.num_kv_heads, layout.head_dim)
    k, v = rng.normal(size=(2, *shape)).astype(np.float32)
    padding = np.arange(view.query_len)[None, :] >= np.asarray(view.q_lens)[:, None]
    k[padding] = v[padding] = np.nan
    return k, v


def expected_bytes(store: KVStore, layer: int, k: Any, v: Any, view: BatchView) -> bytes:
    """Returns the pool's bytes after one plain assignment per token and head."""
    layout = store.layout
    kv = np.array(store.kv).view(layout.format.dtype)
    tables, kv_lens, q_lens = (
        np.asarray(x) for x in (view.block_tables, view.kv_lens, view.q_lens)
    )
    for row in range(len(kv_lens)):
        for j in range(q_lens[row]):
            position = kv_lens[row] - q_lens[row] + j
            block = tables[row, position // layout.block_size]
            if block >= layout.num_blocks:
                continue
            for head in range(layout.num_kv_heads):
                slot = kv[layer, block, head, position % layout.block_size]
                slot[: layout.head_dim] = k[row, j, head].astype(layout.format.dtype)
                slot[layout.head_dim :] = v[row, j, head].astype(layout.format.dtype)
    return kv.tobytes()


LENS = {
    "decode": [(1, 1), (1, 4), (1, 5), (1, 8), (1, 9)],
    "prefill": [(5, 5), (3, 8), (5, 10)],
    "around_an_edge": [(2, 5), (4, 8), (3, 9)],
    "empty_rows": [(0, 0), (2, 6), (0, 7), (1, 1)],
    "nothing": [(0, 0), (0, 4)],
}


@both
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_write_kv_named_lengths_match_plain_assignment(
    lens: list[tuple[int, int]], format: str, implementation: str
) -> None:
    """Field cases D8, E3, J3, O7: exactly the named slots change, in the cache's dtype; NaN stays out."""
    view = make_view(lens, query_len=6)
    store = random_store(make_layout(format))
    k, v = random_kv(view, store.layout)
    after = write(store, jnp.int32(2), k, v, view, implementation=implementation)
    assert np.asarray(after.kv).tobytes() == expected_bytes(store, 2, k, v, view)
    assert jax.tree.structure(after) == jax.tree.structure(store)
    assert after.kv.dtype == store.kv.dtype


@both
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_write_kv_layer_changes_that_layer_alone(layer: int, implementation: str) -> None:
    view = make_view(LENS["prefill"], query_len=6)
    store = random_store(make_layout())
    k, v = random_kv(view, store.layout)
    after = write(store, jnp.int32(layer), k, v, view, implementation=implementation)
    assert np.asarray(after.kv).tobytes() == expected_bytes(store, layer, k, v, view)


@both
def test_write_kv_sentinel_entries_are_dropped(implementation: str) -> None:
    """Field cases J3 and R3: positions whose table entry is NO_BLOCK reach no block, the last one least."""
    view = make_view([(3, 6), (1, 2)], query_len=3)
    tables = jnp.full_like(view.block_tables, NUM_BLOCKS).at[1].set(view.block_tables[1])
    view = BatchView(tables, view.kv_lens, view.q_lens, view.positions)
    store = random_store(make_layout())
    k, v = random_kv(view, store.layout)
    after = write(store, jnp.int32(0), k, v, view, implementation=implementation)
    assert np.asarray(after.kv).tobytes() == expected_bytes(store, 0, k, v, view)


@both
def test_write_kv_into_a_pool_full_of_sevens_changes_slot_0_alone(implementation: str) -> None:
    """Field case J3: one real token for slot 0, two padding rows."""
    layout = make_layout()
    store = KVStore(jnp.full(layout.shape, 7.0), layout)
    n = NUM_BLOCKS
    tables = jnp.array([[0, n], [n, n], [n, n]], jnp.int32)
    lens = jnp.array([1, 0, 0], jnp.int32)
    view = BatchView(tables, lens, lens, jnp.zeros((3, 1), jnp.int32))
    k = jnp.zeros((3, 1, 2, 3))
    after = write(store, jnp.int32(0), k, k - 1, view, implementation=implementation)
    changed = np.argwhere(np.any(np.asarray(after.kv) != 7, axis=-1))
    assert changed.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]


@both
def test_write_kv_wider_float_is_cast_to_the_format(implementation: str) -> None:
    """Field case O7: float32 K into a bfloat16 cache rounds once and keeps the cache's dtype."""
    view = make_view([(1, 1)], query_len=1)
    store = random_store(make_layout("bfloat16"))
    k = jnp.full((1, 1, 2, 3), 1.0 + 2.0**-8)  # a tie: rounds to the even neighbour, 1
    after = write(store, jnp.int32(0), k, k + 1, view, implementation=implementation)
    block = int(view.block_tables[0, 0])
    values = np.asarray(after.kv)[0, block, :, 0].view(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(values, [[1, 1, 1, 2, 2, 2]] * 2)


@pytest.mark.parametrize("format", FORMATS)
def test_write_kv_donated_pool_is_updated_in_place(format: str) -> None:
    layout = KVLayout(2, 4096, 2, 16, 64, kv_format(format), as_bits=True)
    view = jax.eval_shape(functools.partial(make_view, LENS["decode"], 1))
    k = jax.ShapeDtypeStruct((5, 1, 2, 64), jnp.float32)
    store = KVStore(jax.ShapeDtypeStruct(layout.shape, layout.dtype), layout)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(store, layer, k, k, view).compile(SHIPPED)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == layout.nbytes
    assert memory.temp_size_in_bytes <= layout.nbytes // 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "fast"}, "implementation: expected one of .*, got 'fast'"),
        (
            {"k": jnp.ones((2, 3, 2, 4))},
            r"k: expected \[row, .*\] = \(2, 3, 2, 3\), got \(2, 3, 2, 4\)",
        ),
        (
            {"v": jnp.ones((2, 3, 1, 3))},
            r"v: expected \[row, .*\] = \(2, 3, 2, 3\), got \(2, 3, 1, 3\)",
        ),
        ({"v": jnp.ones((2, 3, 2, 3), jnp.int32)}, "v: expected a float dtype, got int32"),
    ],
)
def test_write_kv_bad_argument_raises(change: dict[str, Any], message: str) -> None:
    store = random_store(make_layout())
    view = make_view([(3, 6), (1, 2)], query_len=3)
    k = jnp.ones((2, 3, 2, 3))
    with pytest.raises(ValueError, match=message):
        write_kv(**{"store": store, "layer": 0, "k": k, "v": k, "view": view} | change)
