"""Drives a real cache with prefix reuse beside `PlainReuse` and compares the two after every transition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from driver import SMALL, Driver, Programs, empty_cache, on_host, token_kv
from plain_reuse import PlainReuse

from jaxkv import CacheConfig, PagedKVCache, StatusBit, sharing
from jaxkv.eviction import Policy
from jaxkv.namespace import Namespace
from pallas_kernels.kv_write import write_kv

SPACES = [
    Namespace(tenant=0), Namespace(tenant=1), Namespace(tenant=2), Namespace(tenant=0, adapter="a"),
]  # fmt: skip
WORDS = np.stack([space.words() for space in SPACES])
WIDTH = 24
# Five sequences of up to 24 tokens; one config for all tests, so that they share their compiled programs.
CROWDED = dataclasses.replace(SMALL, max_blocks_per_seq=6)


class ReusePrograms(Programs):
    """The transitions of `admit`, jitted beside the others."""

    def __init__(self, config: CacheConfig, query_len: int) -> None:
        super().__init__(config, query_len)

        def admit(
            cache: PagedKVCache, ids: Any, text: Any, lens: Any, words: Any, k: Any, v: Any
        ) -> Any:
            cache, view, hits = sharing.admit(config, cache, ids, text, lens, words)
            store = cache.store
            for layer in range(config.num_layers):
                store = write_kv(store, layer, k[layer], v[layer], view)
            return dataclasses.replace(cache, store=store), view, hits

        self.admit = self.once(admit)
        self.register = self.once(functools.partial(sharing.register, config))
        self.evict = self.once(functools.partial(sharing.evict, config))


@functools.lru_cache(maxsize=64)
def programs(config: CacheConfig, query_len: int, rows: int, policy: Policy) -> ReusePrograms:
    """Returns the compiled transitions; rows and policy are the key alone."""
    del rows, policy
    return ReusePrograms(config, query_len)


@functools.lru_cache(maxsize=64)
def empty_reuse(config: CacheConfig, policy: Policy) -> PagedKVCache:
    """Returns the empty cache with prefix reuse, made once."""
    return sharing.with_prefix_reuse(config, empty_cache(config), policy)


class ReuseDriver(Driver):
    """A real cache and a plain one, both with prefix reuse, that take the same steps."""

    plain: PlainReuse

    def __init__(
        self, config: CacheConfig, policy: Policy, query_len: int = 6, rows: int = 4
    ) -> None:
        super().__init__(config, query_len, rows, programs(config, query_len, rows, policy))
        self.cache = empty_reuse(config, policy)
        self.plain = PlainReuse(config, policy)

    def leave_blocks(self, count: int) -> None:
        """Lets slots 3 and 4 hold all blocks but `count`."""
        while self.num_free > count:
            slot = 3 if len(self.plain.tables.get(3, ())) < 6 else 4
            self.write((slot, [77] * 4))

    def admit(self, *rows: tuple[int, Sequence[int], int]) -> tuple[StatusBit, list[int]]:
        """Admits (slot, text, space) rows; returns what happened and the tokens found of each."""
        seq_ids = self._pad([slot for slot, _, _ in rows], self.config.no_seq)
        texts = [list(text) for _, text, _ in rows] + [[]] * (self.rows - len(rows))
        spaces = self._pad([space for _, _, space in rows], 0)
        tokens = np.full((self.rows, WIDTH), -7, np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        news = [list(self._numbers(len(text))) for text in texts]
        numbers = np.zeros((self.rows, WIDTH), np.int64)
        for row, new in enumerate(news):
            numbers[row, : len(new)] = new
        k, v = token_kv(self.config, numbers)
        expected = self.plain.admit(seq_ids, texts, spaces, news, StatusBit(0))
        old = self.cache
        lens = np.array([len(text) for text in texts], np.int32)
        new, view, hits = self._run.admit(
            old, np.array(seq_ids, np.int32), tokens, lens, WORDS[spaces], k, v
        )
        self._settle(old, new, expected)
        view, hits = on_host((view, hits))
        hits = hits.tolist()
        for row, (slot, text) in enumerate(zip(seq_ids, texts, strict=True)):
            real = 0 <= slot < self.config.max_seqs and not expected
            assert view.q_lens[row] == (len(text) - hits[row] if real else 0)
            assert view.kv_lens[row] == (len(text) if real else 0)
            if real and text:
                assert hits[row] < len(text)
                assert view.positions[row, 0] == hits[row]
        return expected, hits[: len(rows)]

    def write(self, *rows: tuple[int, Sequence[int]]) -> StatusBit:
        """Appends (slot, text) rows."""
        seq_ids = self._pad([slot for slot, _ in rows], self.config.no_seq)
        texts = [list(text) for _, text in rows] + [[]] * (self.rows - len(rows))
        news = [list(self._numbers(len(text))) for text in texts]
        padded = np.zeros((self.rows, self.query_len), np.int64)
        for row, new in enumerate(news):
            padded[row, : len(new)] = new
        k, v = token_kv(self.config, padded)
        expected = self.plain.extend(seq_ids, news, texts)
        old = self.cache
        lens = np.array([len(text) for text in texts], np.int32)
        new, _ = self._run.append(old, np.array(seq_ids, np.int32), lens, k, v)
        self._settle(old, new, expected)
        return expected

    def register(self, *slots: int) -> StatusBit:
        """Makes the full blocks of slots findable."""
        seq_ids = self._pad(slots, self.config.no_seq)
        tokens = np.full((self.rows, WIDTH), -9, np.int32)
        for row, slot in enumerate(seq_ids):
            text = self.plain.texts.get(slot, [])
            tokens[row, : len(text)] = text
        expected = self.plain.register(seq_ids)
        old = self.cache
        new, num = self._run.register(old, np.array(seq_ids, np.int32), tokens)
        self._settle(old, new, expected)
        if not expected:
            full = [len(self.plain.texts.get(s, ())) // self.config.block_size for s in seq_ids]
            assert num.tolist() == full
        return expected

    def evict(self, count: int) -> int:
        """Gives cached blocks up."""
        want = self.plain.evict(count)
        new, got = self._run.evict(self.cache, np.int32(count))
        assert int(got) == want
        self.cache = new
        self.compare()
        return want

    @property
    def num_cached(self) -> int:
        """Cached blocks of the real cache."""
        return int(np.asarray(self.cache.reuse.tree.sizes).sum())

    def _fetch(self) -> tuple[PagedKVCache, np.ndarray, np.ndarray]:
        """Reads K and V in NumPy, which saves a dispatch; the driver's own way is tested without prefix reuse."""
        cache = on_host(self.cache)
        ids = np.minimum(cache.tables.blocks, self.config.num_blocks - 1)
        kv = np.moveaxis(
            cache.store.kv[:, ids], (1, 2, 4), (0, 2, 3)
        )  # [seq, layer, column, slot, ...]
        kv = kv.reshape(*kv.shape[:2], -1, *kv.shape[4:])
        return cache, kv[..., : self.config.head_dim], kv[..., self.config.head_dim :]

    def compare(self) -> None:
        super().compare()
        blocks, reuse = self.host.tables.blocks, self.host.reuse
        for slot, table in self.plain.tables.items():
            self.plain.ids |= {name: int(blocks[slot, at]) for at, name in enumerate(table)}
        assert reuse.tree.sizes.sum() == len(self.plain.cached)
        live = len(self.plain.refs())
        num_unowned = self.host.pool.num_free + reuse.tree.sizes.sum()
        assert num_unowned + live == self.config.num_blocks
        assert reuse.index.findable.sum() == len(self.plain.findable)
        spaces = [self.plain.spaces.get(slot) for slot in range(self.config.max_seqs)]
        words = [np.zeros(8, np.int32) if s is None else WORDS[s] for s in spaces]
        assert np.array_equal(reuse.namespaces, np.stack(words))
