"""The capacity ledger: what a KV cache costs, counted before anything is allocated.

One function per formula of the two seed documents (docs/formulas.md puts them side by side). Pure
Python and NumPy on the host; nothing here knows a device or imports JAX.

Invariants: byte counts are exact integers; a length counts tokens, a range is half-open; what a
format stores comes from `jaxkv.format_bytes` and nowhere else, so no function assumes 2 or 4 bytes.

References: "doc 000" is the formula-to-source document, "doc 002" the KV-cache chapter; both by
section.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxkv.format_bytes import KV_FORMATS as KV_FORMATS
from jaxkv.format_bytes import ElementFormat as ElementFormat
from jaxkv.format_bytes import (
    block_bytes,
    check_count,
    default_block_size,
    is_quantised,
    values_bytes,
)
from jaxkv.format_bytes import element_bits as element_bits

# Volume -------------------------------------------------------------------------------------------


def bytes_per_token_per_layer(
    num_kv_heads: int,
    head_dim: int,
    kv_format: str = "bfloat16",
    *,
    block_size: int | None = None,
    symmetric_keys: bool | None = None,
    value_group: int | None = None,
) -> int:
    """Returns 2 * H_kv * d_head * s: one key and one value per kv head. For MHA pass the query
    heads, for GQA the kv heads.

    Quantised formats: the codes and scales of a sealed block over its tokens, rounded up to whole
    bytes (at the default block sizes nothing is rounded where H_kv * d_head is a multiple of 16);
    the full-precision open block of a sequence comes on top (`format_bytes.open_block_bytes`).
    `block_size` None means the format's own; without scales it changes nothing. `symmetric_keys`
    and `value_group` as in `CacheConfig`.

    References: doc 000 section 1.1; doc 002 section 2.2 equation (1).
    """
    if not is_quantised(kv_format):
        block_size = 1
    size = default_block_size(kv_format) if block_size is None else block_size
    block = block_bytes(
        num_kv_heads,
        head_dim,
        kv_format,
        size,
        symmetric_keys=symmetric_keys,
        value_group=value_group,
    )
    return -(-block.total // size)


def mla_bytes_per_token_per_layer(
    kv_lora_rank: int, qk_rope_head_dim: int, kv_format: str = "bfloat16"
) -> int:
    """Returns (kv_lora_rank + qk_rope_head_dim) * s: one latent and one rotary key per token,
    shared by all heads.

    Raises: NotImplementedError for quantised formats.
    References: doc 002 section 3.3 (MLA).
    """
    if is_quantised(kv_format):
        raise NotImplementedError(
            f"kv_format: expected {', '.join(KV_FORMATS)} for MLA latents, got {kv_format!r}"
        )
    rank = check_count("kv_lora_rank", kv_lora_rank, 1)
    return values_bytes(rank + check_count("qk_rope_head_dim", qk_rope_head_dim), kv_format)


def bytes_per_token(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_format: str = "bfloat16",
    *,
    block_size: int | None = None,
) -> int:
    """Returns 2 * L * H_kv * d_head * s, the KV bytes one token takes over the whole model; for
    quantised formats L times `bytes_per_token_per_layer`.

    References: doc 000 section 1.1; doc 002 section 2.2.
    """
    layers = check_count("num_layers", num_layers, 1)
    return layers * bytes_per_token_per_layer(
        num_kv_heads, head_dim, kv_format, block_size=block_size
    )


def sequence_bytes(num_tokens: int, bytes_per_token: int) -> int:
    """Returns M_KV(T) = T * bytes_per_token, without rounding to blocks.

    References: doc 000 section 1.1; doc 002 section 2.2.
    """
    per_token = check_count("bytes_per_token", bytes_per_token)
    return check_count("num_tokens", num_tokens) * per_token


def gqa_saving(num_q_heads: int, num_kv_heads: int) -> float:
    """Returns n_q / n_kv, how many times smaller (and cheaper to read) the cache is than with a kv
    head per query head.

    Raises: ValueError when the kv heads do not divide the query heads.
    References: doc 002 section 2.2.
    """
    q_heads = check_count("num_q_heads", num_q_heads, 1)
    if q_heads % check_count("num_kv_heads", num_kv_heads, 1):
        raise ValueError(f"num_kv_heads: expected a divisor of {q_heads}, got {num_kv_heads}")
    return q_heads / num_kv_heads


def kv_to_weights(kv_bytes: int, weights_bytes: int) -> float:
    """Returns the KV cache's bytes over the weights' bytes. References: doc 002 section 5.1."""
    return check_count("kv_bytes", kv_bytes) / check_count("weights_bytes", weights_bytes, 1)


# Blocks -------------------------------------------------------------------------------------------


def num_blocks_needed(num_tokens: int, block_size: int) -> int:
    """Returns ceil(T / B_block), and 0 for a length of 0 or less.

    References: doc 000 sections 1.2 and 2.1.
    """
    size = check_count("block_size", block_size, 1)
    return -(-max(0, num_tokens) // size)


def tail_waste(num_tokens: int, block_size: int) -> int:
    """Returns the free slots of a sequence's last block, (B - T mod B) mod B.

    References: doc 000 section 1.3.
    """
    size = check_count("block_size", block_size, 1)
    return -check_count("num_tokens", num_tokens) % size


def new_blocks_for_append(kv_len: int, num_new_tokens: int, block_size: int) -> int:
    """Returns ceil(max(0, dT - f_last) / B): the open block's free slots are filled before a block
    is taken.

    Copies of a shared open block (copy-on-write) come on top: one for each writer but the last.
    References: doc 000 section 2.2.
    """
    free_slots = tail_waste(kv_len, block_size)
    return num_blocks_needed(check_count("num_new_tokens", num_new_tokens) - free_slots, block_size)


def block_token_ranges(num_tokens: int, block_size: int) -> list[tuple[int, int]]:
    """Returns the half-open token range [start, end) each block of a sequence holds, in order;

    none is empty.
    """
    total = check_count("num_tokens", num_tokens)
    size = check_count("block_size", block_size, 1)
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def release_cost(num_tokens: int, block_size: int) -> int:
    """Returns the ref counts a release decrements: the blocks in the sequence's row, whatever the
    pool holds.

    References: doc 000 section 2.3, O(n_blocks(s)).
    """
    return num_blocks_needed(num_tokens, block_size)


def _live_fills(
    row: ArrayLike, kv_len: int, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the block ids one row holds and the tokens it sees in each.

    Raises: ValueError on a short or negative row.
    """
    needed = num_blocks_needed(check_count("kv_lens", kv_len), block_size)
    ids = np.asarray(row, dtype=np.int64).reshape(-1)[:needed]
    if len(ids) < needed or (ids < 0).any():
        raise ValueError(
            f"block_tables: expected {needed} block ids >= 0 for kv_len {kv_len}, "
            f"got {ids.tolist()}"
        )
    fills = np.full(needed, block_size, dtype=np.int64)
    fills[-1:] -= tail_waste(kv_len, block_size)
    return ids, fills


