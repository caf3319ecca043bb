"""One run on a real GPU, under eight minutes: are the CUDA kernels right, and how fast are they?

Correctness first: every case of shapes.py (NaN and Inf in every dead slot) through the kernels against the float32
reference, permuted pools bit for bit, and writes bit for bit.  Then timings of decode (Qwen3-8B's heads, bfloat16) and
of a chunk of prefill, beside JAX's stock kernel and torch's SDPA over a contiguous cache where torch sees the GPU,
as shares of the copy bandwidth measured in the same run.  One table at the end.

    python benchmarks/gpu_check.py               on the GPU machine
    python benchmarks/gpu_check.py --sweep       also other tilings of the Triton kernel at three shapes
    python benchmarks/gpu_check.py --interpret   the correctness half anywhere, a few tiny cases

Each timed call runs REPEATS times inside one compiled loop that walks over copies of the cache (as a model walks over
layers), so that small caches are not read from L2 and launch costs of Python do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from fast_compile import FAST_INTERPRET  # noqa: E402
from oracles.attention import TOLERANCES, worst_row_error  # noqa: E402

from pallas_kernels.kv_write.reference import write_kv_reference  # noqa: E402
from pallas_kernels.kv_write.triton import write_kv_triton  # noqa: E402
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format  # noqa: E402
from pallas_kernels.paged_attention.hopper import paged_attention_hopper  # noqa: E402
from pallas_kernels.paged_attention.reference import paged_attention_reference  # noqa: E402
from pallas_kernels.paged_attention.shapes import CASES, Case, find, make_inputs  # noqa: E402
from pallas_kernels.paged_attention.triton import paged_attention_triton  # noqa: E402
from pallas_kernels.paged_attention.triton_plan import Tiling, choose_tiling  # noqa: E402

DEADLINE_S = 7.5 * 60
REPEATS = 20
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # K and V of a token in one layer, bfloat16
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 4096, 32_768)
INTERPRETED = ("decode_empty_rows", "speculative_window", "decode_bfloat16_bits")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; `error` is a reason, "" when all is well."""

    what: str
    subject: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    error: str = ""


# ---- correctness ----


def check_case(case: Case, name: str, attention: Callable[..., Any], **jit_options: Any) -> Row:
    """Compares one implementation with the reference, and with itself on a permuted pool."""
    knobs = {"scale": case.softmax_scale, "soft_cap": case.soft_cap, "window": case.window}
    run = jax.jit(functools.partial(attention, **knobs), **jit_options)
    try:
        inputs, shuffled = make_inputs(case), make_inputs(case, shuffle=5, sentinel=2**31 - 1)
        args = (inputs.q, inputs.store, inputs.layer, inputs.view)
        out, lse = run(*args)
        again = run(shuffled.q, shuffled.store, shuffled.layer, shuffled.view)
    except NotImplementedError as error:
        return Row(case.name, name, error=f"unsupported: {error}")
    expected, expected_lse = jax.jit(functools.partial(paged_attention_reference, **knobs))(*args)
    worst = worst_row_error(out.astype(jnp.float32), expected.astype(jnp.float32))
    problems = [] if worst <= TOLERANCES[case.format] else ["output"]
    if not np.allclose(lse, expected_lse, rtol=1e-5, atol=1e-5):
        problems.append("log-sum-exp")
    if not all(np.array_equal(a, b) for a, b in zip((out, lse), again, strict=True)):
        problems.append("permuted pool changes bits")
    return Row(case.name, name, worst, "error", error=", ".join(problems))


def check_write(case: Case, write: Callable[..., Any]) -> Row:
    """Compares the write kernel with the reference, bit for bit."""
    inputs = make_inputs(case, dead=(0.0,))
    rng = np.random.default_rng(1)
    shape = (*inputs.view.positions.shape, case.num_kv_heads, case.head_dim)
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in "kv")
    got = jax.jit(write)(inputs.store, inputs.layer, k, v, inputs.view)
    expected = jax.jit(write_kv_reference)(inputs.store, inputs.layer, k, v, inputs.view)
    same = np.asarray(got.kv).tobytes() == np.asarray(expected.kv).tobytes()
    return Row(case.name, "write triton", 0.0, "error", error="" if same else "bytes differ")


