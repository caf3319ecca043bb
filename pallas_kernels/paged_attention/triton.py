"""Paged attention for CUDA devices of compute capability 8.0 and later (Pallas, Triton backend).

Two launches.  The first splits the keys of every (row, kv head, tile of queries) over `num_splits` programs, each with
its own running softmax; the second joins the parts.  With one split the first writes the result and there is no second::

    row 3, kv_head 1                 tile: query_rows x head_dim, packed as q_pos * group + head in group
      keys  0 ......... kv_len       |q0 h0|q0 h1|q0 h2|q0 h3|q1 h0| ...                (16 rows at least)
           |  split 0  |  split 1  |  split 2  |
             64 keys a step: ids = table[key // block_size]  ->  kv[layer, ids, kv_head, key % block_size, :]
                |                                                     K half -> scores, V half -> out
                +-- part[split, row, q_pos, q_head, :], part_lse[split, row, q_pos, q_head]
                                          |
                                     _combine: out, lse

Invariants:
  * Loop bounds come from kv_len, q_len and window; keys outside them are never loaded, so their slots may hold NaN
    and their table entries anything.  Entries that are used are clamped into the pool.
  * Which keys a split gets depends on lengths alone, never on block ids: permuted pools give the same bits.
  * Every (row, q_pos, q_head) of the output is written by exactly one program, padding included.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.layout import Array, BatchView, KVLayout, KVStore

_LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_HEAD_DIM = 256
_MAX_SPLITS = 128
_PROGRAMS = 528  # programs that fill the chip: two on each of the 132 multiprocessors of an H200, twice over
_COMBINE_ELEMENTS = 4096  # float32 parts a combine program holds, unless its splits alone need more


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one attention call is cut up.

    Attributes:
      query_rows: rows of a tile of packed queries; a power of two, at least 16 (tensor cores).
      keys: keys of one step of the loop.
      num_splits: programs that share the keys of one tile of queries.
      num_warps, num_stages: of the attention kernel.
    """

    query_rows: int
    keys: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_tiling(
    q_shape: tuple[int, ...], q_dtype: Any, layout: KVLayout, max_keys: int
) -> Tiling:
    """Returns the tiling for a call; depends on static shapes and dtypes only.

    The sizes are the largest that neither spill a register nor keep two decode programs from sharing a
    multiprocessor, on sm_80 and sm_90, as read from ptxas (`benchmarks/static_gpu.py`).
    """
    rows, query_len, num_q_heads, head_dim = q_shape
    packed = query_len * num_q_heads // layout.num_kv_heads
    query_rows, wide = max(16, _power_of_two(packed)), head_dim > 128
    warps = 4
    if layout.format.itemsize == 4:
        query_rows = min(query_rows, 32)
        keys = 16 if wide or query_rows > 16 else 32
    elif _terms(q_dtype, layout.format.dtype) > 1:
        query_rows = min(query_rows, 16 if wide else 32)
        keys = 32 if wide or query_rows > 16 else 64
    elif wide:
        query_rows, keys = min(query_rows, 64), 32
        warps = 8 if query_rows == 64 else 4
    else:
        query_rows = min(query_rows, 128)
        keys = 32 if query_rows == 64 else 64
        warps = 8 if query_rows == 128 else 4
    tiles = rows * layout.num_kv_heads * pl.cdiv(packed, query_rows)
    programs = _PROGRAMS if query_rows <= 32 else _PROGRAMS // 2
    most = min(
        pl.cdiv(max_keys, keys), _MAX_SPLITS, 4 * _COMBINE_ELEMENTS // _power_of_two(head_dim)
    )
    return Tiling(
        query_rows, keys, max(1, min(pl.cdiv(programs, tiles), most)), warps, num_stages=2
    )


