"""What the cache should do, in plain Python: dictionaries of lists, one row after the other.

Block ids here are names of our own (a counter), so a test compares the pattern of sharing, not the ids.
Reference counts are not stored: they are counted from the tables whenever somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxkv import CacheConfig, StatusBit


class PlainCache:
    """Tables and tokens of every live slot.

    Attributes:
      tables: slot -> names of its blocks.
      tokens: slot -> what was written, one number a token.
      opened: slots whose last block is still there in full precision (what quantised formats can cut into).
      need_blocks: what the last reserve that ran out of blocks asked for.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.opened: set[int] = set()
        self.need_blocks = 0
        self._names = 0

    def refs(self) -> Counter[int]:
        """Returns how many table entries name each block in use."""
        return Counter(block for table in self.tables.values() for block in table)

    @property
    def num_free(self) -> int:
        """Blocks that no table names."""
        return self.config.num_blocks - len(self.refs())

    def kv_len(self, slot: int) -> int:
        """Tokens of a slot, 0 if it is empty or does not exist."""
        return len(self.tokens.get(slot, ()))

    def reserve(
        self, seq_ids: Sequence[int], news: Sequence[Sequence[int]], bits: StatusBit
    ) -> StatusBit:
        """Appends `news[i]` to slot `seq_ids[i]` unless `bits` says that the call is bad already."""
        bits |= self._slot_bits(seq_ids)
        rows = [(s, new) for s, new in zip(seq_ids, news, strict=True) if self._exists(s)]
        if any(self.kv_len(s) + len(new) > self.config.max_seq_len for s, new in rows):
            bits |= StatusBit.SEQ_TOO_LONG
        if bits:
            return bits
        before = self._snapshot()
        need = 0
        for slot, new in rows:
            need += self._append(slot, new)
        if need > before[2]:
            self.tables, self.tokens, _ = before
            self.need_blocks = need
            return StatusBit.OUT_OF_BLOCKS
        self.opened |= {slot for slot, new in rows if new}
        return StatusBit(0)

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> StatusBit:
        """Makes every dst[i] hold what src[i] held before the call."""
        bits = self._slot_bits(dst)
        pairs = [(s, d) for s, d in zip(src, dst, strict=True) if self._exists(d)]
        if any(not self._exists(s) for s, _ in pairs):
            bits |= StatusBit.INVALID_SEQ
        if any(self._exists(s) and not self.kv_len(s) for s, _ in pairs):
            bits |= StatusBit.EMPTY_SLOT
        if not bits:
            tables, tokens, _ = self._snapshot()
            opened = set(self.opened)
            for s, d in pairs:
                self.tables[d], self.tokens[d] = list(tables[s]), list(tokens[s])
                self.opened = self.opened | {d} if s in opened else self.opened - {d}
        return bits

    def reorder(self, source: Sequence[int]) -> StatusBit:
        """Makes every slot hold what slot source[slot] held before the call; `no_seq` is a slot without tokens."""
        if any(not self._exists(s) and s != self.config.no_seq for s in source):
            return StatusBit.INVALID_SEQ
        tables, tokens, _ = self._snapshot()
        held = [(slot, s) for slot, s in enumerate(source) if s in tables]
        self.tables = {slot: list(tables[s]) for slot, s in held}
        self.tokens = {slot: list(tokens[s]) for slot, s in held}
        self.opened = {slot for slot, s in held if s in self.opened}
        return StatusBit(0)

    def truncate(self, seq_ids: Sequence[int], kv_lens: Sequence[int]) -> StatusBit:
        """Cuts every slot seq_ids[i] to kv_lens[i] tokens."""
        bits = self._slot_bits(seq_ids)
        rows = [(s, n) for s, n in zip(seq_ids, kv_lens, strict=True) if self._exists(s)]
        if any(not 0 <= n <= self.kv_len(s) for s, n in rows):
            bits |= StatusBit.INVALID_KV_LEN
        if any(0 <= n <= self.kv_len(s) and not self._can_cut(s, n) for s, n in rows):
            bits |= StatusBit.SEALED_BLOCK
        if not bits:
            for slot, length in rows:
                self._cut(slot, length)
        return bits

    def release(self, slots: Sequence[int]) -> StatusBit:
        """Empties the slots."""
        if any(not self.kv_len(s) for s in slots):
            return StatusBit.DOUBLE_RELEASE
        for slot in slots:
            self._cut(slot, 0)
        return StatusBit(0)

    def _append(self, slot: int, new: Sequence[int]) -> int:
        """Appends to one slot; returns how many blocks it took from the pool."""
        table, tokens = self.tables.setdefault(slot, []), self.tokens.setdefault(slot, [])
        taken = 0
        if new and len(tokens) % self.config.block_size and self.refs()[table[-1]] > 1:
            table[-1] = self._new_name()
            taken += 1
        tokens.extend(new)
        while len(table) * self.config.block_size < len(tokens):
            table.append(self._new_name())
            taken += 1
        if not tokens:
            del self.tables[slot], self.tokens[slot]
        return taken

    def _can_cut(self, slot: int, length: int) -> bool:
        size, old = self.config.block_size, self.kv_len(slot)
        if not self.config.is_quantised or length == old or length % size == 0:
            return True
        return slot in self.opened and length // size == (old - 1) // size

    def _cut(self, slot: int, length: int) -> None:
        size = self.config.block_size
        if length == 0 or (length - 1) // size != (self.kv_len(slot) - 1) // size:
            self.opened.discard(slot)
        if length == 0:
            self.tables.pop(slot, None)
            self.tokens.pop(slot, None)
            return
        del self.tokens[slot][length:]
        del self.tables[slot][-(-length // self.config.block_size) :]

    def _new_name(self) -> int:
        self._names += 1
        return self._names

    def _exists(self, slot: int) -> bool:
        return 0 <= slot < self.config.max_seqs

    def _slot_bits(self, seq_ids: Sequence[int]) -> StatusBit:
        bits = StatusBit(0)
        named = [s for s in seq_ids if s != self.config.no_seq]
        if any(not self._exists(s) for s in named):
            bits |= StatusBit.INVALID_SEQ
        named = [s for s in named if self._exists(s)]
        if len(set(named)) < len(named):
            bits |= StatusBit.DUPLICATE_SEQ
        return bits

    def _snapshot(self) -> tuple[dict[int, list[int]], dict[int, list[int]], int]:
        tables = {slot: list(table) for slot, table in self.tables.items()}
        tokens = {slot: list(values) for slot, values in self.tokens.items()}
        return tables, tokens, self.num_free
