"""The static description of a cache: frozen, hashable, validated when built, never mutated."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.layout import KVLayout, kv_format

_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes and format of a paged KV cache.

    Attributes:
      num_layers: layers of the model.
      num_kv_heads: K/V heads of a layer (GQA: fewer than query heads).
      head_dim: elements of one K or V vector.
      block_size: token slots of a block.
      num_blocks: blocks of the pool.
      max_seqs: sequences the cache can hold at once.
      max_blocks_per_seq: width of the block table; a sequence holds at most this many blocks.
      format: element format, one of `pallas_kernels.layout.FORMATS`.
      as_bits: store narrow elements as unsigned integers (see `KVLayout`).  None means: on CPU yes, elsewhere
        no; the constructor replaces it by the answer.

    Raises:
      ValueError: a size is not a positive integer, does not fit int32, or the format is unknown.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    max_seqs: int
    max_blocks_per_seq: int
    format: str = "float32"
    as_bits: bool | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type != "int":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_INT32:
                raise ValueError(
                    f"{field.name}: expected an integer in [1, 2**31 - 1), got {value!r}"
                )
        if self.max_blocks_per_seq * self.block_size > _MAX_INT32:
            raise ValueError(
                "max_blocks_per_seq * block_size: expected to fit int32, got "
                f"{self.max_blocks_per_seq} * {self.block_size}"
            )
        kv_format(self.format)
        if self.as_bits is None:
            object.__setattr__(self, "as_bits", jax.default_backend() == "cpu")

    @property
    def layout(self) -> KVLayout:
        """The physical layout of the pool."""
        return KVLayout(
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            format=kv_format(self.format),
            as_bits=bool(self.as_bits),
        )

    @property
    def max_seq_len(self) -> int:
        """Tokens a sequence can hold: max_blocks_per_seq * block_size."""
        return self.max_blocks_per_seq * self.block_size

    @property
    def no_block(self) -> int:
        """Sentinel of an unused table entry (NO_BLOCK)."""
        return self.num_blocks

    @property
    def no_seq(self) -> int:
        """Sentinel of a padding row: a slot that does not exist (NO_SEQ)."""
        return self.max_seqs
