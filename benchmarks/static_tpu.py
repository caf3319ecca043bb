"""What the TPU compiler made of the attention kernel, beside JAX's two stock kernels; needs no TPU.

The figure is VLIW bundles per KiB of K and V in the innermost loop over keys of decode: a bundle is one cycle, so at
819 GB/s and 1.5 GHz (v5e) a kernel below about 1.9 waits for memory, and above it the memory waits.  All bundles
of the loop count, also those of branches a whole chunk of blocks never enters.  Over codes the KiB are those of the codes,
scales apart: the same tokens take a half (int8, fp8_e4m3) or a quarter (int4) of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DUMP = Path(tempfile.mkdtemp(prefix="static_tpu_"))  # libtpu reads its flags once, when it starts
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [
    str(Path(__file__).parent.parent),
    str(Path(__file__).parent.parent / "tests/compile"),
]

import harness  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from tpu_target import CHIPS, Chip, available, compile_for  # noqa: E402

from jaxkv import CacheConfig  # noqa: E402
from jaxkv.kv_store import init_store  # noqa: E402
from pallas_kernels.layout import BatchView  # noqa: E402
from pallas_kernels.paged_attention.shapes import SPEED, Case  # noqa: E402
from pallas_kernels.paged_attention.tpu import paged_attention_tpu  # noqa: E402
from pallas_kernels.paged_attention.tpu_plan import Tuning, make_plan  # noqa: E402
from pallas_kernels.sealed import SEALED_FORMATS, QuantisedStore  # noqa: E402

STOCK_CHUNK = 512  # tokens per iteration of the stock kernels
LIMITS = {  # bundles per KiB on v5e, bfloat16, by model and block size
    "qwen3_8b": {16: 1.0, 32: 0.7, 64: 0.7, 128: 0.7},
    "qwen2.5_0.5b": {16: 2.0, 32: 2.0, 64: 2.0, 128: 2.0},
}
CODE_BLOCKS = {"int8": (32, 64, 128), "fp8_e4m3": (32, 64, 128), "int4": (64, 128)}  # whole tiles
CASES = SPEED + tuple(
    dataclasses.replace(case, format=format)
    for format, sizes in CODE_BLOCKS.items()
    for case in SPEED
    if case.block_size in sizes
)
FORMATS = ("bfloat16", *CODE_BLOCKS)
LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*((?:> ?)*)\s*\{(\}?)")


def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that exists only as shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def loop_bundles(text: str) -> int:
    """Returns the bundles of the innermost loop that holds most of a kernel's code.

    `>` marks show how deep in loops a bundle is; the outermost loop is the grid.  A run of bundles at some depth is a
    loop; as long as one deeper run holds more than half of it, that one is the loop that matters.
    """
    depths: list[int] = []
    for match in filter(None, map(LINE.match, text.splitlines())):
        is_empty = match[2] == "}"  # waits after a branch; they carry no marks
        depths.append(depths[-1] if is_empty and depths else match[1].count(">"))
    run, depth = depths, 1
    while True:
        depth += 1
        runs, current = [], []
        for d in [*run, 0]:
            if d >= depth:
                current.append(d)
            elif current:
                runs.append(current)
                current = []
        deepest = max(runs, key=len, default=[])
        if depth > 2 and len(deepest) <= len(run) / 2:
            return len(run)
        run = deepest


def bundles_of(chip: Chip, function: Callable[..., Any], *args: Any) -> int:
    """Compiles a call and returns the bundles of the largest main loop of its kernels."""
    compile_for(chip, function, *args)
    files = [f for f in DUMP.glob("*-final_bundles.txt") if "schedule-analysis" not in f.name]
    bundles = max(loop_bundles(file.read_text()) for file in files)
    for file in DUMP.iterdir():
        file.unlink()
    return bundles


def ours(chip: Chip, case: Case) -> float:
    """Returns bundles per KiB of our kernel: of K and V, or of their codes."""
    rows, context = len(case.lens), case.lens[0][1]
    columns = context // case.block_size
    config = CacheConfig(
        num_layers=1,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        num_blocks=rows * columns,
        max_seqs=rows,
        max_blocks_per_seq=columns,
        format=case.format,
        as_bits=False,
    )
    store = jax.eval_shape(lambda: init_store(config))
    store = store.sealed if isinstance(store, QuantisedStore) else store
    q = array(rows, 1, case.num_q_heads, case.head_dim, dtype=jnp.bfloat16)
    view = BatchView(array(rows, columns), array(rows), array(rows), array(rows, 1))

    def call(q, store, layer, view):
        return paged_attention_tpu(
            q, store, layer, view, scale=case.softmax_scale, soft_cap=None, window=None
        )

    bundles = bundles_of(chip, call, q, store, array(), view)
    plan = make_plan(q.shape, q.dtype, store.layout, columns, Tuning())
    elements = plan.chunk_len * case.num_kv_heads * 2 * case.head_dim
    return bundles / (elements * element_bits(case) / 8 / 1024)


def element_bits(case: Case) -> int:
    """Returns the bits of an element of K and V, or of its code."""
    return SEALED_FORMATS[case.format].bits if case.format in SEALED_FORMATS else 16


def stock_paged(chip: Chip, case: Case) -> float:
    """Returns bundles per KiB of jax.experimental.pallas.ops.tpu.paged_attention."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    rows, columns = len(case.lens), case.lens[0][1] // case.block_size
    pool = array(
        case.num_kv_heads, rows * columns, case.block_size, case.head_dim, dtype=jnp.bfloat16
    )
    q = array(rows, case.num_q_heads, case.head_dim, dtype=jnp.bfloat16)

    def call(q, k, v, lens, table):
        return paged_attention(
            q, k, v, lens, table, pages_per_compute_block=STOCK_CHUNK // case.block_size
        )

    bundles = bundles_of(chip, call, q, pool, pool, array(rows), array(rows, columns))
    return bundles / (STOCK_CHUNK * 2 * case.head_dim * 2 / 1024)  # one head per iteration