def paged_attention_triton(
    q: Array,
    store: KVStore,
    layer: Array,
    view: BatchView,
    *,
    scale: Array | float,
    soft_cap: Array | float | None,
    window: Array | int | None,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Array, Array]:
    """Returns (out q.dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]); see spec.py.

    Args:
      q, store, layer, view, scale, soft_cap, window: see `paged_attention`.
      interpret: run the kernels in the Pallas interpreter (any platform, slow).
      tiling: overrides `choose_tiling`.

    Raises:
      NotImplementedError: a dtype or head_dim the kernels do not support; the message says what they do.
    """
    _check_supported(q, store)
    layout = store.layout
    rows, query_len, num_q_heads, head_dim = q.shape
    group = num_q_heads // layout.num_kv_heads
    max_keys = view.block_tables.shape[1] * layout.block_size
    tiling = tiling or choose_tiling(q.shape, q.dtype, layout, max_keys)
    plan = _Plan(
        tiling, group, layout.num_kv_heads, query_len, head_dim, max_keys, window is not None
    )
    # Python numbers become constants of the kernel; traced ones are operands, read where they are used.
    knobs = {"scale": scale, "soft_cap": soft_cap, "window": window}
    constants = {name: x for name, x in knobs.items() if x is None or isinstance(x, numbers.Number)}
    traced = {
        name: jnp.asarray(x).reshape(()) for name, x in knobs.items() if name not in constants
    }

    split = tiling.num_splits > 1
    prefix = (tiling.num_splits,) if split else ()
    call = functools.partial(pl.pallas_call, interpret=interpret)
    out, lse = call(
        functools.partial(
            _attend, plan=plan, layout=layout, constants=constants, names=tuple(traced)
        ),
        grid=(plan.num_tiles * layout.num_kv_heads, tiling.num_splits, rows),
        out_shape=(
            jax.ShapeDtypeStruct(prefix + q.shape, jnp.float32 if split else q.dtype),
            jax.ShapeDtypeStruct(prefix + q.shape[:-1], jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        name="paged_attention",
    )(q, store.kv, jnp.asarray(layer, jnp.int32).reshape(()), view.block_tables, view.kv_lens, view.q_lens,
      *traced.values())  # fmt: skip
    if not split:
        return out, lse

    items = plan.combine_items
    return call(
        functools.partial(_combine, plan=plan, constants=constants),
        grid=(pl.cdiv(query_len * num_q_heads, items), rows),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(
            num_warps=8 if plan.combine_elements > 2 * _COMBINE_ELEMENTS else 4, num_stages=1
        ),
        name="paged_attention_combine",
    )(out, lse, view.kv_lens, view.q_lens, *([traced["window"]] if "window" in traced else []))


def _as(dtype: Any, plain: type) -> Any:
    """Returns a cast for knobs: None stays None, numbers stay weakly typed, traced values get `dtype`."""

    def cast(x: Any) -> Any:
        if x is None:
            return None
        return plain(x) if isinstance(x, numbers.Number) else x.astype(dtype)

    return cast


_KNOBS = {
    "scale": _as(jnp.float32, float),
    "soft_cap": _as(jnp.float32, float),
    "window": _as(jnp.int32, int),
}


def _check_supported(q: Array, store: KVStore) -> None:
    """Raises NotImplementedError for what the kernels cannot do."""
    for name, dtype in (("q", q.dtype), ("store", store.layout.format.dtype)):
        if dtype not in _FLOATS:
            raise NotImplementedError(
                f"triton paged attention supports float32, bfloat16 and float16, got {name} of {dtype}"
            )
    if q.shape[-1] > _MAX_HEAD_DIM:
        raise NotImplementedError(
            f"triton paged attention supports head_dim up to {_MAX_HEAD_DIM}, got {q.shape[-1]}"
        )


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static side of a call, and the arithmetic both kernels must agree on."""

    tiling: Tiling
    group: int
    num_kv_heads: int
    query_len: int
    head_dim: int
    max_keys: int
    windowed: bool

    @property
    def num_tiles(self) -> int:
        """Tiles of queries of one (row, kv head)."""
        return pl.cdiv(self.query_len * self.group, self.tiling.query_rows)

    @property
    def width(self) -> int:
        """head_dim padded to what Triton's tensors and tensor cores want."""
        return max(16, _power_of_two(self.head_dim))

    @property
    def combine_items(self) -> int:
        """(q_pos, q_head) pairs of one combine program."""
        room = _COMBINE_ELEMENTS // (_power_of_two(self.tiling.num_splits) * self.width)
        return min(max(room, 1), _power_of_two(self.query_len * self.group * self.num_kv_heads))

    @property
    def combine_elements(self) -> int:
        """float32 parts of one combine program."""
        return self.combine_items * _power_of_two(self.tiling.num_splits) * self.width

    def key_range(
        self, tile: Array, kv_len: Array, q_len: Array, window: Any
    ) -> tuple[Array, Array]:
        """Keys [first, end) that some query of the tile sees; empty where it has no query."""
        first_query = tile * self.tiling.query_rows // self.group
        last_query = ((tile + 1) * self.tiling.query_rows - 1) // self.group
        last_query = jnp.minimum(last_query, q_len - 1)
        before = kv_len - q_len  # position of query 0
        end = jnp.where(first_query <= last_query, before + last_query + 1, 0)
        end = jnp.clip(end, 0, self.max_keys)
        first = jnp.maximum(before + first_query - window + 1, 0) if self.windowed else 0
        return jnp.minimum(first, end), end

    def steps(self, first: Array, end: Array) -> tuple[Array, Array, Array]:
        """(first step, end step, steps of one split) of a range of keys."""
        first_step = first // self.tiling.keys
        end_step = pl.cdiv(end, self.tiling.keys)
        return first_step, end_step, pl.cdiv(end_step - first_step, self.tiling.num_splits)


def _attend(
    # in
    q_ref,  # q_dtype[row, q_pos, q_head, head_dim]
    kv_ref,  # layout.dtype[layer, block, kv_head, slot, 2 * head_dim]
    layer_ref,  # i32[]
    tables_ref,  # i32[row, column]
    kv_lens_ref,  # i32[row]
    q_lens_ref,  # i32[row]
    # in: traced knobs, then out
    *refs,  # names of [], out [(split,) row, q_pos, q_head, head_dim], lse [(split,) row, q_pos, q_head]
    plan: _Plan,
    layout,
    constants,
    names,
):
    """One split of one tile of queries of one kv head of one row."""
    *knob_refs, out_ref, lse_ref = refs
    knobs = constants | {name: ref[...] for name, ref in zip(names, knob_refs, strict=True)}
    scale, soft_cap, window = (_KNOBS[name](knobs[name]) for name in _KNOBS)
    tiling, head_dim, width = plan.tiling, plan.head_dim, plan.width
    kv_head, tile = pl.program_id(0) // plan.num_tiles, pl.program_id(0) % plan.num_tiles
    split, row = pl.program_id(1), pl.program_id(2)

    layer = layer_ref[...]
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]
    first, end = plan.key_range(tile, kv_len, q_len, window)
    first_step, end_step, steps = plan.steps(first, end)
    low = first_step + split * steps
    high = jnp.minimum(low + steps, end_step)

    packed = tile * tiling.query_rows + jnp.arange(tiling.query_rows, dtype=jnp.int32)
    query = packed // plan.group  # [query_rows]
    head = kv_head * plan.group + packed % plan.group  # [query_rows]
    inside = query < plan.query_len
    # Padding queries sit at -1, where they see nothing.
    query_pos = jnp.where(query < q_len, kv_len - q_len + query, -1)[:, None]
    columns = jnp.arange(width, dtype=jnp.int32)[None, :]
    real = columns < head_dim
    query_index = (row, *_spread((query[:, None], head[:, None], columns)))
    q = plgpu.load(q_ref.at[query_index], mask=(query_pos >= 0) & real, other=0.0)
    terms = _terms(q.dtype, layout.format.dtype)
    q = q if terms == 1 else q.astype(jnp.float32)

    def half(position, block, live, offset):
        """K (offset 0) or V (offset head_dim) of the keys, zeros where not live: [keys, width]."""
        index = _spread((block[:, None], (position % layout.block_size)[:, None], columns + offset))
        x = plgpu.load(
            kv_ref.at[layer, index[0], kv_head, index[1], index[2]],
            mask=live[:, None] & real,
            other=0,
        )
        if layout.dtype != layout.format.dtype:
            x = lax.bitcast_convert_type(x, layout.format.dtype)
        return x

    def step(index, carry):
        peak, total, acc = (
            carry  # base-2 logarithm of the largest weight, sum of weights, weighted V
        )
        position = index * tiling.keys + jnp.arange(tiling.keys, dtype=jnp.int32)
        live = (position >= first) & (position < end)
        block = plgpu.load(tables_ref.at[row, position // layout.block_size], mask=live, other=0)
        block = jnp.clip(block, 0, layout.num_blocks - 1)
        k = half(position, block, live, 0)
        s = _dot(q, k, 1, terms) * scale
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        seen = live[None, :] & (position[None, :] <= query_pos)
        if window is not None:
            seen &= position[None, :] > query_pos - window
        s = jnp.where(seen, s * _LOG2E, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(s, axis=1))
        safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp2(s - safe[:, None])
        shrink = jnp.exp2(peak - safe)
        v = half(position, block, live, head_dim)
        acc = acc * shrink[:, None] + _dot(weights, v, 0, terms)
        return new_peak, total * shrink + jnp.sum(weights, axis=1), acc

    peak = jnp.full((tiling.query_rows,), -jnp.inf, jnp.float32)
    total = jnp.zeros((tiling.query_rows,), jnp.float32)
    acc = jnp.zeros((tiling.query_rows, width), jnp.float32)
    peak, total, acc = lax.fori_loop(low, high, step, (peak, total, acc))

    some = total > 0
    safe_total = jnp.where(some, total, 1.0)
    out = acc / safe_total[:, None]
    lse = jnp.where(some, (peak + jnp.log2(safe_total)) * _LN2, -jnp.inf)
    # An idle split writes nothing (the combine does not read it); a lone one writes its zeros.
    written = inside & ((low < high) | (tiling.num_splits == 1))
    at = (split,) if tiling.num_splits > 1 else ()
    plgpu.store(
        out_ref.at[(*at, *query_index)], out.astype(out_ref.dtype), mask=written[:, None] & real
    )
    plgpu.store(lse_ref.at[(*at, row, query, head)], lse, mask=written)


def _combine(
    # in
    part_ref,  # f32[split, row, q_pos, q_head, head_dim]
    part_lse_ref,  # f32[split, row, q_pos, q_head]
    kv_lens_ref,  # i32[row]
    q_lens_ref,  # i32[row]
    # in: window [] if traced, then out
    *refs,  # out q_dtype[row, q_pos, q_head, head_dim], lse f32[row, q_pos, q_head]
    plan: _Plan,
    constants,
):
    """Joins the parts of `combine_items` pairs (q_pos, q_head) of one row."""
    *window_ref, out_ref, lse_ref = refs
    window = _KNOBS["window"](window_ref[0][...] if window_ref else constants["window"])
    items, row = plan.combine_items, pl.program_id(1)
    num_q_heads = plan.group * plan.num_kv_heads
    kv_len, q_len = kv_lens_ref[row], q_lens_ref[row]

    item = pl.program_id(0) * items + jnp.arange(items, dtype=jnp.int32)
    inside = item < plan.query_len * num_q_heads
    query, head = item // num_q_heads, item % num_q_heads
    tile = (query * plan.group + head % plan.group) // plan.tiling.query_rows
    first_step, end_step, steps = plan.steps(*plan.key_range(tile, kv_len, q_len, window))

    split = jnp.arange(_power_of_two(plan.tiling.num_splits), dtype=jnp.int32)[:, None]
    used = split * steps[None, :] < (end_step - first_step)[None, :]
    used &= (split < plan.tiling.num_splits) & inside[None, :]
    index = _spread((split, query[None, :], head[None, :]))
    lse = plgpu.load(
        part_lse_ref.at[index[0], row, index[1], index[2]], mask=used, other=-jnp.inf
    )  # [split, item]
    peak = jnp.max(lse, axis=0)
    safe = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp2((lse - safe[None, :]) * _LOG2E)
    total = jnp.sum(weights, axis=0)
    some = total > 0
    safe_total = jnp.where(some, total, 1.0)

    columns = jnp.arange(plan.width, dtype=jnp.int32)
    real = columns < plan.head_dim
    index = _spread(
        (split[:, :, None], query[None, :, None], head[None, :, None], columns[None, None, :])
    )
    part = plgpu.load(
        part_ref.at[index[0], row, index[1], index[2], index[3]],
        mask=used[:, :, None] & real[None, None, :],
        other=0.0,
    )
    out = jnp.sum(part * (weights / safe_total[None, :])[:, :, None], axis=0)  # [item, width]
    index = _spread((query[:, None], head[:, None], columns[None, :]))
    plgpu.store(
        out_ref.at[(row, *index)], out.astype(out_ref.dtype), mask=inside[:, None] & real[None, :]
    )
    lse = jnp.where(some, safe + jnp.log2(safe_total) * _LN2, -jnp.inf)
    plgpu.store(lse_ref.at[row, query, head], lse, mask=inside)


def _spread(indices: tuple[Array, ...]) -> tuple[Array, ...]:
    """Broadcasts index arrays against each other."""
    return tuple(jnp.broadcast_arrays(*indices))


def _terms(q_dtype: Any, kv_dtype: Any) -> int:
    """How many numbers of the pool's format must stand for one of q, or for one weight.

    One when the formats agree (the weights are rounded to it, as in any half-precision attention) or when
    the pool is float32.  Otherwise three: their sum carries 24 bits of bfloat16, so float32 activations
    lose nothing over a half-precision pool and K and V go to the tensor cores as they are.
    """
    return 1 if q_dtype == kv_dtype or kv_dtype == jnp.float32 else 3


def _dot(a: Array, b: Array, b_axis: int, terms: int) -> Array:
    """a[m, k] times b over its axis `b_axis`, in float32; `a` is rounded to `terms` numbers of b's dtype."""
    # float32 pools take true float32 products: one TF32 product has 11 bits.
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dims = (((1,), (b_axis,)), ((), ()))
    result = None
    for _ in range(terms):
        part = a.astype(b.dtype)
        product = lax.dot_general(
            part, b, dims, precision=precision, preferred_element_type=jnp.float32
        )
        result = product if result is None else result + product
        a = a - part.astype(a.dtype) if terms > 1 else a
    return result
