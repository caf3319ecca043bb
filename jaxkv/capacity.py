"""Capacity plans: the blocks, tokens and sequences a memory budget holds, and KV against weights.

Invariants: the budget comes from FREE memory, never the device's total; weights are subtracted
once; a sharded plan counts one device; every array is counted at its own width (pool elements by
format, bookkeeping as int32).

References: doc 002 section 5.1; field cases Q4 and Q5 (budget), M8 (shards), F1 to F3 (integer
width).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxkv import device_bytes, ledger
from jaxkv.model_shape import ModelShape, weights_bytes

TARGETS = ("dense", "tpu")
INT32_BYTES = 4
# Ref count, free stack, table entry, and at most one kv_len; then num_free and the two of Status.
BOOKKEEPING_PER_BLOCK_BYTES = 4 * INT32_BYTES
BOOKKEEPING_FIXED_BYTES = 3 * INT32_BYTES
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


def bookkeeping_bytes(num_blocks: int, max_seqs: int, max_blocks_per_seq: int) -> int:
    """Returns the bytes of ref counts, free stack, block tables, lengths and scalars.

    All are int32, whatever the KV format.
    """
    entries = 2 * num_blocks + max_seqs * max_blocks_per_seq + max_seqs
    return INT32_BYTES * entries + BOOKKEEPING_FIXED_BYTES


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


def pool_bytes(pool_shape: device_bytes.PoolShape, kv_format: str, target: str = "dense") -> int:
    """Returns a pool's bytes: its elements (`dense`: CPU, GPU), or with tiling padding (`tpu`)."""
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}; got {target!r}")
    if target == "tpu":
        return device_bytes.tpu_pool_bytes(pool_shape, ledger.element_bits(kv_format))
    layers, blocks, heads, rows, width = pool_shape
    return ledger.values_bytes(layers * blocks * heads * rows * width, kv_format)


@dataclass(frozen=True)
class CapacityPlan:
    """What a budget holds.

    Byte figures are for ONE device of `tensor_parallel`; tokens and sequences for the whole group.
    A replicated kv head counts on every device that holds it; weights are counted without padding.
    `sequence_bytes` is the formula (context_len * bytes_per_token of the device's share);
    `sequence_block_bytes` what the sequence really takes, in whole blocks with padding.
    `reachable_bytes` is what its next token can attend to.
    """

    kv_format: str
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
    bookkeeping_bytes: int
    kv_to_weights: float | None
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values only, ready for `json.dumps`; field names are the keys."""
        return {**asdict(self), "warnings": list(self.warnings)}


def _warnings(
    shape: ModelShape, pool_shape: device_bytes.PoolShape, kv_format: str, target: str
) -> tuple[str, ...]:
    found = list(device_bytes.int32_offset_warnings(pool_shape))
    if target == "tpu" and not device_bytes.tpu_keeps_row_major(
        pool_shape, ledger.element_bits(kv_format)
    ):
        found.append(
            f"block_size {pool_shape[3]} by width {pool_shape[4]} does not fill whole TPU tiles: "
            "bytes count the row-major pool kernels read, padding included; XLA copies the pool "
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


def plan_capacity(
    shape: ModelShape,
    *,
    free_bytes: int,
    context_len: int,
    block_size: int = 16,
    kv_format: str = "bfloat16",
    weights_format: str = "bfloat16",
    model_weights_bytes: int | None = None,
    weights_loaded: bool = False,
    reserve_fraction: float = 0.1,
    tensor_parallel: int = 1,
    target: str = "dense",
) -> CapacityPlan:
    """Returns how many blocks, tokens and sequences of `context_len` fit a device's free memory.

    Args:
      free_bytes: what one device has free now (not its total).
      model_weights_bytes: the whole model's weights; None counts them from `shape` in
        `weights_format`.
      weights_loaded: the weights are already in memory, so `free_bytes` no longer holds room for
        them.
      reserve_fraction: share of the free memory kept for activations and fragmentation.
      tensor_parallel: devices the model is sharded over; weights are taken to divide evenly.
      target: `dense`, or `tpu` to count tiling padding.

    Raises: ValueError (field, value, expectation) for bad numbers, heads that do not shard, no room
    beside the weights, or more blocks than an int32 id reaches; NotImplementedError when the
    weights must be counted and cannot be.
    """
    context = ledger.check_count("context_len", context_len, 1)
    unit = shard_shape(shape, 1, block_size, tensor_parallel)
    block = pool_bytes(unit, kv_format, target)
    weights = model_weights_bytes
    if weights is None:
        weights = weights_bytes(shape, weights_format)
    device_weights = -(-ledger.check_count("model_weights_bytes", weights) // tensor_parallel)
    budget = kv_budget_bytes(free_bytes, 0 if weights_loaded else device_weights, reserve_fraction)
    num_blocks = max(0, budget - BOOKKEEPING_FIXED_BYTES) // (block + BOOKKEEPING_PER_BLOCK_BYTES)
    device_bytes.check_block_ids(num_blocks)
    layers, _, heads, _, width = unit
    pool = (layers, num_blocks, heads, block_size, width)
    per_sequence = ledger.num_blocks_needed(context, block_size)
    concurrency = num_blocks // per_sequence
    warnings = _warnings(shape, pool, kv_format, target)
    if not concurrency:
        warnings += (f"context_len: one sequence needs {per_sequence} blocks, {num_blocks} fit",)
    per_token = ledger.values_bytes(layers * heads * width, kv_format)
    return CapacityPlan(
        kv_format=kv_format,
        block_size=block_size,
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
        sequence_block_bytes=per_sequence * block,
        reachable_bytes=shape.reachable_bytes(context, kv_format) * heads // shape.cached_heads,
        blocks_per_sequence=per_sequence,
        num_blocks=num_blocks,
        num_tokens=num_blocks * block_size,
        concurrency=concurrency,
        pool_bytes=num_blocks * block,
        bookkeeping_bytes=bookkeeping_bytes(num_blocks, concurrency, per_sequence),
        kv_to_weights=num_blocks * block / device_weights if device_weights else None,
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
    weights_format: str = "bfloat16",
    model_weights_bytes: int | None = None,
) -> KVSeries:
    """Returns the data of the plot "KV against weights over context length".

    For the whole model: not sharded, not padded, every layer holding every token.
    """
    lens = default_context_lens(shape) if context_lens is None else tuple(context_lens)
    sequences = ledger.check_count("num_sequences", num_sequences, 1)
    weights = model_weights_bytes
    if weights is None:
        try:
            weights = weights_bytes(shape, weights_format)
        except NotImplementedError:
            weights = None
    kv_bytes = tuple(sequences * shape.sequence_bytes(n, kv_format) for n in lens)
    return KVSeries(lens, kv_bytes, sequences, weights)
