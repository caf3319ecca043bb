"""Writing new tokens on TPU (Mosaic): one tile of 8 tokens at a time, in place.

The smallest piece of the pool a copy can name is a tile: 8 tokens of a block, all kv heads at once.  New tokens
of a row cover a run of tiles, of which only the first and the last can be part new, part old::

    positions   0       8       16      24      32        q_len 21, kv_len 29
                |.......|new####|#######|#####...|
    tile                 part    whole   part
    read                 HBM -> old              <- only tiles that are part old
    merge                old, new -> old
    write                old -> HBM
                                 new -> HBM      <- straight from the input, never read

Invariants:
  * The pool is an aliased operand; nothing but the tiles of new tokens is touched.
  * A tile belongs to one row (blocks that receive tokens have ref 1), so the tiles of a step never meet and
    all their copies fly together.
  * Bits are moved, never numbers: a NaN keeps its payload, bits stay bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import Array, BatchView, KVLayout, KVStore, encode
from pallas_kernels.paged_attention.tpu_plan import check_supported

TILE = 8  # tokens
STEP_BYTES = 4 * 2**20  # VMEM for the old tiles of one grid step
Ref = Any


def write_kv_tpu(
    store: KVStore,
    layer: Array,
    k: Array,
    v: Array,
    view: BatchView,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> KVStore:
    """Returns the store with the new tokens written; see spec.py.

    ALIASES: the pool is updated in place where the caller's program may give it up.

    Args:
      store, layer, k, v, view: as in `write_kv`.
      interpret: False, or how to interpret the kernel on another platform.

    Raises:
      NotImplementedError: the target cannot do this; the message says what it can.
    """
    layout = store.layout
    check_supported(layout)
    fused = encode(layout, jnp.concatenate([k, v], axis=-1))  # [row, q_pos, kv_head, 2 * head_dim]
    num_tiles = (view.query_len + 2 * (TILE - 1)) // TILE
    begin = view.kv_lens - view.q_lens  # position of each row's first new token
    first = begin // TILE * TILE  # position of each row's first tile
    tile_begin = first[:, None] + TILE * jnp.arange(num_tiles, dtype=jnp.int32)[None]
    call = _call(store, view.kv_lens.shape[0] * num_tiles, view.query_len == 1, interpret)
    kv = call(
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        _blocks_of(layout, view, tile_begin).reshape(-1),
        (tile_begin % layout.block_size).reshape(-1),
        (begin[:, None] - tile_begin).reshape(-1),
        (view.kv_lens[:, None] - tile_begin).reshape(-1),
        _new_tiles(fused, first - begin, num_tiles),
        store.kv,
    )
    return dataclasses.replace(store, kv=kv)


def _blocks_of(layout: KVLayout, view: BatchView, tile_begin: Array) -> Array:
    """Returns i32[row, tile], the block each tile is in; NO_BLOCK for tiles without a new token."""
    columns = jnp.minimum(tile_begin // layout.block_size, view.block_tables.shape[1] - 1)
    blocks = jnp.take_along_axis(view.block_tables, columns, axis=1)
    has_new = (tile_begin < view.kv_lens[:, None]) & (view.q_lens > 0)[:, None]
    return jnp.where(has_new, blocks, layout.no_block)


def _new_tiles(fused: Array, offset: Array, num_tiles: int) -> Array:
    """Returns the new tokens laid out as the tiles they go to: [row * tile, kv_head, TILE or 1, 2 * head_dim].

    A single token is left alone: the kernel repeats it over the tile and takes the one it needs.

    Args:
      fused: [row, q_pos, kv_head, 2 * head_dim].
      offset: i32[row], index of the token at the start of a row's first tile; at most 0.
      num_tiles: tiles per row.
    """
    rows, query_len, heads, width = fused.shape
    if query_len == 1:
        return fused.reshape(rows, heads, 1, width)
    index = offset[:, None] + jnp.arange(num_tiles * TILE, dtype=jnp.int32)[None]
    index = jnp.clip(index, 0, query_len - 1)[:, :, None, None]
    tokens = jnp.take_along_axis(fused, index, axis=1)
    tiles = tokens.reshape(rows * num_tiles, TILE, heads, width)
    return tiles.transpose(0, 2, 1, 3)


def _call(store: KVStore, num_items: int, is_single: bool, interpret):
    """Returns the pallas_call that writes `num_items` tiles."""
    layout = store.layout
    heads, width = layout.num_kv_heads, 2 * layout.head_dim
    tile_bytes = heads * TILE * width * layout.format.itemsize
    per_step = max(1, min(num_items, STEP_BYTES // tile_bytes))
    tokens = 1 if is_single else TILE
    return pl.pallas_call(
        functools.partial(_kernel, num_items, per_step, layout.num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_items, per_step),),
            in_specs=[
                pl.BlockSpec((per_step, heads, tokens, width), lambda step, *_: (step, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((per_step, heads, TILE, width), store.kv.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(store.kv.shape, store.kv.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="write_kv",
    )


def _kernel(
    num_items: int,
    per_step: int,
    num_blocks: int,
    # prefetch
    layer_ref,  # i32[1]
    blocks_ref,  # i32[item]: the block a tile is in; num_blocks and more: no tile
    offsets_ref,  # i32[item]: first token of the tile in its block, a multiple of TILE
    begins_ref,  # i32[item]: the new tokens of the tile are begin <= token < end; begin may lie
    ends_ref,  # i32[item]: before the tile and end past it
    # in
    new_ref,  # VMEM dtype[item, kv_head, TILE or 1, 2 * head_dim]
    old_kv_ref,  # HBM dtype[layer, block, kv_head, block_size, 2 * head_dim]
    # out
    new_kv_ref,  # HBM: the same pool
    # scratch
    old_ref,  # VMEM dtype[item, kv_head, TILE, 2 * head_dim]
    sems_ref,  # DMA[2]: reads, writes
):
    """Writes the tiles of one step: start all reads, wait for all, merge and start all writes, wait.

    Copies end in any order, so a wait on a shared semaphore tells nothing until all have been waited for.
    Tiles are read through the operand and written through the result, which is the same memory: libtpu has
    returned zeros to kernels with an operand they never read.

    References: field case R2.
    """
    first = pl.program_id(0) * per_step
    count = jnp.minimum(num_items - first, per_step)
    num_tokens = new_ref.shape[2]
    bits = jnp.dtype(f"uint{8 * new_ref.dtype.itemsize}")

    def tile_of(kv_ref, i):
        offset = pl.multiple_of(offsets_ref[first + i], TILE)
        return kv_ref.at[layer_ref[0], blocks_ref[first + i], :, pl.ds(offset, TILE), :]

    def exists(i):
        return (blocks_ref[first + i] >= 0) & (blocks_ref[first + i] < num_blocks)

    def is_whole(i):
        if num_tokens == 1:
            return False
        return (begins_ref[first + i] <= 0) & (ends_ref[first + i] >= TILE)

    def read(i):
        return pltpu.make_async_copy(tile_of(old_kv_ref, i), old_ref.at[i], sems_ref.at[0])

    def write(i, source_ref):
        return pltpu.make_async_copy(source_ref.at[i], tile_of(new_kv_ref, i), sems_ref.at[1])

    def is_part_old(i):
        return exists(i) & jnp.logical_not(is_whole(i))

    @pl.loop(0, count)
    def _start(i):
        @pl.when(is_part_old(i))
        def _():
            read(i).start()

        if num_tokens == TILE:

            @pl.when(exists(i) & is_whole(i))
            def _():
                write(i, new_ref).start()

    @pl.loop(0, count)
    def _wait_for_reads(i):
        @pl.when(is_part_old(i))
        def _():
            read(i).wait()

    @pl.loop(0, count)
    def _merge(i):
        @pl.when(is_part_old(i))
        def _():
            token = lax.broadcasted_iota(jnp.int32, old_ref.shape[1:], 1)
            is_new = (token >= begins_ref[first + i]) & (token < ends_ref[first + i])
            new, old = (lax.bitcast_convert_type(x[i], bits) for x in (new_ref, old_ref))
            merged = jnp.where(is_new, jnp.broadcast_to(new, old.shape), old)
            old_ref[i] = lax.bitcast_convert_type(merged, old_ref.dtype)
            write(i, old_ref).start()

    @pl.loop(0, count)
    def _wait_for_writes(i):
        @pl.when(exists(i))
        def _():
            write(i, old_ref).wait()
