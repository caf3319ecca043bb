"""Cases of attention over sealed blocks, shared by every kernel that reads codes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import BatchView
from pallas_kernels.sealed import SEALED_FORMATS, SealedLayout, SealedStore, seal


@dataclasses.dataclass(frozen=True)
class SealedCase:
    """One call; rows are (kv_len, q_len) pairs."""

    name: str
    format: str
    block_size: int
    head_dim: int
    num_kv_heads: int
    group: int
    rows: tuple[tuple[int, int], ...]
    query_len: int = 1
    symmetric_keys: bool = False
    value_group: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"

    @property
    def layout(self) -> SealedLayout:
        """Two layers, and a few blocks more than the rows need."""
        need = sum(-(-kv_len // self.block_size) for kv_len, _ in self.rows)
        return SealedLayout(
            num_layers=2,
            num_blocks=need + 3,
            num_kv_heads=self.num_kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            format=SEALED_FORMATS[self.format],
            symmetric_keys=self.symmetric_keys or self.format == "fp8_e4m3",
            value_group=self.value_group or self.head_dim,
            as_bits=False,
        )


# Lengths around block edges, an empty row, a row without queries; heads that do not fill a tile.
DECODE = ((65, 1), (64, 1), (0, 0), (200, 1), (129, 0))
CHUNK = ((140, 20), (64, 3), (131, 4))  # the first and the last cross an edge of a block
SEALED_CASES = (
    SealedCase("int8", "int8", 64, 64, 2, 7, DECODE),
    SealedCase("int8 bfloat16 q", "int8", 64, 128, 2, 4, DECODE, dtype="bfloat16"),
    # Lone rows of 64, then of 192 and 96 numbers, in two rows; then two of 192 and 96: all padded.
    SealedCase("int8 symmetric, 1 head", "int8", 64, 64, 1, 3, DECODE, symmetric_keys=True),
    SealedCase("fp8", "fp8_e4m3", 32, 64, 3, 3, DECODE, soft_cap=3.0),
    SealedCase("int8 block 32, window", "int8", 32, 64, 3, 3, DECODE, window=70),
    SealedCase("int4", "int4", 64, 128, 2, 4, DECODE, value_group=32),
    SealedCase("int4 one scale a head", "int4", 64, 64, 4, 1, DECODE),  # V's scales in halves
    SealedCase("int8 chunk", "int8", 64, 64, 2, 2, CHUNK, query_len=20),
    SealedCase("int4 chunk, window", "int4", 64, 64, 1, 3, CHUNK, 20, value_group=32, window=40),
)


@dataclasses.dataclass(frozen=True)
class SealedInputs:
    """Arrays of one call."""

    q: jax.Array
    store: SealedStore
    layer: jax.Array
    view: BatchView

    def knobs(self, case: SealedCase) -> dict[str, Any]:
        """Returns scale, soft_cap and window."""
        return {"scale": case.head_dim**-0.5, "soft_cap": case.soft_cap, "window": case.window}


@functools.partial(jax.jit, static_argnums=0)
def _seal_all(layout: SealedLayout, kv: Any) -> Any:
    return jax.vmap(lambda blocks: seal(layout, blocks))(kv)


def make_sealed_inputs(case: SealedCase, seed: int = 0) -> SealedInputs:
    """Returns a call on random K and V, a few K channels far from zero; blocks outside the tables hold rubbish."""
    layout, rng = case.layout, np.random.default_rng(seed)
    shape = (layout.num_layers, layout.num_blocks, case.num_kv_heads, case.block_size)
    kv = rng.normal(size=(*shape, 2 * case.head_dim)).astype(np.float32)
    kv[..., 5] += 20.0
    sealed = _seal_all(layout, kv)
    columns = max(-(-kv_len // case.block_size) for kv_len, _ in case.rows) + 1
    free = list(rng.permutation(layout.num_blocks))
    tables = np.full((len(case.rows), columns), layout.num_blocks, np.int32)
    for row, (kv_len, _) in enumerate(case.rows):
        for column in range(-(-kv_len // case.block_size)):
            tables[row, column] = free.pop()
    arrays = {name: np.asarray(x).copy() for name, x in sealed._asdict().items()}
    unsealed = free + [
        tables[row, (n - 1) // case.block_size] for row, (n, _) in enumerate(case.rows) if n
    ]
    for x in arrays.values():  # open and free blocks: NaN where the type has one
        x[:, unsealed] = (
            np.full((), np.nan, x.dtype) if x.dtype.kind == "V" or x.dtype.kind == "f" else 127
        )
    kv_lens, q_lens = (np.array(x, np.int32) for x in zip(*case.rows, strict=True))
    offset = np.arange(case.query_len, dtype=np.int32)[None, :]
    positions = np.where(offset < q_lens[:, None], (kv_lens - q_lens)[:, None] + offset, 0)
    q_shape = (len(case.rows), case.query_len, case.num_kv_heads * case.group, case.head_dim)
    return SealedInputs(
        q=jnp.asarray(rng.normal(size=q_shape), case.dtype),
        store=SealedStore(**{name: jnp.asarray(x) for name, x in arrays.items()}, layout=layout),
        layer=jnp.int32(1),
        view=BatchView(
            jnp.asarray(tables), jnp.asarray(kv_lens), jnp.asarray(q_lens),
            jnp.asarray(positions.astype(np.int32)),
        ),
    )  # fmt: skip
