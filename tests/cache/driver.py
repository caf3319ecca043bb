"""Drives a real cache beside `PlainCache` and compares the two after every transition.

Every token gets a number that no other token of the test has.  Its K and V spell that number, the layer
and the head in small integers, exact in every format, and K and V differ everywhere; so a wrong slot, a
missed copy, swapped K and V or a swapped layer all read back as something else.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from plain_model import PlainCache

from jaxkv import (
    BatchView,
    CacheConfig,
    PagedKVCache,
    StatusBit,
    check_invariants,
)
from jaxkv import (
    cache as transitions,
)
from jaxkv.kv_store import gather_dense
from jaxkv.permute import reorder
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.kv_write import write_kv

Array = jax.Array

# Five sequences of up to 16 tokens want 20 blocks; the pool has 11.
SMALL = CacheConfig(
    num_layers=2,
    num_kv_heads=2,
    head_dim=2,
    block_size=4,
    num_blocks=11,
    max_seqs=5,
    max_blocks_per_seq=4,
)


def token_kv(config: CacheConfig, numbers: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k and v f32[layer, *numbers.shape, kv_head, head_dim] that spell the given numbers."""
    numbers = np.asarray(numbers, np.int64)
    shape = (config.num_layers, *numbers.shape, config.num_kv_heads, config.head_dim)
    layer, head, element = (
        np.arange(n).reshape([-1 if axis == at else 1 for axis in range(len(shape))])
        for n, at in ((shape[0], 0), (shape[-2], -2 % len(shape)), (shape[-1], len(shape) - 1))
    )
    digit = np.where(element % 2 == 0, numbers[None, ..., None, None] % 128, 0) + np.where(
        element % 2 == 1, numbers[None, ..., None, None] // 128, 0
    )
    k = np.broadcast_to(digit + 16 * layer + 8 * head, shape).astype(np.float32)
    return k, -k - 1


class Programs:
    """The transitions, jitted for one config; a second trace of any of them is an error."""

    def __init__(self, config: CacheConfig, query_len: int) -> None:
        def append(
            cache: PagedKVCache, seq_ids: Array, q_lens: Array, k: Array, v: Array
        ) -> tuple[PagedKVCache, BatchView]:
            cache, view = transitions.reserve(config, cache, seq_ids, q_lens, query_len)

            def write(layer: Array, store: Any) -> Any:
                layer_k, layer_v = k[layer], v[layer]
                if config.is_quantised:
                    q = jnp.zeros_like(layer_k)
                    return cached_attention(q, layer_k, layer_v, store, layer, view, scale=1.0)[1]
                return write_kv(store, layer, layer_k, layer_v, view)

            store = jax.lax.fori_loop(0, config.num_layers, write, cache.store)
            return dataclasses.replace(cache, store=store), view

        def read_all(cache: PagedKVCache) -> tuple[Array, Array]:
            """Reads every slot to its capacity, and the block after its full ones from its open block."""
            read = functools.partial(gather_dense, cache.store, kv_len=config.max_seq_len)
            sealed = jax.vmap(read)(cache.tables.blocks)
            if cache.open_blocks is None:
                return sealed
            return jax.vmap(functools.partial(_with_open_block, config, cache.store))(
                *sealed, cache.open_blocks.ids, cache.tables.kv_lens
            )

        def once(function: Callable[..., Any]) -> Callable[..., Any]:
            traces = itertools.count(1)

            def traced(*args: Any) -> Any:
                assert next(traces) == 1, "a transition was traced again: its shapes are not static"
                return function(*args)

            return jax.jit(traced)

        self.once = once
        self.append = once(append)
        self.read_all = once(read_all)
        self.fork = once(lambda *args: transitions.fork(config, *args))
        self.reorder = once(lambda *args: reorder(config, *args))
        self.truncate = once(lambda *args: transitions.truncate(config, *args))
        self.release = once(lambda *args: transitions.release(config, *args))


@functools.lru_cache(maxsize=64)
def programs(config: CacheConfig, query_len: int = 6, rows: int = 4) -> Programs:
    """Returns the compiled transitions for calls of `rows` rows, shared by all tests of the process."""
    del rows  # part of the key alone: other rows are other programs
    return Programs(config, query_len)