def correctness(interpret: bool) -> list[Row]:
    """Runs the correctness half: all cases on a GPU, a few in the interpreter."""
    cases = [find(name) for name in INTERPRETED] if interpret else CASES
    attention = functools.partial(paged_attention_triton, interpret=interpret)
    small = functools.partial(attention, tiling=Tiling(16, 16, 3, 4, 2))
    implementations = {"triton": attention, "triton 3 splits": small}
    if interpret:
        del implementations["triton"]  # the same code, and the interpreter compiles slowly
    elif jax.devices()[0].compute_capability >= "9.0":
        implementations["hopper"] = paged_attention_hopper
    options = {"compiler_options": FAST_INTERPRET} if interpret else {}
    rows = [
        check_case(case, *item, **options) for case in cases for item in implementations.items()
    ]
    write = functools.partial(write_kv_triton, interpret=interpret)
    return rows + [check_write(case, write) for case in cases]


# ---- timings ----


def per_call_us(loop: Callable[..., Any], *args: Any) -> float:
    """Median microseconds of one of the REPEATS calls inside `loop`."""
    compiled = jax.jit(loop).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return (
        1e6
        * statistics.median(harness.seconds(lambda: compiled(*args)) for _ in range(5))
        / REPEATS
    )


def copy_bandwidth() -> float:
    """Measured bytes a second (read plus written) of copying 2 GiB."""
    x = jnp.zeros(1 << 30, jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1)).lower(x).compile()
    jax.block_until_ready(copy(x))
    return 2 * x.nbytes / statistics.median(harness.seconds(lambda: copy(x)) for _ in range(9))


def loop_over_layers(attention: Callable[..., Any], layers: int) -> Callable[..., Any]:
    """A program that calls attention(q, cache, layer, view) REPEATS times, each fed the one before."""

    def loop(q: Any, cache: Any, view: Any) -> Any:
        return jax.lax.fori_loop(0, REPEATS, lambda i, q: attention(q, cache, i % layers, view), q)

    return loop


