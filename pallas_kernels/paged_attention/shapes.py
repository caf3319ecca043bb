"""Named cases of paged attention, shared by the tests and benchmarks of every backend.

`CASES` are tiny (they run in interpreters) and hostile: lengths around block edges, empty rows, shuffled block
ids, block 0 in use, K != V, NaN and Inf wherever nothing may look.  `SPEED` are the shapes benchmarks report.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import Array, BatchView, KVLayout, KVStore, encode, kv_format


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `paged_attention`.

    Attributes:
      name: unique.
      num_q_heads, num_kv_heads, head_dim, block_size: sizes.
      lens: (q_len, kv_len) of each row.
      query_len: query positions per row, padding included; None: the longest q_len, at least 1.
      format: element format of the store; q has the same dtype.
      scale: None means 1 / sqrt(head_dim).
      soft_cap, window: as in the op; None switches them off.
      max_blocks: columns of the block table; None: what the longest row needs, plus one.
      num_layers, layer: the stack and the layer that is read.
      as_bits: the store holds bits.
    """

    name: str
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    lens: tuple[tuple[int, int], ...] = ((1, 1), (1, 15), (1, 16), (1, 17), (1, 40))
    query_len: int | None = None
    format: str = "float32"
    scale: float | None = None
    soft_cap: float | None = None
    window: int | None = None
    max_blocks: int | None = None
    num_layers: int = 2
    layer: int = 1
    as_bits: bool = False

    @property
    def softmax_scale(self) -> float:
        """The scale to pass to the op."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale


SPECULATIVE = ((4, 4), (4, 19), (3, 33), (0, 7), (1, 16))
PREFILL = ((24, 24), (17, 40), (24, 61), (1, 5))

CASES = (
    Case("decode"),
    Case("decode_mha", num_q_heads=3, num_kv_heads=3),
    Case("decode_mqa_wide_group", num_q_heads=20, num_kv_heads=1),
    Case("decode_group_7", num_q_heads=14, num_kv_heads=2),
    Case("decode_hd80", head_dim=80),
    Case("decode_hd96", head_dim=96),
    Case("decode_hd128", head_dim=128),
    Case("decode_hd256", head_dim=256, num_q_heads=2, num_kv_heads=1),
    Case("decode_block8", block_size=8),
    Case("decode_block32", block_size=32, lens=((1, 31), (1, 32), (1, 33), (1, 70))),
    Case("decode_block64", block_size=64, lens=((1, 63), (1, 64), (1, 65))),
    Case("decode_block128", block_size=128, lens=((1, 127), (1, 129))),
    Case("decode_block256", block_size=256, lens=((1, 1), (1, 255), (1, 256), (1, 257), (1, 300))),
    Case("decode_many_blocks", lens=((1, 300), (1, 3), (1, 257), (1, 128))),
    Case("decode_empty_rows", lens=((0, 0), (1, 5), (0, 33), (1, 17), (0, 0))),
    Case("decode_all_empty", lens=((0, 0), (0, 9))),
    Case("decode_one_row", lens=((1, 37),)),
    Case("decode_soft_cap", soft_cap=5.0),
    Case("decode_window", window=4, lens=((1, 10), (1, 3), (1, 40), (1, 16), (1, 17), (1, 200))),
    Case("decode_window_1", window=1),
    Case("decode_window_longer_than_context", window=1000),
    Case("decode_table_exactly_full", lens=((1, 48), (1, 32)), max_blocks=3),
    Case("decode_bfloat16", format="bfloat16", head_dim=128, num_q_heads=8),
    Case("decode_bfloat16_bits", format="bfloat16", as_bits=True),
    Case("decode_bfloat16_block8", format="bfloat16", block_size=8),
    Case("decode_float16", format="float16"),
    Case("decode_float16_bits", format="float16", as_bits=True),
    Case("speculative", lens=SPECULATIVE),
    Case("speculative_window", lens=SPECULATIVE, window=3),
    Case("speculative_bfloat16", lens=SPECULATIVE, format="bfloat16", num_q_heads=14),
    Case("prefill", lens=PREFILL),
    Case("prefill_window_soft_cap", lens=PREFILL, window=9, soft_cap=3.0),
    Case("prefill_bfloat16", lens=PREFILL, format="bfloat16", head_dim=128),
    Case("prefill_padded", lens=((5, 5), (0, 20), (7, 16)), query_len=16),
    Case(
        "prefill_longer_than_a_chunk",
        lens=((40, 300), (33, 33)),
        head_dim=32,
        num_layers=1,
        layer=0,
    ),
)

SPEED = tuple(
    Case(
        f"{model}_block{block_size}",
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        lens=((1, 4096),) * 64,
        format="bfloat16",
        num_layers=1,
        layer=0,
    )
    for model, num_q_heads, num_kv_heads, head_dim in (
        ("qwen3_8b", 32, 8, 128),
        ("qwen2.5_0.5b", 14, 2, 64),
    )
    for block_size in (16, 32, 64, 128)
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arrays of one case, and the same numbers for a float64 oracle.

    Attributes:
      q, store, layer, view: arguments of the op.
      kv: the store's numbers as NumPy, bits decoded.
    """

    q: Array
    store: KVStore
    layer: Array
    view: BatchView
    kv: np.ndarray