class Driver:
    """A real cache and a plain one that take the same steps.

    Args:
      config: of the cache.
      query_len: static width of every append.
      rows: static number of rows of every call; shorter calls are padded.
      run: the compiled transitions; None: those without prefix reuse.
    """

    def __init__(
        self, config: CacheConfig, query_len: int = 6, rows: int = 4, run: Programs | None = None
    ) -> None:
        self.config = config
        self.query_len = query_len
        self.rows = rows
        self.cache = empty_cache(config)
        self.plain = PlainCache(config)
        self.host = self.cache  # as `compare` has fetched it
        self._run = run or programs(config, query_len, rows)
        self._written = 0
        self._sealed: dict[int, tuple[tuple[int, ...], bytes]] = {}

    def append(self, *pieces: tuple[int, int]) -> StatusBit:
        """Reserves and writes new tokens for (slot, q_len) pairs, in both caches, and compares."""
        seq_ids = self._pad([slot for slot, _ in pieces], self.config.no_seq)
        q_lens = self._pad([q_len for _, q_len in pieces], 0)
        news = [list(self._numbers(q_len)) for q_len in q_lens]
        padded = np.zeros((self.rows, self.query_len), np.int64)
        for row, new in enumerate(news):
            padded[row, : len(new)] = new[: self.query_len]
        k, v = token_kv(self.config, padded)
        real = [0 <= slot < self.config.max_seqs for slot in seq_ids]
        k[:, ~np.array(real)] = v[:, ~np.array(real)] = (
            np.nan
        )  # padding rows must not reach the pool
        bad = any(ok and not 0 <= n <= self.query_len for ok, n in zip(real, q_lens, strict=True))
        bits = StatusBit.INVALID_Q_LEN if bad else StatusBit(0)
        expected = self.plain.reserve(seq_ids, news, bits)
        old = self.cache
        new, view = self._run.append(
            old, np.array(seq_ids, np.int32), np.array(q_lens, np.int32), k, v
        )
        self._settle(old, new, expected)
        self._check_view(view, seq_ids, q_lens, failed=bool(expected))
        return expected

    def fork(self, *pairs: tuple[int, int]) -> StatusBit:
        """Forks (src, dst) pairs in both caches, and compares."""
        src = self._pad([s for s, _ in pairs], 0)
        dst = self._pad([d for _, d in pairs], self.config.no_seq)
        expected = self.plain.fork(src, dst)
        old = self.cache
        new = self._run.fork(old, np.array(src, np.int32), np.array(dst, np.int32))
        self._settle(old, new, expected)
        return expected

    def reorder(self, source: Sequence[int]) -> StatusBit:
        """Lets every slot hold what slot source[slot] held, in both caches, and compares."""
        expected = self.plain.reorder(source)
        old = self.cache
        new = self._run.reorder(old, np.array(source, np.int32))
        self._settle(old, new, expected)
        return expected

    def truncate(self, *pieces: tuple[int, int]) -> StatusBit:
        """Cuts slots to lengths, given as (slot, kv_len) pairs, in both caches, and compares."""
        seq_ids = self._pad([slot for slot, _ in pieces], self.config.no_seq)
        kv_lens = self._pad([length for _, length in pieces], 0)
        expected = self.plain.truncate(seq_ids, kv_lens)
        old = self.cache
        new = self._run.truncate(old, np.array(seq_ids, np.int32), np.array(kv_lens, np.int32))
        self._settle(old, new, expected)
        return expected

    def release(self, *slots: int) -> StatusBit:
        """Releases the slots in both caches, and compares."""
        mask = np.isin(np.arange(self.config.max_seqs), slots)
        expected = self.plain.release(slots)
        old = self.cache
        self._settle(old, self._run.release(old, mask), expected)
        return expected

    def read(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the real cache holds of a slot: k, v f32[layer, token, kv_head, head_dim]."""
        k, v = self._run.read_all(self.cache)
        length = int(self.cache.tables.kv_lens[slot])
        return np.asarray(k)[slot, :, :length], np.asarray(v)[slot, :, :length]

    def refs(self, slot: int) -> list[int]:
        """Returns the real reference counts of the blocks of a slot, in order."""
        blocks = np.asarray(self.cache.tables.blocks)[slot]
        return np.asarray(self.cache.pool.ref_counts)[
            blocks[blocks < self.config.no_block]
        ].tolist()

    @property
    def num_free(self) -> int:
        """Free blocks of the real cache."""
        return int(self.cache.pool.num_free)

    def compare(self) -> None:
        """Asserts that the real cache holds exactly what the plain one holds."""
        config, plain = self.config, self.plain
        self.host, k, v = self._fetch()
        check_invariants(config, self.host)
        assert self.host.pool.num_free == plain.num_free
        kv_lens = self.host.tables.kv_lens
        assert kv_lens.tolist() == [plain.kv_len(slot) for slot in range(config.max_seqs)]
        blocks = self.host.tables.blocks
        pairs = {
            (name, int(blocks[slot, column]))
            for slot, table in plain.tables.items()
            for column, name in enumerate(table)
        }
        names, ids = {name for name, _ in pairs}, {block for _, block in pairs}
        assert len(names) == len(ids) == len(pairs), (
            "blocks are shared otherwise than they should be"
        )
        if config.is_quantised:
            self._compare_near(k, v)
            self._compare_sealed(blocks)
            return
        numbers = np.full((config.max_seqs, config.max_seq_len), -1)
        for slot, written in plain.tokens.items():
            numbers[slot, : len(written)] = written
        for got, want in zip((k, v), token_kv(config, numbers), strict=True):
            assert np.all((got == want.swapaxes(0, 1)).all((1, 3, 4)) | (numbers < 0))

    def _fetch(self) -> tuple[PagedKVCache, np.ndarray, np.ndarray]:
        """Returns the cache and what all slots hold, k and v [seq, layer, token, kv_head, head_dim], on the host."""
        cache, (k, v) = on_host((self.cache, self._run.read_all(self.cache)))
        return cache, k, v

    def _compare_near(self, k: np.ndarray, v: np.ndarray) -> None:
        """Asserts that K and V are within half a step of what was written."""
        for slot, numbers in self.plain.tokens.items():
            want_k, want_v = token_kv(self.config, numbers)
            slack_k, slack_v = quantisation_slack(self.config, want_k, want_v)
            assert np.all(np.abs(k[slot, :, : len(numbers)] - want_k) <= slack_k)
            assert np.all(np.abs(v[slot, :, : len(numbers)] - want_v) <= slack_v)

    def _compare_sealed(self, blocks: np.ndarray) -> None:
        """Asserts that a sealed block keeps its bytes, and that its bytes depend on its tokens alone."""
        arrays = [np.asarray(x) for x in jax.tree.leaves(self.cache.store.sealed)]
        size, now = self.config.block_size, {}
        for slot, numbers in self.plain.tokens.items():
            for column in range(len(numbers) // size):
                tokens = tuple(numbers[column * size : (column + 1) * size])
                block = int(blocks[slot, column])
                now[block] = (tokens, b"".join(x[:, block].tobytes() for x in arrays))
        for block, (tokens, codes) in now.items():
            before = self._sealed.get(block)
            assert before is None or before[0] != tokens or before[1] == codes, "codes changed"
        assert len(set(now.values())) == len({tokens for tokens, _ in now.values()}), (
            "codes depend on more than the tokens"
        )
        self._sealed = now

    def _settle(self, old: PagedKVCache, new: PagedKVCache, expected: StatusBit) -> None:
        """Takes the new state over after comparing bits, unchanged leaves and contents."""
        bits = StatusBit(int(new.status.bits))
        if expected & ~StatusBit.OUT_OF_BLOCKS:
            # How many blocks a call with bad rows would need is nobody's business.
            bits &= ~StatusBit.OUT_OF_BLOCKS
        assert bits == expected
        assert_same_dtypes(old, new)
        if expected:
            assert_only_status_differs(old, new)
        if expected == StatusBit.OUT_OF_BLOCKS:
            assert int(new.status.need_blocks) == self.plain.need_blocks
        self.cache = dataclasses.replace(new, status=old.status) if expected else new
        self.compare()

    def _check_view(
        self, view: BatchView, seq_ids: list[int], q_lens: list[int], failed: bool
    ) -> None:
        view, blocks = on_host(view), self.host.tables.blocks
        for row, (slot, q_len) in enumerate(zip(seq_ids, q_lens, strict=True)):
            real = 0 <= slot < self.config.max_seqs
            q_len = q_len if real and not failed else 0
            kv_len = self.plain.kv_len(slot)
            assert view.q_lens[row] == q_len
            assert view.kv_lens[row] == kv_len
            positions = [*range(kv_len - q_len, kv_len)] + [0] * (self.query_len - q_len)
            assert view.positions[row].tolist() == positions
            want = blocks[slot] if real else np.full_like(blocks[0], self.config.no_block)
            assert np.array_equal(view.block_tables[row], want)

    def _numbers(self, count: int) -> range:
        first = self._written
        self._written += max(0, count)
        return range(first, self._written)

    def _pad(self, values: Sequence[int], fill: int) -> list[int]:
        assert len(values) <= self.rows, "the test gives more rows than the driver has"
        return [*values, *[fill] * (self.rows - len(values))]


def on_host(tree: Any) -> Any:
    """Returns the arrays of a tree as NumPy's, which on a CPU share their bytes (nothing here donates).

    `jax.device_get` takes seven times as long, a good part of a property test's time.
    """
    return jax.tree.map(np.asarray, tree)


@functools.lru_cache(maxsize=64)
def empty_cache(config: CacheConfig) -> PagedKVCache:
    """Returns the empty cache of a config, made once (nothing here donates); poisoned, unless free blocks must be zero."""
    fresh = transitions.init_cache(config)
    return fresh if config.scrub_on_free else poisoned(fresh)


def poisoned(cache: PagedKVCache) -> PagedKVCache:
    """Returns the cache with NaN in every slot of the pool: what nobody has written holds anything."""

    def nan(x: Array) -> Array:
        """NaN in every float format and its bits; the integer codes become their largest value."""
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.full_like(x, jnp.nan)
        return jnp.full_like(x, jnp.iinfo(x.dtype).max >> (x.dtype == jnp.uint16))

    return dataclasses.replace(cache, store=jax.tree.map(nan, cache.store))


def _with_open_block(
    config: CacheConfig, store: Any, k: Array, v: Array, open_id: Array, kv_len: Array
) -> tuple[Array, Array]:
    """Returns K and V of a slot (f32[layer, token, ...]) with the tokens after its full blocks from its open block."""
    wide, size = config.num_wide_layers, config.block_size
    ids = jnp.minimum(open_id, config.max_seqs - 1)[None]
    tail = gather_dense(store.open, ids, size)
    begin = kv_len // size * size
    inner = slice(wide, config.num_layers - wide)

    def patched(x: Array, block: Array) -> Array:
        padded = jnp.pad(x[inner], ((0, 0), (0, size), (0, 0), (0, 0)))
        padded = jax.lax.dynamic_update_slice_in_dim(padded, block, begin, axis=1)
        return x.at[inner].set(padded[:, : x.shape[1]])

    return patched(k, tail[0]), patched(v, tail[1])


def quantisation_slack(config: CacheConfig, k: np.ndarray, v: np.ndarray) -> tuple[Any, Any]:
    """Returns how far the cache may be from k, v [layer, token, kv_head, head_dim]: half a step where they are codes.

    Steps follow from the numbers: K's range over a block, V's largest value of a token; a 64th more for bfloat16 scales, and
    for 4 bits a step more, since clipped ranges are allowed to win.
    """
    if not config.is_quantised:
        return 0.0, 0.0
    slack_k, slack_v = np.zeros(k.shape), np.zeros(v.shape)
    steps = {"int8": 254, "int4": 14, "fp8_e4m3": 16}[config.format]
    room = (4 if config.format == "int4" else 1.0) * (1 + 1 / 64)
    first, size = config.num_wide_layers, config.block_size
    for begin in range(0, k.shape[1] - size + 1, size):
        part = np.s_[first : config.num_layers - first, begin : begin + size]
        top = np.abs(k[part]).max(1, keepdims=True)
        reach = k[part].max(1, keepdims=True) - k[part].min(1, keepdims=True)
        reach = 2 * top if config.symmetric_keys else reach + top / 64
        slack_k[part] = reach / steps / 2 * room
        slack_v[part] = 2 * np.abs(v[part]).max(-1, keepdims=True) / steps / 2 * room
    return slack_k, slack_v


def assert_only_status_differs(old: PagedKVCache, new: PagedKVCache) -> None:
    """Asserts that every leaf but `status` is bit-identical."""
    for part in ("pool", "tables", "store", "open_blocks", "reuse"):
        pairs = zip(
            jax.tree.leaves(getattr(old, part)), jax.tree.leaves(getattr(new, part)), strict=True
        )
        for before, after in pairs:
            assert np.asarray(before).tobytes() == np.asarray(after).tobytes(), f"{part} changed"


def assert_same_dtypes(old: PagedKVCache, new: PagedKVCache) -> None:
    """Asserts that structure, shapes and dtypes of the state are as before (field case O7)."""
    assert jax.tree.structure(old) == jax.tree.structure(new)
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
