"""What each KV format stores: bits of an element, scales beside the codes, bytes of a block and of a whole store.

Pure Python; nothing here imports JAX. `tests/test_format_bytes.py` holds it against the arrays that the cache allocates.

Invariants: byte counts are exact integers and count every array, without device padding; an element's width comes from
`KV_FORMATS` or `QUANTISED_FORMATS` and nowhere else; a quantised format is never counted as its codes alone.

References: pallas_kernels/sealed.py (the arrays of quantised formats and their axes).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral

SCALE_BITS = 16
OPEN_FORMAT = "bfloat16"
DEFAULT_BLOCK_SIZE = 16
DEFAULT_SEALED_BLOCK_SIZE = 64
_TPU_LANES = 128  # see `_affine_array`


@dataclass(frozen=True)
class ElementFormat:
    """A format without scales: how many bits one stored element takes."""

    element_bits: int


@dataclass(frozen=True)
class QuantisedFormat:
    """A format whose full blocks are sealed into codes with bfloat16 scales beside them.

    Attributes:
      code_bits: bits of one code.
      has_centres: K is asymmetric unless asked otherwise: a centre beside every scale.
      default_value_group: channels of V that share a scale, where they divide head_dim; None means the whole head.
    """

    code_bits: int
    has_centres: bool
    default_value_group: int | None = None


@dataclass(frozen=True)
class KVOptions:
    """What a quantised format may be asked for besides its block size; fields as in `CacheConfig`.

    Attributes:
      symmetric_keys: K without centres; None means the format's own.
      value_group: channels of V that share a scale; None means the format's own.
      num_wide_layers: layers at each end that are not quantised.
    """

    symmetric_keys: bool | None = None
    value_group: int | None = None
    num_wide_layers: int = 0

    def asked(self) -> dict[str, object]:
        """Returns the options that were asked for, by name; empty where all are the format's own."""
        own = asdict(OWN_OPTIONS)
        return {name: value for name, value in asdict(self).items() if value != own[name]}


OWN_OPTIONS = KVOptions()  # every option the format's own
KV_FORMATS: dict[str, ElementFormat] = {
    "float32": ElementFormat(element_bits=32),
    "float16": ElementFormat(element_bits=16),
    "bfloat16": ElementFormat(element_bits=16),
}
QUANTISED_FORMATS: dict[str, QuantisedFormat] = {
    "int8": QuantisedFormat(8, has_centres=True),
    "fp8_e4m3": QuantisedFormat(8, has_centres=False),
    "int4": QuantisedFormat(4, has_centres=True, default_value_group=32),
}