def stock_ragged(chip: Chip, case: Case) -> float:
    """Returns bundles per KiB of jax.experimental.pallas.ops.tpu.ragged_paged_attention."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    rows, columns = len(case.lens), case.lens[0][1] // case.block_size
    pool = array(
        rows * columns, case.block_size, 2 * case.num_kv_heads, case.head_dim, dtype=jnp.bfloat16
    )
    q = array(rows, case.num_q_heads, case.head_dim, dtype=jnp.bfloat16)

    def call(q, pool, lens, table, starts, count):
        return ragged_paged_attention(
            q,
            pool,
            lens,
            table,
            starts,
            count,
            num_kv_pages_per_block=STOCK_CHUNK // case.block_size,
            num_queries_per_block=4,  # its cheapest for one query a sequence (8: a fifth more)
            vmem_limit_bytes=64 * 2**20,
        )

    args = (array(rows), array(rows, columns), array(rows + 1), array(1))
    bundles = bundles_of(chip, call, q, pool, *args)
    return bundles / (STOCK_CHUNK * case.num_kv_heads * 2 * case.head_dim * 2 / 1024)


KERNELS = {"ours": ours, "stock_paged": stock_paged, "stock_ragged": stock_ragged}


def measure_all(chip: Chip, case: Case) -> dict[str, float]:
    """Returns bundles per KiB of every kernel that takes the case; a stock kernel may refuse it, none reads codes."""
    values = {}
    kernels = {"ours": ours} if case.format in SEALED_FORMATS else KERNELS
    for name, measure in kernels.items():
        try:
            values[name] = measure(chip, case)
        except Exception as error:
            if name == "ours":
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0][:60]
            print(f"{chip.name} {case.name} {name}: unsupported: {reason}", file=sys.stderr)
    return values


def results_of(chip: Chip, case: Case) -> list[harness.Result]:
    """Returns one result a kernel; ours is compared with the better of the stock kernels."""
    model = case.name.partition("_block")[0]
    shapes = {
        "model": model,
        "batch": len(case.lens),
        "context": case.lens[0][1],
        "heads": f"{case.num_q_heads}/{case.num_kv_heads}",
        "head_dim": case.head_dim,
        "compiler": f"libtpu {importlib.metadata.version('libtpu')}",
    }
    suffix = "" if model == "qwen3_8b" else f".{model.replace('.', '_')}"
    prefix = f"static_tpu.{chip.name}.{case.format}.block{case.block_size}{suffix}"
    values = measure_all(chip, case)
    mine = values.pop("ours")
    best = min(values, key=values.__getitem__, default=None)
    result = harness.Result(
        f"{prefix}.bundles_per_kib",
        mine,
        "bundles/KiB",
        shapes,
        versus=best,
        versus_value=None if best is None else values[best],
        ratio=None if best is None else mine / values[best],
        limit=LIMITS[model][case.block_size]
        if (chip.name, case.format) == ("v5e", "bfloat16")
        else None,
    )
    others = [
        harness.Result(f"{prefix}.{name}.bundles_per_kib", value, "bundles/KiB", shapes)
        for name, value in values.items()
    ]
    return [result, *others]


def run(quick: bool, formats: Sequence[str]) -> list[harness.Result]:
    """Returns all results, per chip and case; quick: v5e and the smallest blocks of a format."""
    chips = [CHIPS["v5e"]] if quick else list(CHIPS.values())
    cases = [case for case in CASES if case.format in formats]
    if quick:
        cases = [c for c in cases if c.block_size == CODE_BLOCKS.get(c.format, (16,))[0]]
    return [result for chip in chips for case in cases for result in results_of(chip, case)]


def save(results: list[harness.Result]) -> None:
    """Merges the results into benchmarks/results: JSON lines, and a table of one row a chip and case."""
    folder = Path(__file__).parent / "results"
    results = harness.merge(folder / "static_tpu.jsonl", results)
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    codes: list[tuple[str, ...]] = []
    for r in results:
        _, chip, format, block, *middle, _ = r.metric.split(".")
        model, block = r.shapes["model"], block.removeprefix("block")
        if format in SEALED_FORMATS:
            as_bfloat16 = r.value * SEALED_FORMATS[format].bits / 16
            codes.append((model, chip, format, block, f"{r.value:.2f}", f"{as_bfloat16:.2f}"))
            continue
        row = rows.setdefault((model, chip, block), {})
        kernel = middle[-1] if middle and middle[-1] in KERNELS else "ours"
        row[kernel] = f"{r.value:.2f}"
        row.setdefault("limit", "" if r.limit is None else f"{r.limit}")
    columns = (*KERNELS, "limit")
    first = results[0].shapes
    lines = [
        "# Bundles per KiB of K and V: TPU decode attention, no TPU needed",
        "",
        f"`python benchmarks/static_tpu.py --save`: batch {first['batch']}, {first['context']:,} tokens a row; "
        f"{first['compiler']}, {harness.versions()}.",
        "",
        "A bundle is a cycle. A v5e (819 GB/s at 1.5 GHz) waits for memory below about 1.9. `stock_paged` and",
        "`stock_ragged` are `jax.experimental.pallas.ops.tpu.paged_attention` and `ragged_paged_attention`; a dash:",
        "the kernel does not take the case. The limit is what the project asks of itself.",
        "",
        "## bfloat16",
        "",
        *_table(
            ("model", "chip", "block", *columns),
            [(*key, *(row.get(name, "-") for name in columns)) for key, row in rows.items()],
            num_words=2,
        ),
        "",
        "## Codes",
        "",
        "bfloat16 queries. The KiB are those of the codes, scales apart; the last column is the same for the KiB of",
        "bfloat16 that the codes stand for, to be read beside the table above.",
        "",
        *_table(
            (
                "model",
                "chip",
                "format",
                "block",
                "per KiB of codes",
                "per KiB of bfloat16 they stand for",
            ),
            codes,
            num_words=3,
        ),
    ]
    (folder / "static_tpu.md").write_text("\n".join(lines) + "\n")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], num_words: int) -> list[str]:
    """Returns a Markdown table; all columns but the first `num_words` are numbers."""
    rule = "|---" * num_words + "|--:" * (len(heads) - num_words) + "|"
    head, *body = ("| " + " | ".join(cells) + " |" for cells in (heads, *rows))
    return [head, rule, *body]


def main() -> None:
    """Runs the benchmark; `--save` also merges the results into benchmarks/results."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    options, sys.argv[1:] = parser.parse_known_args()

    def run_and_save(quick: bool) -> list[harness.Result]:
        results = run(quick, options.formats)
        if options.save:
            save(results)
        return results

    title = (
        "TPU decode attention: bundles per KiB of K and V, or of their codes, in the loop over keys "
        f"(--save keeps them, --formats takes some of {', '.join(FORMATS)})"
    )
    harness.main(title, run_and_save)


if __name__ == "__main__":
    try:
        if available() is not None:
            sys.exit(f"static_tpu: {available()}")
        main()
    finally:
        shutil.rmtree(DUMP, ignore_errors=True)