def ours(attention: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Adapts one of our kernels to `loop_over_layers`."""

    def call(q: Any, cache: Any, layer: Any, view: Any) -> Any:
        knobs = {"scale": HEAD_DIM**-0.5, "soft_cap": None, "window": None} | options
        return attention(q, cache, layer, view, **knobs)[0]

    return call


def stock(q: Any, cache: Any, layer: Any, view: Any) -> Any:
    """JAX's kernel; its pages hold K and V apart, and layers lie behind each other."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    k, v, blocks_per_layer = cache
    tables = view.block_tables + layer * blocks_per_layer
    return paged_attention(q[:, 0], k, v, tables, view.kv_lens)[:, None]


def torch_us(rows: int, context: int, query_len: int, layers: int) -> float | None:
    """The same of torch's SDPA over a contiguous cache; None without torch and a GPU it sees."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    kwargs = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(rows, Q_HEADS, query_len, HEAD_DIM, **kwargs)
    cache = torch.randn(layers, 2, rows, KV_HEADS, context, HEAD_DIM, **kwargs)
    mask = None
    if query_len > 1:
        mask = torch.ones(query_len, context, dtype=torch.bool, device="cuda").tril(
            context - query_len
        )

    def run() -> None:
        for i in range(REPEATS):
            k, v = cache[i % layers]
            torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        torch.cuda.synchronize()

    run()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times) / REPEATS


def make_cache(
    rows: int, context: int, query_len: int, layers: int
) -> tuple[Any, KVStore, BatchView]:
    """Returns (q, store, view) of full rows over a shuffled pool."""
    columns = context // BLOCK
    layout = KVLayout(
        layers, rows * columns, KV_HEADS, BLOCK, HEAD_DIM, kv_format("bfloat16"), False
    )
    pattern = jax.random.normal(jax.random.key(0), (1, 1, *layout.shape[2:]), jnp.bfloat16)
    store = KVStore(jax.jit(lambda x: jnp.broadcast_to(x, layout.shape) + x)(pattern), layout)
    ids = np.random.default_rng(0).permutation(layout.num_blocks).astype(np.int32)
    lens = jnp.full(rows, context, jnp.int32), jnp.full(rows, query_len, jnp.int32)
    positions = jnp.broadcast_to(
        context - query_len + jnp.arange(query_len, dtype=jnp.int32), (rows, query_len)
    )
    view = BatchView(jnp.asarray(ids.reshape(rows, columns)), *lens, positions)
    q = jax.random.normal(jax.random.key(1), (rows, query_len, Q_HEADS, HEAD_DIM), jnp.bfloat16)
    return q, store, view


def time_shape(rows: int, context: int, query_len: int, bandwidth: float, sweep: bool) -> list[Row]:
    """Times every implementation on one shape."""
    kv_bytes = rows * context * TOKEN_BYTES
    layers = max(1, min(REPEATS, (256 << 20) // kv_bytes))
    what = f"{'decode' if query_len == 1 else f'prefill {query_len}'} rows {rows} context {context}"
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if 2.2 * layers * kv_bytes > limit:
        return [Row(what, "all", error="skipped: the caches do not fit the device")]
    q, store, view = make_cache(rows, context, query_len, layers)
    calls: dict[str, tuple[Callable[..., Any], Any]] = {
        "triton": (ours(paged_attention_triton), store)
    }
    if jax.devices()[0].compute_capability >= "9.0":
        calls["hopper"] = (ours(paged_attention_hopper), store)
    if query_len == 1:
        pages = store.kv.transpose(2, 0, 1, 3, 4).reshape(KV_HEADS, -1, BLOCK, 2 * HEAD_DIM)
        blocks = jnp.int32(store.layout.num_blocks)
        calls["stock"] = (stock, (*jnp.split(pages, 2, axis=-1), blocks))
        del pages
    if sweep:
        own = choose_tiling(q.shape, q.dtype, store.layout, context)
        for keys, warps, stages in ((64, 4, 3), (64, 4, 5), (128, 4, 2), (128, 8, 3), (32, 4, 3)):
            for splits in sorted({max(1, own.num_splits // 2), own.num_splits, own.num_splits * 2}):
                tiling = Tiling(own.query_rows, keys, splits, warps, stages)
                name = f"triton keys {keys} splits {splits} warps {warps} stages {stages}"
                calls[name] = (ours(paged_attention_triton, tiling=tiling), store)
    rows_out = []
    for name, (call, cache) in calls.items():
        try:
            us = per_call_us(loop_over_layers(call, layers), q, cache, view)
            share = kv_bytes / (1e-6 * us) / bandwidth
            rows_out.append(Row(what, name, us, "us", share))
        except Exception as error:  # a row of the table, not the end of the run
            rows_out.append(Row(what, name, error=f"{type(error).__name__}: {str(error)[:90]}"))
    us = torch_us(rows, context, query_len, layers) if layers * kv_bytes * 2.2 < limit / 4 else None
    if us is not None:
        rows_out.append(Row(what, "torch SDPA", us, "us", kv_bytes / (1e-6 * us) / bandwidth))
    return rows_out


def timings(begin: float, sweep: bool, quick: bool) -> list[Row]:
    """Runs the timing half, small shapes first, until the deadline."""
    bandwidth = copy_bandwidth()
    rows = [Row("copy bandwidth", jax.devices()[0].device_kind, bandwidth / 1e9, "GB/s", 1.0)]
    shapes = [(batch, context, 1) for context in CONTEXTS for batch in BATCHES]
    shapes = shapes[:4] if quick else [*shapes[:8], (1, 4096, 512), (1, 32_768, 512), *shapes[8:]]
    for batch, context, query_len in shapes:
        if time.perf_counter() - begin > DEADLINE_S:
            rows.append(Row(f"rows {batch} context {context}", "all", error="skipped: out of time"))
            continue
        swept = sweep and (batch, context, query_len) in ((1, 4096, 1), (64, 4096, 1), (8, 1024, 1))
        rows += time_shape(batch, context, query_len, bandwidth, swept)
    return rows


def print_table(rows: list[Row]) -> None:
    """Prints the one table."""
    table = Table(
        title="GPU check", title_justify="left", caption=f"{harness.device()}  {harness.versions()}"
    )
    for column in ("what", "implementation", "value", "share of copy bandwidth", "remark"):
        table.add_column(column)
    for row in rows:
        value = "" if row.value is None else f"{row.value:.4g} {row.unit}"
        share = "" if row.share is None else f"{row.share:.2f}"
        table.add_row(row.what, row.subject, value, share, row.error)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def to_result(row: Row) -> harness.Result:
    """The row as a line for machines."""
    metric = f"gpu_check.{row.subject}.{row.what}".replace(" ", "_")
    shapes = {"share_of_copy_bandwidth": row.share, "remark": row.error}
    return harness.Result(
        metric, -1.0 if row.value is None else row.value, row.unit or "none", shapes
    )


def main() -> None:
    """Runs both halves; exit status 1 when a kernel is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--interpret", action="store_true", help="correctness on tiny cases, no GPU"
    )
    parser.add_argument("--quick", action="store_true", help="time the smallest shapes only")
    parser.add_argument("--sweep", action="store_true", help="time other tilings as well")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, no table")
    options = parser.parse_args()
    begin = time.perf_counter()
    if options.interpret:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit("gpu_check: no GPU here; --interpret runs the correctness half in the interpreter")
    rows = correctness(options.interpret)
    wrong = [row for row in rows if row.error and not row.error.startswith("unsupported")]
    if not options.interpret:
        rows += timings(begin, options.sweep, options.quick)
    if options.json:
        for row in rows:
            print(to_result(row).line())
    else:
        print_table(rows)
    print(f"{len(wrong)} wrong, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
