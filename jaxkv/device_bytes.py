"""What the pool takes on a device: tiling padding, shards of kv heads, and the width of an index.

The pool is one row-major array [layer, block, kv_head, block_size, width]; width is 2 * head_dim (K
and V side by side), or the latent width for MLA. A quantised store has more arrays, all row-major
too (pallas_kernels/sealed.py). Pure Python; the TPU rule below was measured with the TPU compiler
(tests/test_device_bytes.py).

References: field cases F1 to F3 (integer width) and M8 (kv heads over tensor-parallel shards).
"""

import math
from collections.abc import Sequence

from jaxkv.ledger import check_count

TPU_LANES = 128
TPU_SUBLANES = 8
INT32_LIMIT = 2**31

PoolShape = tuple[int, int, int, int, int]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tpu_tile_rows(num_rows: int, element_bits: int) -> int:
    """Returns the rows of the TPU tile an array with `num_rows` second-to-last gets.

    Eight, or the next power of two for fewer rows; never below the 32 / element_bits rows that
    share a 32-bit word. Eight holds for 16-bit elements too: XLA's tile is (8,128)(2,1), not 16
    rows. (A whole multiple of 32 rows of 8 bits has tiles of 32, which pad no more than eight.)

    Args: element_bits is 32, 16 or 8, the widths the rule was measured for.
    """
    if element_bits not in (8, 16, 32):
        raise NotImplementedError(f"element_bits: expected 8, 16 or 32, got {element_bits}")
    power = 1 << (check_count("num_rows", num_rows, 1) - 1).bit_length()
    return max(32 // element_bits, min(TPU_SUBLANES, power))


def tpu_array_bytes(shape: Sequence[int], element_bits: int) -> int:
    """Returns the HBM bytes of a row-major array of two axes or more on TPU.

    The last axis is padded to 128 lanes, the one before it to whole tiles.
    """
    *lead, rows, width = shape
    padded_rows = _round_up(rows, tpu_tile_rows(rows, element_bits))
    return math.prod(lead) * padded_rows * _round_up(width, TPU_LANES) * (element_bits // 8)


def tpu_pool_bytes(pool_shape: PoolShape, element_bits: int) -> int:
    """Returns the HBM bytes of a row-major pool on TPU; see `tpu_array_bytes`."""
    return tpu_array_bytes(pool_shape, element_bits)


def tpu_keeps_row_major(shape: Sequence[int], element_bits: int) -> bool:
    """Returns whether XLA on TPU leaves an array row-major when nothing asks it to.

    It does when the last two axes fill whole tiles. Otherwise it may choose another axis order to
    save padding (seen: blocks minor-most at width 160, kv_head second-minor at block_size 12,
    blocks or layers second-minor where a scale has one row), and then copies the whole array on the
    way into and out of every program with a kernel that reads rows; the entry point must force the
    row-major layout.
    """
    *_, rows, width = shape
    return width % TPU_LANES == 0 and rows % tpu_tile_rows(rows, element_bits) == 0


def shard_kv_heads(num_kv_heads: int, tensor_parallel: int) -> int:
    """Returns the kv heads each of `tensor_parallel` shards holds.

    A share of them, or one replicated head where there are fewer heads than shards.

    Raises: ValueError when neither divides the other (6 heads over 4 shards).
    """
    heads = check_count("num_kv_heads", num_kv_heads, 1)
    shards = check_count("tensor_parallel", tensor_parallel, 1)
    if heads % shards and shards % heads:
        raise ValueError(
            f"tensor_parallel: expected a divisor or a multiple of {heads} kv heads, got {shards}"
        )
    return max(1, heads // shards)


def element_offset(
    pool_shape: PoolShape, layer: int = 0, block: int = 0, kv_head: int = 0, slot: int = 0
) -> int:
    """Returns the element index of [layer, block, kv_head, slot, 0]; it never wraps."""
    _, blocks, heads, rows, width = pool_shape
    return (((layer * blocks + block) * heads + kv_head) * rows + slot) * width


def max_blocks_int32(num_kv_heads: int, block_size: int, width: int, num_layers: int = 1) -> int:
    """Returns the most blocks whose element offsets fit int32.

    `num_layers` 1 asks for offsets within one layer, more for offsets into the stack.
    """
    return INT32_LIMIT // (num_layers * num_kv_heads * block_size * width)


def check_block_ids(num_blocks: int) -> None:
    """Raises: ValueError when int32 cannot hold every block id and NO_BLOCK = num_blocks.

    The limit is CacheConfig's.
    """
    if num_blocks >= INT32_LIMIT - 1:
        raise ValueError(
            f"num_blocks: expected below {INT32_LIMIT - 1} (block ids are int32), "
            f"got {num_blocks}; use a larger block_size"
        )


def int32_offset_warnings(pool_shape: PoolShape) -> tuple[str, ...]:
    """Returns a warning when element offsets into the stacked pool pass int32, none otherwise."""
    layers, blocks, heads, rows, width = pool_shape
    size = layers * blocks * heads * rows * width
    if size <= INT32_LIMIT:
        return ()
    limit = max_blocks_int32(heads, rows, width, layers)
    return (
        f"num_blocks: the pool holds {size} elements, past 2^31; a flat offset needs 64 bits "
        f"(int32 reaches {limit} blocks over {layers} layers)",
    )
