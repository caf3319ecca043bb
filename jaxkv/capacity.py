"""Capacity plans: the blocks, tokens and sequences a memory budget holds, and KV against weights.

Invariants: the budget comes from FREE memory, never the device's total; weights are subtracted
once; a sharded plan counts one device; every array is counted at its own width (pool elements by
format, scales with their codes, bookkeeping as int32); a quantised plan has one open block for each
sequence it says fits.

References: doc 002 section 5.1; field cases Q4 and Q5 (budget), M8 (shards), F1 to F3 (integer
width).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxkv import device_bytes, format_bytes, ledger
from jaxkv.format_bytes import OWN_OPTIONS, BlockArray, KVOptions
from jaxkv.model_shape import ModelShape, weights_bytes

TARGETS = ("dense", "tpu")
INT32_BYTES = 4
# Ref count, free stack, table entry, and at most one kv_len; then num_free and the two of Status.
BOOKKEEPING_PER_BLOCK_BYTES = 4 * INT32_BYTES
BOOKKEEPING_FIXED_BYTES = 3 * INT32_BYTES
# Open blocks of quantised formats, one a sequence: ref count, free stack, and its id; then num_free.
BOOKKEEPING_PER_OPEN_BLOCK_BYTES = 3 * INT32_BYTES
BOOKKEEPING_FIXED_OPEN_BYTES = INT32_BYTES
DEFAULT_MAX_CONTEXT_LEN = 131_072


def device_free_bytes(total_bytes: int, used_bytes: int) -> int:
    """Returns what a device has left. Raises: ValueError when more is used than there is."""
    total = ledger.check_count("total_bytes", total_bytes)
    if ledger.check_count("used_bytes", used_bytes) > total:
        raise ValueError(f"used_bytes: expected at most total_bytes {total}, got {used_bytes}")
    return total - used_bytes


def kv_budget_bytes(free_bytes: int, weights_bytes: int = 0, reserve_fraction: float = 0.0) -> int:
    """Returns the bytes left for the cache: free memory, less its reserved share, less weights.

    `weights_bytes` are those still to be loaded; pass 0 when they already lie in used memory.

    Raises: ValueError when nothing is left, saying what was needed and what was free.
    """
    free = ledger.check_count("free_bytes", free_bytes)
    if not 0.0 <= reserve_fraction < 1.0:
        raise ValueError(f"reserve_fraction: expected 0 <= fraction < 1, got {reserve_fraction}")
    reserve = round(free * reserve_fraction)
    budget = free - reserve - ledger.check_count("weights_bytes", weights_bytes)
    if budget <= 0:
        raise ValueError(
            f"free_bytes: expected more than weights {weights_bytes} B + reserve {reserve} B, "
            f"got {free} B"
        )
    return budget


def bookkeeping_bytes(
    num_blocks: int, max_seqs: int, max_blocks_per_seq: int, kv_format: str = "bfloat16"
) -> int:
    """Returns the bytes of ref counts, free stack, block tables, lengths and scalars.

    All are int32, whatever the KV format; quantised formats own their open blocks by the same arrays.
    """
    entries = 2 * num_blocks + max_seqs * max_blocks_per_seq + max_seqs
    plain = INT32_BYTES * entries + BOOKKEEPING_FIXED_BYTES
    if not format_bytes.is_quantised(kv_format):
        return plain
    return plain + max_seqs * BOOKKEEPING_PER_OPEN_BLOCK_BYTES + BOOKKEEPING_FIXED_OPEN_BYTES


def shard_shape(
    shape: ModelShape, num_blocks: int, block_size: int, tensor_parallel: int = 1
) -> device_bytes.PoolShape:
    """Returns one device's pool shape [layer, block, kv_head, block_size, width].

    An MLA latent belongs to all heads, so every shard holds it whole. Raises: ValueError when the
    heads do not shard.
    """
    shards = ledger.check_count("tensor_parallel", tensor_parallel, 1)
    if shape.num_q_heads % shards:
        raise ValueError(
            f"tensor_parallel: expected a divisor of {shape.num_q_heads} query heads, got {shards}"
        )
    heads = 1 if shape.is_mla else device_bytes.shard_kv_heads(shape.num_kv_heads, shards)
    size = ledger.check_count("block_size", block_size, 1)
    return (shape.num_layers, num_blocks, heads, size, shape.cached_width)


def pool_bytes(
    pool_shape: device_bytes.PoolShape,
    kv_format: str,
    target: str = "dense",
    kv_options: KVOptions = OWN_OPTIONS,
) -> int:
    """Returns a pool's bytes: its elements (`dense`: CPU, GPU), or with tiling padding (`tpu`).

    Quantised formats count codes and scales of `pool_shape`'s blocks, whose width is 2 * head_dim, and
    wide layers in full; open blocks are not part of the pool.
    """
    layers, blocks, heads, rows, width = pool_shape
    wide = format_bytes.num_wide(kv_format, layers, kv_options)
    full = {"kv": BlockArray((heads, rows, width), format_bytes.element_bits(_full(kv_format)))}
    arrays = full
    if format_bytes.is_quantised(kv_format):
        arrays = _sealed_arrays(pool_shape, kv_format, kv_options)
    own, other = (_target_bytes(each, target) for each in (arrays, full))
    return blocks * ((layers - wide) * own + wide * other)


def open_block_bytes(
    pool_shape: device_bytes.PoolShape,
    kv_format: str,
    target: str = "dense",
    kv_options: KVOptions = OWN_OPTIONS,
) -> int:
    """Returns the bytes of one open block over all quantised layers; 0 for formats without scales."""
    if not format_bytes.is_quantised(kv_format):
        return 0
    layers, _, heads, rows, width = pool_shape
    sealed = layers - format_bytes.num_wide(kv_format, layers, kv_options)
    full = BlockArray((heads, rows, width), format_bytes.element_bits(_full(kv_format)))
    return sealed * _target_bytes({"kv": full}, target)


def _full(kv_format: str) -> str:
    """Returns the format of what is not quantised."""
    return format_bytes.OPEN_FORMAT if format_bytes.is_quantised(kv_format) else kv_format


def _sealed_arrays(
    pool_shape: device_bytes.PoolShape, kv_format: str, kv_options: KVOptions
) -> dict[str, BlockArray]:
    _, _, heads, rows, width = pool_shape
    return format_bytes.block_arrays(
        heads,
        width // 2,
        kv_format,
        rows,
        symmetric_keys=kv_options.symmetric_keys,
        value_group=kv_options.value_group,
    )


def _target_bytes(arrays: dict[str, BlockArray], target: str) -> int:
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}; got {target!r}")
    if target == "tpu":
        return sum(device_bytes.tpu_array_bytes(x.shape, x.element_bits) for x in arrays.values())
    return sum(x.nbytes for x in arrays.values())


@dataclass(frozen=True)
class CapacityPlan:
    """What a budget holds.

    Byte figures are for ONE device of `tensor_parallel`; tokens and sequences for the whole group.
    A replicated kv head counts on every device that holds it; weights are counted without padding.
    `sequence_bytes` is the formula (context_len * bytes_per_token of the device's share);
    `sequence_block_bytes` what the sequence really takes, in whole blocks with padding, with its open
    block. `reachable_bytes` is what its next token can attend to. `pool_bytes` are the blocks;
    `open_block_bytes` one full-precision open block, `open_bytes` one for each of `concurrency`
    sequences, both 0 for formats without scales. `kv_to_weights` counts blocks and open blocks.
    """

    kv_format: str
    kv_options: KVOptions
    block_size: int
    context_len: int
    tensor_parallel: int
    target: str
    free_bytes: int
    reserve_bytes: int
    weights_bytes: int
    budget_bytes: int
    bytes_per_token: int
    block_bytes: int
    sequence_bytes: int
    sequence_block_bytes: int
    reachable_bytes: int
    blocks_per_sequence: int
    num_blocks: int
    num_tokens: int
    concurrency: int
    pool_bytes: int
    open_block_bytes: int
    open_bytes: int
    bookkeeping_bytes: int
    kv_to_weights: float | None
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values only, ready for `json.dumps`; field names are the keys."""
        return {**asdict(self), "warnings": list(self.warnings)}


def _warnings(
    shape: ModelShape,
    pool_shape: device_bytes.PoolShape,
    kv_format: str,
    target: str,
    kv_options: KVOptions,
) -> tuple[str, ...]:
    layers, blocks, *block = pool_shape
    arrays = {"pool": BlockArray(tuple(block), format_bytes.element_bits(_full(kv_format)))}
    if format_bytes.is_quantised(kv_format):
        arrays = _sealed_arrays(pool_shape, kv_format, kv_options)
        layers -= 2 * kv_options.num_wide_layers
    heads, rows, width = next(iter(arrays.values())).shape
    found = list(device_bytes.int32_offset_warnings((layers, blocks, heads, rows, width)))
    for name, array in arrays.items() if target == "tpu" else ():
        if not device_bytes.tpu_keeps_row_major(array.shape, array.element_bits):
            found.append(
                f"{name}: {array.shape[-2]} rows by width {array.shape[-1]} do not fill whole TPU tiles: "
                "bytes count the row-major array kernels read, padding included; XLA copies it "
                "into that order unless the program's layout is forced"
            )
    if shape.sliding_layers:
        found.append(
            f"sliding_layers: {len(shape.sliding_layers)} layers attend to {shape.sliding_window} "
            "keys, but the cache holds every token in every layer"
        )
    if shape.is_mla:
        found.append(
            "kv_lora_rank: the cache has no layout for MLA latents; the plan only counts them"
        )
    return tuple(found)


def _fit(budget: int, block: int, open_block: int, per_sequence: int) -> tuple[int, int]:
    """Returns the blocks and whole sequences a budget holds, bookkeeping and open blocks counted.

    The blocks that no sequence fills are kept (prompts may share or be shorter), but never so many
    that another sequence would fit without an open block to write into.

    Args: budget in bytes; block and open_block, bytes of one; per_sequence, blocks of a sequence.
    """
    budget -= BOOKKEEPING_FIXED_BYTES + (BOOKKEEPING_FIXED_OPEN_BYTES if open_block else 0)
    block += BOOKKEEPING_PER_BLOCK_BYTES
    open_block += BOOKKEEPING_PER_OPEN_BLOCK_BYTES if open_block else 0
    sequences, rest = divmod(max(0, budget), per_sequence * block + open_block)
    return sequences * per_sequence + min(rest // block, per_sequence - 1), sequences


def plan_capacity(
    shape: ModelShape,
    *,
    free_bytes: int,
    context_len: int,
    block_size: int | None = None,
    kv_format: str = "bfloat16",
    weights_format: str = "bfloat16",
    model_weights_bytes: int | None = None,
    weights_loaded: bool = False,
    reserve_fraction: float = 0.1,
    tensor_parallel: int = 1,
    target: str = "dense",
    kv_options: KVOptions = OWN_OPTIONS,
) -> CapacityPlan:
    """Returns how many blocks, tokens and sequences of `context_len` fit a device's free memory.

    Args:
      free_bytes: what one device has free now (not its total).
      block_size: None means the format's own: 16 without scales, else the tokens that share scales.
      model_weights_bytes: the whole model's weights; None counts them from `shape` in
        `weights_format`.
      weights_loaded: the weights are already in memory, so `free_bytes` no longer holds room for
        them.
      reserve_fraction: share of the free memory kept for activations and fragmentation.
      tensor_parallel: devices the model is sharded over; weights are taken to divide evenly.
      target: `dense`, or `tpu` to count tiling padding.
      kv_options: of quantised formats: symmetric keys, value group, wide layers.

    Raises: ValueError (field, value, expectation) for bad numbers, heads that do not shard, no room
    beside the weights, options a format does not have, or more blocks than an int32 id reaches; NotImplementedError when the
    weights must be counted and cannot be, and for a quantised format with MLA.
    """
    context = ledger.check_count("context_len", context_len, 1)
    size = format_bytes.default_block_size(kv_format) if block_size is None else block_size
    unit = shard_shape(shape, 1, size, tensor_parallel)
    layers, _, heads, _, width = unit
    device = shape if shape.is_mla else replace(shape, num_kv_heads=heads)
    counted: dict[str, Any] = {"block_size": size, "kv_options": kv_options}
    per_token = device.bytes_per_token(kv_format, **counted)
    open_block = open_block_bytes(unit, kv_format, target, kv_options)
    block = pool_bytes(unit, kv_format, target, kv_options)
    weights = model_weights_bytes
    if weights is None:
        weights = weights_bytes(shape, weights_format)
    device_weights = -(-ledger.check_count("model_weights_bytes", weights) // tensor_parallel)
    budget = kv_budget_bytes(free_bytes, 0 if weights_loaded else device_weights, reserve_fraction)
    per_sequence = ledger.num_blocks_needed(context, size)
    num_blocks, concurrency = _fit(budget, block, open_block, per_sequence)
    device_bytes.check_block_ids(num_blocks)
    pool = (layers, num_blocks, heads, size, width)
    warnings = _warnings(shape, pool, kv_format, target, kv_options)
    if not concurrency:
        also = " and an open block" if open_block else ""
        warnings += (
            f"context_len: one sequence needs {per_sequence} blocks{also}, {num_blocks} fit",
        )
    kv_bytes = num_blocks * block + concurrency * open_block
    return CapacityPlan(
        kv_format=kv_format,
        kv_options=kv_options,
        block_size=size,
        context_len=context,
        tensor_parallel=tensor_parallel,
        target=target,
        free_bytes=free_bytes,
        reserve_bytes=round(free_bytes * reserve_fraction),
        weights_bytes=device_weights,
        budget_bytes=budget,
        bytes_per_token=per_token,
        block_bytes=block,
        sequence_bytes=ledger.sequence_bytes(context, per_token),
        sequence_block_bytes=per_sequence * block + open_block,
        reachable_bytes=device.reachable_bytes(context, kv_format, **counted),
        blocks_per_sequence=per_sequence,
        num_blocks=num_blocks,
        num_tokens=num_blocks * size,
        concurrency=concurrency,
        pool_bytes=num_blocks * block,
        open_block_bytes=open_block,
        open_bytes=concurrency * open_block,
        bookkeeping_bytes=bookkeeping_bytes(num_blocks, concurrency, per_sequence, kv_format),
        kv_to_weights=kv_bytes / device_weights if device_weights else None,
        warnings=warnings,
    )


# KV against weights over context length -----------------------------------------------------------


@dataclass(frozen=True)
class KVSeries:
    """KV bytes of `num_sequences` sequences at each context length, against the weights' bytes.

    `weights_bytes` is None when it was not given and cannot be counted.
    """

    context_lens: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    num_sequences: int
    weights_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values only, ready for `json.dumps`."""
        return {
            **asdict(self),
            "context_lens": list(self.context_lens),
            "kv_bytes": list(self.kv_bytes),
        }


def default_context_lens(shape: ModelShape) -> tuple[int, ...]:
    """Returns powers of two from 1,024 up to the model's context length, which ends the series."""
    longest = shape.max_context_len or DEFAULT_MAX_CONTEXT_LEN
    lens = [2**n for n in range(10, longest.bit_length()) if 2**n < longest]
    return (*lens, longest)


def kv_series(
    shape: ModelShape,
    context_lens: Sequence[int] | None = None,
    *,
    num_sequences: int = 1,
    kv_format: str = "bfloat16",
    block_size: int | None = None,
    weights_format: str = "bfloat16",
    model_weights_bytes: int | None = None,
    kv_options: KVOptions = OWN_OPTIONS,
) -> KVSeries:
    """Returns the data of the plot "KV against weights over context length".

    For the whole model: not sharded, not padded, every layer holding every token; in quantised
    formats with an open block for each sequence. `block_size` None means the format's own.
    """
    lens = default_context_lens(shape) if context_lens is None else tuple(context_lens)
    sequences = ledger.check_count("num_sequences", num_sequences, 1)
    weights = model_weights_bytes
    if weights is None:
        try:
            weights = weights_bytes(shape, weights_format)
        except NotImplementedError:
            weights = None
    counted: dict[str, Any] = {"block_size": block_size, "kv_options": kv_options}
    open_block = shape.open_block_bytes(kv_format, **counted)
    kv_bytes = tuple(
        sequences * (shape.sequence_bytes(n, kv_format, **counted) + open_block) for n in lens
    )
    return KVSeries(lens, kv_bytes, sequences, weights)
