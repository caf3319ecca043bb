"""Every TPU kernel, compiled by the real TPU compiler for v5e, v6e and v5p, and a decode loop around them.

`memory_analysis()` of the compiled program is what the device would hold, tiling padding included.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from compile.tpu_target import CHIPS, abstract, available, compile_for, lowering_for
from jax import lax
from jax.experimental.layout import Format, Layout

from jaxkv import CacheConfig, init_cache, release
from jaxkv.device_bytes import tpu_pool_bytes
from pallas_kernels.block_copy.tpu import copy_blocks_tpu
from pallas_kernels.kv_write.tpu import write_kv_tpu
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.tpu_plan import Tuning

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]
one_chip = pytest.mark.parametrize(
    "chip",
    [
        chip if name == "v5e" else pytest.param(chip, marks=pytest.mark.exhaustive)
        for name, chip in CHIPS.items()
    ],
    ids=lambda chip: chip.name,
)
DEFAULT = Tuning()
FORMATS = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "bfloat16_bits": ("bfloat16", True),
}


# v5p lowers as v5e does (neither computes in bfloat16 but on its matrix units): its formats are one of each.
chip_formats = pytest.mark.parametrize(
    ("chip", "format"),
    [
        pytest.param(chip, format, id=f"{chip.name}-{format}")
        for chip in CHIPS.values()
        for format in FORMATS
        if chip.name != "v5p" or format == "bfloat16"
    ],
)


def arrays(shape, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def make_store(layers, blocks, heads, block_size, head_dim, format="bfloat16") -> KVStore:
    name, as_bits = FORMATS[format]
    layout = KVLayout(layers, blocks, heads, block_size, head_dim, kv_format(name), as_bits)
    return KVStore(arrays(layout.shape, layout.dtype), layout)


def make_view(rows: int, columns: int, query_len: int = 1) -> BatchView:
    return BatchView(
        arrays((rows, columns)), arrays((rows,)), arrays((rows,)), arrays((rows, query_len))
    )


def padding(compiled, *args) -> float:
    """Returns the bytes the device adds to the arguments, as a share of them."""
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(args))
    return compiled.memory_analysis().argument_size_in_bytes / nbytes - 1


def compile_attention(
    chip, store, *, q_heads, rows=8, query_len=1, columns=256, tuning=DEFAULT, everything=False
):
    """Compiles one attention call; with `everything` scale, soft cap and window are traced arguments."""
    layout = store.layout
    q_dtype = layout.format.dtype
    args = (
        arrays((rows, query_len, q_heads, layout.head_dim), q_dtype),
        store,
        arrays(()),
        make_view(rows, columns, query_len),
    )
    numbers = (arrays((), jnp.float32), arrays((), jnp.float32), arrays(()))

    def attend(q, store, layer, view, scale=0.1, soft_cap=None, window=None):
        return paged_attention_tpu(
            q, store, layer, view, scale=scale, soft_cap=soft_cap, window=window, tuning=tuning
        )

    return compile_for(chip, attend, *args, *(numbers if everything else ()))


@chip_formats
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64)])
def test_attention_decode_compiles_and_copies_no_pool(chip, format, q_heads, kv_heads, head_dim):
    store = make_store(4, 4096, kv_heads, 16, head_dim, format)
    compiled = compile_attention(chip, store, q_heads=q_heads, rows=64)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * store.layout.nbytes


@one_chip
@pytest.mark.parametrize("query_len", [5, 512])
def test_attention_many_queries_with_everything_traced_compiles(chip, query_len):
    store = make_store(2, 512, 8, 16, 128)
    compile_attention(chip, store, q_heads=32, rows=2, query_len=query_len, everything=True)


@pytest.mark.parametrize("block_size", [8, 24, 64, 128, 256])
def test_attention_block_sizes_compile(block_size):
    compile_attention(CHIPS["v5e"], make_store(1, 64, 2, block_size, 64), q_heads=14)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "format"),
    [
        (8, 8, 80, "bfloat16"),
        (8, 4, 96, "bfloat16_bits"),
        (8, 4, 256, "bfloat16"),
        (20, 1, 80, "float32"),
        (6, 2, 256, "float32"),
        (32, 32, 128, "bfloat16"),
    ],
)
def test_attention_head_shapes_compile(q_heads, kv_heads, head_dim, format):
    compile_attention(
        CHIPS["v5e"], make_store(1, 64, kv_heads, 16, head_dim, format), q_heads=q_heads
    )


@one_chip
def test_attention_table_outside_smem_compiles(chip):
    """256 rows of 2,048 blocks: 2 MiB of table, twice the SMEM of a core."""
    store = make_store(1, 512, 8, 16, 128)
    compile_attention(chip, store, q_heads=32, rows=256, columns=2048)


def test_attention_rows_shared_by_two_cores_compiles():
    store = make_store(1, 512, 8, 16, 128)
    compile_attention(CHIPS["v5p"], store, q_heads=32, tuning=Tuning(num_cores=2))


@chip_formats
@pytest.mark.parametrize("query_len", [1, 4, 512])
def test_write_compiles_in_place(chip, format, query_len):
    store = make_store(4, 512, 8, 16, 128, format)
    tokens = arrays((4, query_len, 8, 128), jnp.bfloat16)
    view = make_view(4, 64, query_len)
    compiled = compile_for(chip, write_kv_tpu, store, arrays(()), tokens, tokens, view, donate=(0,))
    memory = compiled.memory_analysis()
    fused = 2 * tokens.size * store.layout.format.itemsize  # K and V side by side; then as tiles
    assert memory.alias_size_in_bytes == store.layout.nbytes
    assert memory.temp_size_in_bytes <= 0.01 * store.layout.nbytes + 2 * fused


@chip_formats
def test_copy_compiles_in_place_also_under_cond(chip, format):
    store = make_store(4, 512, 2, 16, 64, format)

    def copy(store, src, dst, count):
        return lax.cond(
            count > 0, lambda s: copy_blocks_tpu(s, src, dst, count), lambda s: s, store
        )

    args = (store, arrays((16,)), arrays((16,)), arrays(()))
    memory = compile_for(chip, copy, *args, donate=(0,)).memory_analysis()
    assert memory.alias_size_in_bytes == store.layout.nbytes
    assert memory.temp_size_in_bytes < 1024


@pytest.mark.parametrize("format", ["bfloat16", "int4"])
def test_scrubbing_release_compiles_in_place(format):
    """Freed blocks are zeroed by an aliased kernel inside a loop: nothing of the pool's size is temporary."""
    config = CacheConfig(
        4, 2, 64, 64, 4096, 8, 32, format=format, as_bits=False, scrub_on_free=True
    )
    cache = jax.eval_shape(lambda: init_cache(config))
    free = functools.partial(release, config)
    compiled = compile_for(CHIPS["v5e"], free, cache, arrays((8,), jnp.bool_), donate=(0,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= config.layout.nbytes
    assert memory.temp_size_in_bytes < 0.02 * config.layout.nbytes


@dataclasses.dataclass(frozen=True)
class Model:
    """The shapes of a model's attention, and a pool of at least 1 GB for it."""

    name: str
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    num_blocks: int


MODELS = (Model("qwen3_8b", 36, 32, 8, 128, 512), Model("qwen2.5_0.5b", 24, 14, 2, 64, 6144))
ROWS, COLUMNS, STEPS = 16, 128, 8


def decode_loop(model: Model, store: KVStore, x, view: BatchView):
    """Runs STEPS decode steps: in each, copies of blocks, then for every layer a write and a read."""

    def one_layer(carry, layer):
        x, store, view = carry
        k, v = x[:, :, : model.kv_heads], x[:, :, -model.kv_heads :]
        store = write_kv_tpu(store, layer, k, v, view)
        out, _ = paged_attention_tpu(
            x, store, layer, view, scale=model.head_dim**-0.5, soft_cap=None, window=None
        )
        return (x + out, store, view), None

    def one_step(state):
        step, x, store, view = state
        pairs = view.kv_lens
        store = lax.cond(
            step > 3, lambda s: copy_blocks_tpu(s, pairs, pairs + 7, step), lambda s: s, store
        )
        view = dataclasses.replace(view, kv_lens=view.kv_lens + 1, positions=view.positions + 1)
        layers = jnp.arange(model.num_layers, dtype=jnp.int32)
        (x, store, view), _ = lax.scan(one_layer, (x, store, view), layers)
        return step + 1, x, store, view

    return lax.while_loop(lambda state: state[0] < STEPS, one_step, (jnp.int32(0), x, store, view))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_decode_loop_of_bits_keeps_the_pool_in_place_without_padding(model):
    """Bits (uint16) on v5e; bfloat16, all chips and the whole model are in test_generation_loop.py."""
    store = make_store(
        model.num_layers, model.num_blocks, model.kv_heads, 16, model.head_dim, "bfloat16_bits"
    )
    x = arrays((ROWS, 1, model.q_heads, model.head_dim), jnp.bfloat16)
    args = (store, x, make_view(ROWS, COLUMNS))
    compiled = compile_for(
        CHIPS["v5e"],
        lambda store, x, view: decode_loop(model, store, x, view),
        *args,
        donate=(0,),
    )
    memory, nbytes = compiled.memory_analysis(), store.layout.nbytes
    assert nbytes > 1e9
    assert memory.alias_size_in_bytes == nbytes  # the device's own bytes, so padding is none
    assert memory.temp_size_in_bytes <= 0.01 * nbytes
    assert padding(compiled, *args) < 0.001


def test_decode_loop_of_head_dim_80_is_in_place_where_the_entry_asks_for_row_major():
    """Left alone XLA gives the pool another layout (160 is no multiple of 128) and copies all of it."""
    model = Model("head_dim_80", 4, 8, 2, 80, 1024)
    store = make_store(4, model.num_blocks, 2, 16, 80)
    args = (store, arrays((ROWS, 1, 8, 80), jnp.bfloat16), make_view(ROWS, COLUMNS))

    def loop(store, x, view):
        return decode_loop(model, store, x, view)

    on_device = tpu_pool_bytes(store.layout.shape, 16)
    free = compile_for(CHIPS["v5e"], loop, *args, donate=(0,)).memory_analysis()
    assert free.temp_size_in_bytes >= on_device, "XLA no longer copies: say so in the README"

    device = abstract(CHIPS["v5e"], arrays(())).sharding
    row_major = KVStore(Format(Layout(major_to_minor=(0, 1, 2, 3, 4)), device), store.layout)
    others = jax.tree.map(lambda _: device, args[1:])
    with lowering_for(CHIPS["v5e"]):
        entry = jax.jit(
            loop,
            donate_argnums=0,
            in_shardings=(row_major, *others),
            out_shardings=(device, device, row_major, others[1]),
        )
        asked = entry.lower(*args).compile().memory_analysis()
    assert asked.alias_size_in_bytes == on_device
    assert asked.temp_size_in_bytes <= 0.02 * on_device


@pytest.mark.parametrize("query_len", [1, 300])
def test_kernels_lower_for_tpu_where_nobody_says_which(query_len):
    """`lax.platform_dependent` and `jax.export` lower without a device kind; Mosaic must not ask."""
    store = make_store(2, 64, 2, 16, 64)

    def step(q, store, layer, view, window):
        store = write_kv_tpu(store, layer, q[:, :, :2], q[:, :, :2], view)
        store = copy_blocks_tpu(store, view.kv_lens, view.q_lens, layer)
        return paged_attention_tpu(
            q, store, layer, view, scale=0.1, soft_cap=layer * 1.0, window=window
        )

    q = arrays((4, query_len, 14, 64), jnp.bfloat16)
    args = (q, store, arrays(()), make_view(4, 64, query_len), arrays(()))
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3