def find(name: str) -> Case:
    """Returns the case called `name`."""
    return next(case for case in CASES + SPEED if case.name == name)


def make_inputs(
    case: Case,
    seed: int = 0,
    *,
    dead: tuple[float, ...] = (math.nan, math.inf, -math.inf),
    sentinel: int | None = None,
    shuffle: int = 0,
) -> Inputs:
    """Returns random inputs of a case; rows, lengths and live numbers depend on `seed` alone.

    Args:
      case: the case.
      seed: of q, K and V.
      dead: values cycled through every slot no query may see the bytes of: slots past kv_len, blocks outside the
        tables, other layers.
      sentinel: unused table entries; None: NO_BLOCK.
      shuffle: seed of the assignment of block ids.  Block 0 is always in use by a row, if any is.
    """
    rng = np.random.default_rng(seed)
    bs, rows = case.block_size, len(case.lens)
    needs = [-(-kv_len // bs) for _, kv_len in case.lens]
    num_blocks = sum(needs) + 3
    layout = KVLayout(
        case.num_layers,
        num_blocks,
        case.num_kv_heads,
        bs,
        case.head_dim,
        kv_format(case.format),
        case.as_bits,
    )
    columns = case.max_blocks or max(needs) + 1
    tables = np.full((rows, columns), num_blocks if sentinel is None else sentinel, np.int32)
    ids = np.concatenate([[0], 1 + np.random.default_rng(shuffle).permutation(num_blocks - 1)])
    ids = ids[::-1] if not sum(needs) else np.roll(ids, sum(needs) // 2)
    numbers = np.resize(np.asarray(dead, np.float32), layout.shape)
    taken = 0
    for row, (_, kv_len) in enumerate(case.lens):
        tables[row, : needs[row]] = ids[taken : taken + needs[row]]
        taken += needs[row]
        live = rng.standard_normal((kv_len, case.num_kv_heads, 2 * case.head_dim), np.float32)
        for position in range(kv_len):
            block = tables[row, position // bs]
            numbers[case.layer, block, :, position % bs] = live[position]
    kv_lens = np.array([kv_len for _, kv_len in case.lens], np.int32)
    q_lens = np.array([q_len for q_len, _ in case.lens], np.int32)
    query_len = case.query_len or max(1, int(q_lens.max()))
    index = np.arange(query_len, dtype=np.int32)[None]
    positions = np.where(index < q_lens[:, None], (kv_lens - q_lens)[:, None] + index, 0)
    q = rng.standard_normal((rows, query_len, case.num_q_heads, case.head_dim), np.float32)
    dtype = layout.format.dtype
    view = BatchView(*(jnp.asarray(x, jnp.int32) for x in (tables, kv_lens, q_lens, positions)))
    return Inputs(
        q=jnp.asarray(q, dtype),
        store=KVStore(encode(layout, jnp.asarray(numbers)), layout),
        layer=jnp.int32(case.layer),
        view=view,
        kv=np.asarray(jnp.asarray(numbers, dtype).astype(jnp.float32), np.float64),
    )
