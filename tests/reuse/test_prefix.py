"""The prefix index against a dictionary, with a good hash and with one that always collides."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import CacheConfig, prefix
from jaxkv.namespace import Namespace

CONFIG = CacheConfig(
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_size=4,
    num_blocks=24,
    max_seqs=4,
    max_blocks_per_seq=4,
)
ROWS, WIDTH = 3, 18
SPACES = [
    Namespace(),
    Namespace(tenant=1),
    Namespace(adapter=("a", 1)),
    Namespace(adapter=("a", 2)),
]


@functools.cache
def programs(hash_name: str) -> tuple[Any, Any, Any]:
    """Returns match, insert and remove, compiled once for each hash; the first call must find it in place."""
    del hash_name  # the key alone
    return tuple(
        jax.jit(functools.partial(function, CONFIG))
        for function in (prefix.match, prefix.insert, prefix.remove)
    )


class Index:
    """A real index and a dictionary: (namespace, prefix) -> block."""

    def __init__(self, hash_name: str = "spread") -> None:
        self.index = prefix.init_index(CONFIG)
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}
        self._match, self._insert, self._remove = programs(hash_name)

    def pack(self, prompts: list[tuple[int, list[int]]]) -> tuple[Any, Any, Any]:
        """Returns tokens (with rubbish past the lengths), lengths and namespaces of (space, prompt) rows."""
        tokens = np.full((ROWS, WIDTH), 1, np.int32)
        lens = np.zeros(ROWS, np.int32)
        words = np.zeros((ROWS, 8), np.int32)
        for row, (space, prompt) in enumerate(prompts):
            tokens[row, : len(prompt)], lens[row] = prompt, len(prompt)
            words[row] = SPACES[space].words()
        return tokens, lens, words

    def match(self, *prompts: tuple[int, list[int]]) -> list[list[int]]:
        """Looks prompts up in both, and compares."""
        tokens, lens, words = self.pack(list(prompts))
        ids, num = self._match(self.index, tokens, lens, words)
        got = [row[:n].tolist() for row, n in zip(np.asarray(ids), num.tolist(), strict=True)]
        for row, n in zip(np.asarray(ids), num.tolist(), strict=True):
            assert (row[n:] == CONFIG.no_block).all()
        for (space, prompt), hits in zip(prompts, got, strict=False):
            assert hits == self.chain(space, prompt[: max(0, len(prompt) - 1)])
        assert not any(got[len(prompts) :])
        return got[: len(prompts)]

    def chain(self, space: int, prompt: list[int]) -> list[int]:
        """Returns the blocks the dictionary knows for the full blocks of a prompt."""
        ids = []
        for end in range(4, len(prompt) + 1, 4):
            found = self.known.get((space, tuple(prompt[:end])))
            if found is None:
                break
            ids.append(found)
        return ids

    def insert(self, *rows: tuple[int, list[int], list[int]]) -> list[list[int]]:
        """Registers (space, tokens, own blocks) rows in both; returns the findable blocks of each row."""
        tokens, lens, words = self.pack([(space, prompt) for space, prompt, _ in rows])
        own = np.full((ROWS, WIDTH // 4), CONFIG.no_block, np.int32)
        for row, (_, _, ids) in enumerate(rows):
            own[row, : len(ids)] = ids
        self.index, ids, num = self._insert(self.index, tokens, lens // 4, words, own)
        got = [row[:n].tolist() for row, n in zip(np.asarray(ids), num.tolist(), strict=True)]
        return got[: len(rows)]

    def learn(self, *rows: tuple[int, list[int], list[int]]) -> None:
        """Inserts rows and checks that the first writer of a prefix keeps it."""
        want = []
        got = self.insert(*rows)
        depth = max(len(prompt) // 4 for _, prompt, _ in rows)
        for end in range(4, 4 * depth + 1, 4):
            for space, prompt, own in rows:
                if end <= len(prompt):
                    self.known.setdefault((space, tuple(prompt[:end])), own[end // 4 - 1])
        for space, prompt, _ in rows:
            want.append(self.chain(space, prompt))
        assert got == want

    def forget(self, *ids: int) -> None:
        """Removes blocks from both; in the dictionary, everything behind them becomes unreachable."""
        padded = np.full(6, CONFIG.no_block, np.int32)
        padded[: len(ids)] = ids
        self.index = self._remove(self.index, padded)
        lost = [key for key, block in self.known.items() if block in ids]
        for space, start in lost:
            for key in list(self.known):
                if key[0] == space and key[1][: len(start)] == start:
                    del self.known[key]


@pytest.fixture(params=["spread", "colliding"])
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index, once with the real hash and once with a hash that is always 0 (field case G2)."""
    if request.param == "colliding":
        monkeypatch.setattr(prefix, "_mix", jnp.zeros_like)
    return Index(request.param)


