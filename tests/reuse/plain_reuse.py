"""What a cache with prefix reuse should do: the plain cache, a dictionary of prefixes, and list-based policies."""

from __future__ import annotations

from collections.abc import Sequence

from oracles import eviction as oracle
from plain_model import PlainCache

from jaxkv import CacheConfig, StatusBit
from jaxkv.access_log import TURNOVER
from jaxkv.eviction import Fair, Policy

Key = tuple[int, tuple[int, ...]]
_FINE = StatusBit(0)


class PlainReuse(PlainCache):
    """`PlainCache` with findable blocks.

    Attributes:
      texts: slot -> the tokens of its sequence (`tokens` holds the numbers that its K and V spell).
      spaces: slot -> its namespace, for admitted slots.
      known: (namespace, prefix) -> name of the block that holds the prefix's last block.
      findable: names in the index; those not in `known` stand behind a block that was forgotten.
      cached: findable names that no table has.
      contents: findable name -> the numbers its K and V spell.
      log: name of every block in use -> its history.
      ids: name -> id of the real block, told by the driver: where two blocks have equal keys, the id decides.
    """

    def __init__(self, config: CacheConfig, policy: Policy) -> None:
        super().__init__(config)
        self.policy = policy
        self.texts: dict[int, list[int]] = {}
        self.spaces: dict[int, int] = {}
        self.known: dict[Key, int] = {}
        self.findable: set[int] = set()
        self.cached: set[int] = set()
        self.contents: dict[int, list[int]] = {}
        self.log: dict[int, oracle.Entry] = {}
        self.ids: dict[int, int] = {}
        self.clock = self.turnover = self.remainder = self.inflation = 0
        self._tenant = 0

    @property
    def num_free(self) -> int:
        return super().num_free - len(self.cached)

    def usage(self, num_tenants: int) -> list[int]:
        """Blocks charged to each tenant."""
        used = [*self.refs(), *self.cached]
        return [sum(self.log[name].tenant == t for name in used) for t in range(num_tenants)]

    def chain(self, space: int, text: Sequence[int]) -> list[int]:
        """Returns the findable blocks of a text's full blocks."""
        names = []
        for end in range(self.config.block_size, len(text) + 1, self.config.block_size):
            name = self.known.get((space, tuple(text[:end])))
            if name is None:
                break
            names.append(name)
        return names

    def match(self, space: int, text: Sequence[int]) -> list[int]:
        """Returns the blocks that an admit of the text may take."""
        return self.chain(space, text[:-1])

    def victims(self, demand: list[int]) -> list[int]:
        """Returns what the policy gives up, in order."""
        names = {self.ids[name]: name for name in self.cached}
        entries = {block: self.log[name] for block, name in names.items()}
        if isinstance(self.policy, Fair):
            weights = self.policy.weights
            usage = self.usage(len(weights))
            order = oracle.fair_with_demand(entries, weights, self.config.num_blocks, usage, demand)
        else:
            order = sorted(entries, key=lambda block: (*self._key(entries[block]), block))
        return [names[block] for block in order]

    def _key(self, entry: oracle.Entry) -> tuple[int, int]:
        return self.policy.key(entry.last_access, entry.use_count, entry.score)

    def admit(
        self,
        seq_ids: Sequence[int],
        texts: Sequence[Sequence[int]],
        spaces: Sequence[int],
        news: Sequence[Sequence[int]],
        bits: StatusBit,
    ) -> StatusBit:
        """Starts sequences; news[i] are the numbers of what is to be computed, as many as needed or more."""
        bits |= self._slot_bits(seq_ids)
        rows = [row for row, s in enumerate(seq_ids) if self._exists(s)]
        if any(self.kv_len(seq_ids[row]) for row in rows):
            bits |= StatusBit.SLOT_IN_USE
        if bits:
            return bits
        hits = {row: self.match(spaces[row], texts[row]) for row in rows}
        before = self._save()
        rest = [[] for _ in seq_ids]
        for row in rows:
            slot, names = seq_ids[row], hits[row][: self.config.max_blocks_per_seq]
            if not texts[row]:
                continue
            self.spaces[slot] = spaces[row]
            self.texts[slot] = list(texts[row][: len(names) * self.config.block_size])
            self.tables[slot] = list(names)
            self.tokens[slot] = [n for name in names for n in self.contents[name]]
            self.cached -= set(names)
            rest[row] = list(texts[row][len(self.texts[slot]) :])
        bits = self.extend(
            seq_ids, [new[: len(text)] for new, text in zip(news, rest, strict=True)], rest
        )
        if bits:
            self._restore(before)
            return bits
        self._touch([(n, depth, 1) for names in hits.values() for depth, n in enumerate(names)])
        return bits

    def extend(
        self,
        seq_ids: Sequence[int],
        news: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        bits: StatusBit = _FINE,
    ) -> StatusBit:
        """Appends numbers and tokens to slots, evicting if blocks run short."""
        bits |= self._slot_bits(seq_ids)
        rows = [row for row, s in enumerate(seq_ids) if self._exists(s)]
        if any(self.kv_len(seq_ids[r]) + len(news[r]) > self.config.max_seq_len for r in rows):
            bits |= StatusBit.SEQ_TOO_LONG
        if bits:
            return bits
        before, free = self._save(), self.num_free
        lanes = self.policy.num_lanes
        demand, taken = [0] * lanes, 0
        usage_before = self.usage(lanes)
        for row in rows:
            slot = seq_ids[row]
            self._tenant = self.spaces.get(slot, 0) % 3
            took = self._append(slot, news[row])
            taken += took
            demand[self._tenant if lanes > 1 else 0] += took
            if news[row]:
                self.texts.setdefault(slot, []).extend(texts[row])
        # `victims` must see the usage before the call.
        self.usage = lambda _n: usage_before  # type: ignore[method-assign]
        victims = self.victims(demand)
        del self.usage  # type: ignore[method-assign]
        if taken > free + len(victims):
            self._restore(before)
            self.need_blocks = taken
            return StatusBit.OUT_OF_BLOCKS
        self._evict(victims[: max(0, taken - free)])
        return StatusBit(0)

    def register(self, seq_ids: Sequence[int]) -> StatusBit:
        """Makes the full blocks of slots findable; equal blocks become one."""
        bits = self._slot_bits(seq_ids)
        slots = [s for s in seq_ids if self._exists(s)]
        if any(s not in self.spaces for s in slots):
            bits |= StatusBit.NOT_ADMITTED
        if bits:
            return bits
        old = set(self.refs())
        was_findable = set(self.findable)
        uses = []
        size = self.config.block_size
        for slot in slots:
            for depth, own in enumerate(list(self.tables[slot])):
                end = (depth + 1) * size
                if end > len(self.texts[slot]):
                    break
                key = self.spaces[slot], tuple(self.texts[slot][:end])
                name = self.known.get(key)
                if name is None:
                    name = self.known[key] = own
                    self.findable.add(own)
                    self.contents[own] = self.tokens[slot][end - size : end]
                self.tables[slot][depth] = name
                self.tokens[slot][end - size : end] = self.contents[name]
                uses.append((name, depth, int(own not in was_findable)))
        self.cached -= set(self.refs())
        self._touch(uses)
        for name in old - set(self.refs()):
            del self.log[name]
        return bits

    def evict(self, count: int) -> int:
        """Gives up to `count` cached blocks up; returns how many."""
        victims = self.victims([0] * self.policy.num_lanes)[: max(0, count)]
        self._evict(victims)
        return len(victims)

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> StatusBit:
        texts, spaces = {s: list(t) for s, t in self.texts.items()}, dict(self.spaces)
        held = {s: list(t) for s, t in self.tables.items()}
        bits = super().fork(src, dst)
        if not bits:
            pairs = [(s, d) for s, d in zip(src, dst, strict=True) if self._exists(d)]
            for s, d in pairs:
                self.texts[d] = list(texts[s])
                self.spaces.pop(d, None)
                if s in spaces:
                    self.spaces[d] = spaces[s]
            self._gave_back([(held.get(d, []), 0) for _, d in pairs])
        return bits

    def reorder(self, source: Sequence[int]) -> StatusBit:
        held = {s: list(t) for s, t in self.tables.items()}
        bits = super().reorder(source)
        if not bits:
            pairs = [(slot, s) for slot, s in enumerate(source) if s in held]
            self.texts = {slot: list(self.texts[s]) for slot, s in pairs}
            self.spaces = {slot: self.spaces[s] for slot, s in pairs if s in self.spaces}
            self._gave_back([(held.get(d, []), 0) for d, s in enumerate(source) if s != d])
        return bits

    def truncate(self, seq_ids: Sequence[int], kv_lens: Sequence[int]) -> StatusBit:
        held = {s: list(t) for s, t in self.tables.items()}
        bits = super().truncate(seq_ids, kv_lens)
        if not bits:
            size = self.config.block_size
            rows = [(s, n) for s, n in zip(seq_ids, kv_lens, strict=True) if self._exists(s)]
            self._gave_back([(held.get(s, []), -(-n // size)) for s, n in rows])
        return bits

    def release(self, slots: Sequence[int]) -> StatusBit:
        held = {s: list(t) for s, t in self.tables.items()}
        bits = super().release(slots)
        if not bits:
            self._gave_back([(held[s], 0) for s in slots])
        return bits

    def _gave_back(self, rows: list[tuple[list[int], int]]) -> None:
        """Caches or frees what rows of (table, first column given back) leave without owner."""
        self.clock += max([len(table) for table, first in rows if first < len(table)], default=0)
        live = set(self.refs())
        for table, first in rows:
            for depth, name in enumerate(table):
                if depth < first or name in live or name in self.cached or name not in self.log:
                    continue
                if name in self.findable:
                    self.cached.add(name)
                    self._note(name, depth, 0)
                else:
                    del self.log[name]

    def _touch(self, uses: list[tuple[int, int, int]]) -> None:
        self.clock += max((depth + 1 for _, depth, _ in uses), default=0)
        for name, depth, count in uses:
            self._note(name, depth, count)

    def _note(self, name: int, depth: int, uses: int) -> None:
        entry = self.log[name]
        entry.last_access = self.clock - depth
        entry.use_count += uses
        score = self.policy.score(
            entry.use_count, self.config.block_size, self.turnover, self.inflation
        )
        entry.score = max(entry.score, score)

    def _evict(self, names: Sequence[int]) -> None:
        for name in names:
            self._forget(name)
            self.cached.discard(name)
            self.inflation = max(self.inflation, self.log.pop(name).score)
        units = self.remainder + len(names) * TURNOVER
        self.turnover += units // self.config.num_blocks
        self.remainder = units % self.config.num_blocks

    def _forget(self, name: int) -> None:
        """Takes a block out of the index; what stands behind it is no longer found."""
        self.findable.discard(name)
        for space, start in [key for key, known in self.known.items() if known == name]:
            for key in list(self.known):
                if key[0] == space and key[1][: len(start)] == start:
                    del self.known[key]

    def _append(self, slot: int, new: Sequence[int]) -> int:
        table = self.tables.get(slot, [])
        full = self.kv_len(slot) % self.config.block_size == 0
        if new and not full and self.refs()[table[-1]] == 1:
            self._forget(table[-1])
        return super()._append(slot, new)

    def _new_name(self) -> int:
        name = super()._new_name()
        self.log[name] = oracle.Entry(0, 0, self._tenant, score=-(2**31))
        return name

    def _cut(self, slot: int, length: int) -> None:
        super()._cut(slot, length)
        if slot in self.texts:
            del self.texts[slot][length:]
        if length == 0:
            self.texts.pop(slot, None)
            self.spaces.pop(slot, None)

    def _save(self) -> tuple[object, ...]:
        tables, tokens, _ = self._snapshot()
        texts = {slot: list(text) for slot, text in self.texts.items()}
        return (
            tables, tokens, texts, dict(self.spaces), dict(self.known), set(self.findable),
            set(self.cached), dict(self.log),
        )  # fmt: skip

    def _restore(self, saved: tuple[object, ...]) -> None:
        (
            self.tables, self.tokens, self.texts, self.spaces, self.known, self.findable,
            self.cached, self.log,
        ) = saved  # type: ignore[assignment]  # fmt: skip