def fragmentation(
    block_tables: Sequence[ArrayLike] | NDArray[np.integer],
    kv_lens: Sequence[int] | NDArray[np.integer],
    block_size: int,
) -> float:
    """Returns the free slots of the live blocks over their capacity; 0.0 when no block is live.

    A block that several sequences share counts once, as full as its fullest owner sees it. Blocks
    no sequence holds do not
    count: this is the waste inside blocks, not the pool's utilisation.

    Args:
      block_tables: per sequence its block ids in order; entries past ceil(kv_len / block_size) are
        ignored.
      kv_lens: per sequence the tokens it holds.
      block_size: tokens a block holds.

    Raises: ValueError when the two differ in length, or a row is too short for its kv_len or holds
    a negative id.
    References: doc 000 section 1.3, `BlockAllocator.fragmentation`.
    """
    if len(block_tables) != len(kv_lens):
        raise ValueError(f"kv_lens: expected {len(block_tables)} entries, got {len(kv_lens)}")
    rows = [_live_fills(row, n, block_size) for row, n in zip(block_tables, kv_lens, strict=True)]
    if not any(len(ids) for ids, _ in rows):
        return 0.0
    blocks, which = np.unique(np.concatenate([ids for ids, _ in rows]), return_inverse=True)
    filled = np.zeros(len(blocks), dtype=np.int64)
    np.maximum.at(filled, which, np.concatenate([fills for _, fills in rows]))
    capacity = len(blocks) * block_size
    return (capacity - int(filled.sum())) / capacity


# Sharing and recomputation ------------------------------------------------------------------------


def sharing_saving(num_branches: int, prefix_bytes: int) -> int:
    """Returns (k - 1) * M_KV(T_prefix): bytes saved when k branches hold one copy of a prefix
    instead of k.

    References: doc 000 section 3.1.
    """
    branches = check_count("num_branches", num_branches, 1)
    return (branches - 1) * check_count("prefix_bytes", prefix_bytes)


def uncached_token_forwards(num_tokens: int) -> int:
    """Returns 1 + 2 + ... + L, the token forwards it takes to generate L tokens without a cache;
    with one it takes L.

    References: doc 002 section 1 (the quadratic total) and section 2.5.
    """
    total = check_count("num_tokens", num_tokens)
    return total * (total + 1) // 2


def recompute_saving(num_tokens: int) -> float:
    """Returns how many times more token forwards generation costs without a cache: (L + 1) / 2,
    about L / 2.

    References: doc 002 section 1.
    """
    return uncached_token_forwards(check_count("num_tokens", num_tokens, 1)) / num_tokens


def decode_read_bytes(kv_lens: Iterable[int], bytes_per_token: int) -> int:
    """Returns KV(B): bytes one decode step reads from the cache, linear in the batch since nothing
    is shared.

    References: doc 002 section 2.4.
    """
    return sum(sequence_bytes(kv_len, bytes_per_token) for kv_len in kv_lens)