def test_match_exact_prefixes_only(index: Index) -> None:
    """Field cases B1, C4, G1, G2, G7, G8: hits, misses, and what must not be taken for a hit."""
    prompt = [5, 6, 7, 8, -1, -1, -1, 3, 9, 9]
    index.learn((0, prompt, [20, 3]))
    assert index.match((0, prompt)) == [[20, 3]]
    assert index.match((0, prompt[:8]), (0, prompt[:5]), (0, prompt[:4])) == [[20], [20], []]
    assert index.match((0, []), (0, [5, 6, 7]), (0, [5])) == [[], [], []]
    assert index.match((1, prompt), (2, prompt), (3, prompt)) == [[], [], []]
    assert index.match((0, [5, 6, 7, 8, -2, -1, -1, 3, 0])) == [[20]]
    assert index.match((0, prompt[4:8] + prompt[:4] + [1]), (0, [1, *prompt])) == [[], []]
    assert index.insert((0, [1, 2, 3], []), (0, [], [])) == [[], []]
    index.forget(20)
    assert index.match((0, prompt)) == [[]]
    index.learn((0, prompt[:4], [11]))
    # Block 3 stood behind block 20 as it was; behind the new first block it is not found.
    assert index.match((0, prompt)) == [[11]]


def test_match_parent_reused_with_other_tokens_does_not_lead_to_its_old_children(
    index: Index,
) -> None:
    """A child's key names its parent's generation: a reused id is another parent."""
    index.learn((0, [1] * 8, [4, 5]))
    index.forget(4)
    index.learn((0, [2] * 4, [4]))
    assert index.match((0, [2] * 4 + [1] * 5)) == [[4]]


def test_insert_of_a_findable_block_under_other_tokens_moves_it(index: Index) -> None:
    """Its old name and what stood behind it are gone, as if it had been removed first; its way is free again."""
    index.learn((0, [1] * 8, [4, 5]))
    assert index.insert((0, [2] * 4, [4])) == [[4]]
    index.known = {(0, (2,) * 4): 4}
    assert index.match((0, [1] * 9), (0, [2] * 4 + [1] * 5)) == [[], [4]]
    places = index.index.places(jnp.arange(CONFIG.num_blocks, dtype=jnp.int32))
    ids = index.index.table.unpacked()[:, : prefix.WAYS].reshape(-1)
    assert np.flatnonzero(ids == 4).tolist() == [int(places[4])]


def test_insert_equal_prefixes_share_the_first_block(index: Index) -> None:
    """Two rows of one call write the same prompt; a third shares its beginning."""
    index.learn((0, [1] * 8, [0, 1]), (0, [1] * 8, [2, 3]), (0, [1] * 4 + [7] * 8, [4, 5, 6]))
    assert index.match((0, [1] * 9), (0, [1] * 4 + [7] * 9)) == [[0, 1], [0, 5, 6]]
    index.learn((1, [1] * 8, [7, 8]))
    assert index.match((0, [1] * 9), (1, [1] * 9)) == [[0, 1], [7, 8]]


def test_index_random_calls_match_the_dictionary() -> None:
    """Small alphabet, so that prefixes coincide; every block is reused many times."""
    index = Index()
    rng = np.random.default_rng(2)
    for _ in range(120):
        free = sorted(set(range(CONFIG.num_blocks)) - set(index.known.values()))
        prompts = [
            (
                int(rng.integers(2)),
                rng.integers(0, 2, rng.integers(0, WIDTH)).repeat(2)[:WIDTH].tolist(),
            )
            for _ in range(ROWS)
        ]
        index.match(*prompts)
        rows = []
        for space, prompt in prompts:
            own = [free.pop() for _ in range(min(len(prompt) // 4, len(free)))]
            rows.append((space, prompt[: 4 * len(own) + 2], own))
        index.learn(*rows)
        index.match(*prompts)
        known = sorted(set(index.known.values()))
        gone = rng.permutation(known)[: rng.integers(0, 7)].tolist()
        index.forget(*gone)
        if len(index.known) > 16:
            index.forget(*sorted(set(index.known.values()))[:6])
        findable = set(np.flatnonzero(np.asarray(index.index.findable)).tolist())
        assert set(index.known.values()) <= findable
        stale = sorted(findable - set(index.known.values()))
        for at in range(0, len(stale), 6):
            index.forget(*stale[at : at + 6])


def test_insert_into_a_full_set_is_refused_and_stays_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prefixes in one set of eight ways: the ninth block and what follows it are not findable."""
    monkeypatch.setattr(prefix, "_mix", jnp.zeros_like)
    index = Index("colliding")
    for block in range(7):
        index.learn((0, [block] * 4, [block]))
    assert index.insert((0, [50] * 12, [10, 11, 12])) == [[10]]
    assert index.insert((0, [60] * 4, [13]), (0, [3] * 4, [14])) == [[], [3]]
    index.known[0, (50,) * 4] = 10
    assert index.match((0, [50] * 13), (0, [60] * 5), (0, [6] * 5)) == [[10], [], [6]]
    index.forget(2)
    assert index.insert((0, [60] * 4, [13])) == [[13]]


@pytest.mark.parametrize(
    ("tokens", "words", "message"),
    [
        (np.zeros((2, 8)), np.zeros((2, 8), np.int32), "tokens: expected i32"),
        (
            np.zeros((2, 8), np.int32),
            np.zeros((2, 7), np.int32),
            r"namespaces: expected int32\[2, 8\]",
        ),
    ],
)
def test_match_bad_arrays_raise(tokens: Any, words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefix.match(CONFIG, prefix.init_index(CONFIG), tokens, np.zeros(2, np.int32), words)