def check_count(name: str, value: object, minimum: int = 0) -> int:
    """Returns `value` as an int.

    Raises: ValueError unless it is an integer of at least `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise ValueError(f"{name}: expected an integer >= {minimum}, got {value!r}")
    return int(value)


# Formats ------------------------------------------------------------------------------------------


def element_bits(kv_format: str) -> int:
    """Returns the bits one element takes in a format without scales.

    Raises: ValueError naming the value and the formats without scales.
    """
    if kv_format not in KV_FORMATS:
        raise ValueError(f"kv_format: expected one of {', '.join(KV_FORMATS)}; got {kv_format!r}")
    return KV_FORMATS[kv_format].element_bits


def is_quantised(kv_format: str) -> bool:
    """Returns whether a format has scales and open blocks.

    Raises: ValueError naming the value and the known formats.
    """
    if kv_format not in KV_FORMATS and kv_format not in QUANTISED_FORMATS:
        known = ", ".join([*KV_FORMATS, *QUANTISED_FORMATS])
        raise ValueError(f"kv_format: expected one of {known}; got {kv_format!r}")
    return kv_format in QUANTISED_FORMATS


def default_block_size(kv_format: str) -> int:
    """Returns the block size a format is used with unless another is asked for: 16, or 64 where its tokens share scales.

    Raises: ValueError as `is_quantised`.
    """
    return DEFAULT_SEALED_BLOCK_SIZE if is_quantised(kv_format) else DEFAULT_BLOCK_SIZE


def default_value_group(kv_format: str, head_dim: int) -> int:
    """Returns the channels of V that share a scale in a quantised format."""
    group = QUANTISED_FORMATS[kv_format].default_value_group
    return head_dim if group is None or head_dim % group else group


def values_bytes(num_values: int, kv_format: str) -> int:
    """Returns the bytes of `num_values` elements of a format without scales, in whole bytes."""
    return -(-check_count("num_values", num_values) * element_bits(kv_format) // 8)


# Blocks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockArray:
    """One array's part of a block in one layer: its axes after [layer, block], and the bits of an element."""

    shape: tuple[int, ...]
    element_bits: int

    @property
    def nbytes(self) -> int:
        """Bytes, without device padding."""
        return math.prod(self.shape) * self.element_bits // 8


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block in one layer: `codes` (elements, where there are no scales), scales of K and V."""

    codes: int
    key_affine: int = 0
    value_affine: int = 0

    @property
    def scales(self) -> int:
        """Bytes beside the codes."""
        return self.key_affine + self.value_affine

    @property
    def total(self) -> int:
        """All bytes."""
        return self.codes + self.scales


def block_arrays(
    num_kv_heads: int,
    head_dim: int,
    kv_format: str,
    block_size: int | None = None,
    *,
    symmetric_keys: bool | None = None,
    value_group: int | None = None,
) -> dict[str, BlockArray]:
    """Returns the arrays of one block in one layer by name, of a sealed block for quantised formats::

        codes         [H, B * code_bits / 8, 2 * D]   bytes; elements [H, B, 2 * D] where there are no scales
        key_affine    [1, or 2 with centres, H * D]   bfloat16; rows padded to multiples of 128
        value_affine  [D / value_group, H * B]        numbers, a lone row first cut into two

    Args:
      num_kv_heads, head_dim: H and D.
      kv_format: any format.
      block_size: B; None means the format's own.
      symmetric_keys, value_group: as in `CacheConfig`; None means the format's own.

    Raises:
      ValueError: a bad number or format, an option on a format without scales, fp8_e4m3 with asymmetric keys, a group
        that does not divide head_dim, an odd block of codes below 8 bits.
    """
    quantised = is_quantised(kv_format)
    heads, dim = check_count("num_kv_heads", num_kv_heads, 1), check_count("head_dim", head_dim, 1)
    size = default_block_size(kv_format) if block_size is None else block_size
    size = check_count("block_size", size, 1)
    if not quantised:
        _refuse_options(kv_format, symmetric_keys=symmetric_keys, value_group=value_group)
        return {"codes": BlockArray((heads, size, 2 * dim), element_bits(kv_format))}
    format = QUANTISED_FORMATS[kv_format]
    if format.code_bits < 8 and size % 2:
        raise ValueError(f"block_size: expected an even number for {kv_format}, got {size}")
    if symmetric_keys is False and not format.has_centres:
        raise ValueError(f"symmetric_keys: expected True for {kv_format}, got False")
    centres = format.has_centres and not symmetric_keys
    group = default_value_group(kv_format, dim) if value_group is None else value_group
    if dim % check_count("value_group", group, 1):
        raise ValueError(f"value_group: expected a divisor of head_dim {dim}, got {group}")
    return {
        "codes": BlockArray((heads, size * format.code_bits // 8, 2 * dim), 8),
        "key_affine": _affine_array(2 if centres else 1, heads * dim),
        "value_affine": _affine_array(dim // group, heads * size),
    }


def _affine_array(rows: int, width: int) -> BlockArray:
    """Returns rows of scales or centres; they fill whole TPU registers, and a lone row is stored as two."""
    if rows == 1:
        rows, width = 2, -(-width // 2)
    return BlockArray((rows, -(-width // _TPU_LANES) * _TPU_LANES), SCALE_BITS)


def block_bytes(
    num_kv_heads: int,
    head_dim: int,
    kv_format: str,
    block_size: int | None = None,
    *,
    symmetric_keys: bool | None = None,
    value_group: int | None = None,
) -> BlockBytes:
    """Returns what one block takes in one layer: the bytes of its `block_arrays`, which also says what is raised."""
    arrays = block_arrays(
        num_kv_heads,
        head_dim,
        kv_format,
        block_size,
        symmetric_keys=symmetric_keys,
        value_group=value_group,
    )
    return BlockBytes(**{name: array.nbytes for name, array in arrays.items()})


def _refuse_options(kv_format: str, **options: object) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"{name}: expected only with a quantised format, got {kv_format!r}")


def num_wide(kv_format: str, num_layers: int, options: KVOptions) -> int:
    """Returns how many of a model's layers are not quantised, for the options of its cache.

    Raises: ValueError for options on a format without scales, or for as many wide layers as there are layers.
    """
    if not is_quantised(kv_format):
        _refuse_options(kv_format, **asdict(options))
    wide = 2 * check_count("num_wide_layers", options.num_wide_layers)
    if wide >= num_layers:
        raise ValueError(
            f"num_wide_layers: expected less than half of {num_layers} layers, got {wide // 2}"
        )
    return wide


def open_block_bytes(
    num_kv_heads: int,
    head_dim: int,
    kv_format: str,
    block_size: int | None = None,
    *,
    open_format: str = OPEN_FORMAT,
) -> int:
    """Returns the bytes of one open block in one layer: full precision in `open_format`, 0 for formats without scales.

    A quantised cache has one for each sequence it can hold (max_seqs).

    Raises: ValueError as `block_bytes`, or when `open_format` has scales itself.
    """
    if not is_quantised(kv_format):
        return 0
    size = default_block_size(kv_format) if block_size is None else block_size
    if open_format not in KV_FORMATS:
        expected = ", ".join(KV_FORMATS)
        raise ValueError(f"open_format: expected one of {expected}; got {open_format!r}")
    return block_bytes(num_kv_heads, head_dim, open_format, size).total


# The whole store ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreBytes:
    """Bytes of a whole store: codes (or elements), scales, open blocks, and the layers that are not quantised."""

    codes: int
    scales: int
    open: int
    wide: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.codes + self.scales + self.open + self.wide


def store_bytes(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_format: str,
    *,
    num_blocks: int,
    max_seqs: int,
    block_size: int | None = None,
    open_format: str = OPEN_FORMAT,
    symmetric_keys: bool | None = None,
    value_group: int | None = None,
    num_wide_layers: int = 0,
) -> StoreBytes:
    """Returns the bytes of a cache's K and V; arguments as in `CacheConfig`, block_size None means the format's own.

    Raises: ValueError as `block_bytes`, or for as many wide layers as there are layers.
    """
    layers, blocks = check_count("num_layers", num_layers, 1), check_count("num_blocks", num_blocks)
    sequences = check_count("max_seqs", max_seqs)
    wide = num_wide(kv_format, layers, KVOptions(symmetric_keys, value_group, num_wide_layers))
    sizes = (num_kv_heads, head_dim, kv_format, block_size)
    block = block_bytes(*sizes, symmetric_keys=symmetric_keys, value_group=value_group)
    full_block = open_block_bytes(*sizes, open_format=open_format)
    sealed = (layers - wide) * blocks
    return StoreBytes(
        codes=sealed * block.codes,
        scales=sealed * block.scales,
        open=(layers - wide) * sequences * full_block,
        wide=wide * blocks * full_block,
    )
