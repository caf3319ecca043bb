"""The static description of a cache: frozen, hashable, validated when built, never mutated."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.layout import FORMATS, KVLayout, kv_format
from pallas_kernels.sealed import SEALED_FORMATS, QuantisedLayout, SealedLayout

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
      format: element format: "float32", "bfloat16", "float16", or quantised: "int8", "fp8_e4m3", "int4".
      as_bits: store narrow elements as unsigned integers (see `KVLayout`).  None means: on CPU yes, elsewhere
        no; the constructor replaces it by the answer.
      open_format: quantised formats: the full-precision format of blocks that are not full yet.
      symmetric_keys: quantised formats: K without a centre per channel.  None means: asymmetric for int8 and int4;
        fp8 has no asymmetric form.
      value_group: quantised formats: channels of V that share a scale.  None means: all of a head, for int4 32
        where head_dim is a multiple of it.
      num_wide_layers: quantised formats: that many first and last layers stay in `open_format`.
      scrub_on_free: the transition that frees a block zeroes it, all layers, before anybody can get it (see `scrub`).

    Raises:
      ValueError: a size is not a positive integer, does not fit int32, a format is unknown, or an option does not fit
        the format.
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
    open_format: str = "bfloat16"
    symmetric_keys: bool | None = None
    value_group: int | None = None
    num_wide_layers: int = 0
    scrub_on_free: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type != "int" or field.name == "num_wide_layers":
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
        if self.format not in FORMATS and self.format not in SEALED_FORMATS:
            known = sorted([*FORMATS, *SEALED_FORMATS])
            raise ValueError(f"format: expected one of {known}, got {self.format!r}")
        if not isinstance(self.scrub_on_free, bool):
            raise ValueError(f"scrub_on_free: expected True or False, got {self.scrub_on_free!r}")
        kv_format(self.open_format)
        if self.as_bits is None:
            object.__setattr__(self, "as_bits", jax.default_backend() == "cpu")
        self._settle_quantisation()

    def _settle_quantisation(self) -> None:
        """Checks the options of quantised formats and replaces None by what it means."""
        options = ("symmetric_keys", "value_group", "num_wide_layers")
        if not self.is_quantised:
            given = [name for name in options if getattr(self, name)]
            if given:
                raise ValueError(
                    f"{given[0]}: expected only with a quantised format, got {self.format!r}"
                )
            return
        format = SEALED_FORMATS[self.format]
        if self.symmetric_keys is None:
            object.__setattr__(self, "symmetric_keys", format.is_float)
        if format.is_float and not self.symmetric_keys:
            raise ValueError("symmetric_keys: expected True for fp8_e4m3, got False")
        if format.bits < 8 and self.block_size % 2:
            raise ValueError(
                f"block_size: expected an even number for {self.format}, got {self.block_size}"
            )
        if self.value_group is None:
            narrow = format.bits < 8 and self.head_dim % 32 == 0
            object.__setattr__(self, "value_group", 32 if narrow else self.head_dim)
        group = self.value_group
        if (
            isinstance(group, bool)
            or not isinstance(group, int)
            or group < 1
            or self.head_dim % group
        ):
            raise ValueError(
                f"value_group: expected a divisor of head_dim {self.head_dim}, got {group!r}"
            )
        wide = self.num_wide_layers
        if (
            isinstance(wide, bool)
            or not isinstance(wide, int)
            or not 0 <= 2 * wide < self.num_layers
        ):
            raise ValueError(
                f"num_wide_layers: expected 0 or more, and less than half of {self.num_layers} layers, got {wide!r}"
            )

    @property
    def is_quantised(self) -> bool:
        """Whether blocks are sealed into codes when they fill."""
        return self.format in SEALED_FORMATS

    @property
    def layout(self) -> KVLayout | QuantisedLayout:
        """The physical layout of the bytes."""
        if not self.is_quantised:
            return self._plain_layout(self.format, self.num_layers, self.num_blocks)
        num_sealed_layers = self.num_layers - 2 * self.num_wide_layers
        return QuantisedLayout(
            sealed=SealedLayout(
                num_layers=num_sealed_layers,
                num_blocks=self.num_blocks,
                num_kv_heads=self.num_kv_heads,
                block_size=self.block_size,
                head_dim=self.head_dim,
                format=SEALED_FORMATS[self.format],
                symmetric_keys=bool(self.symmetric_keys),
                value_group=int(self.value_group or self.head_dim),
                as_bits=bool(self.as_bits),
            ),
            open=self._plain_layout(self.open_format, num_sealed_layers, self.max_seqs),
            num_wide_layers=self.num_wide_layers,
        )

    def _plain_layout(self, format: str, num_layers: int, num_blocks: int) -> KVLayout:
        return KVLayout(
            num_layers=num_layers,
            num_blocks=num_blocks,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            format=kv_format(format),
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
