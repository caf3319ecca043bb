"""What the CUDA compilers made of the Triton kernels, beside JAX's stock paged attention; needs no GPU.

Decode with a context of 4,096 and one chunk of prefill, for the shapes of Qwen3-8B and Qwen2.5-0.5B.  Figures:
launches and temporary bytes of the compiled call; registers, spilled bytes, shared memory, thread blocks that
share a multiprocessor, tensor-core instructions, and global loads of 128 bits (q, K, V) and narrower ones (lengths,
table entries) of its main kernel.  Over codes a block has its format's own size, and q is bfloat16 or, where named, float32.

    python benchmarks/static_gpu.py --save benchmarks/results
    python benchmarks/static_gpu.py --save benchmarks/results --formats int8 fp8_e4m3 int4   # only these rows anew
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import paged_attention as stock_ops
from rich.console import Console
from rich.table import Table

sys.path[:0] = [
    str(Path(__file__).parent.parent),
    str(Path(__file__).parent.parent / "tests/compile"),
]

from cuda_target import TARGETS, CudaProgram, compile_for, skip_reason, tool  # noqa: E402

from jaxkv import CacheConfig  # noqa: E402
from jaxkv.format_bytes import default_block_size  # noqa: E402
from jaxkv.kv_store import init_store  # noqa: E402
from pallas_kernels.kv_write.triton import write_kv_triton  # noqa: E402
from pallas_kernels.layout import BatchView, KVStore  # noqa: E402
from pallas_kernels.paged_attention.triton import paged_attention_triton  # noqa: E402
from pallas_kernels.sealed import QuantisedStore, SealedStore  # noqa: E402

CONTEXT = 4096
UNITS = {
    "launches": "launches",
    "spill_bytes": "B",
    "registers": "registers",
    "shared_bytes": "B",
    "blocks_per_core": "thread blocks",
    "tensor_core": "instructions",
    "wide_loads": "instructions",
    "narrow_loads": "instructions",
    "temp_bytes": "B",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call; sizes as in KVLayout."""

    model: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int = 64
    query_len: int = 1
    block_size: int = 16

    def store(self, format: str) -> KVStore | SealedStore:
        """A pool of 64 sequences of CONTEXT tokens, one layer, as shapes; of a quantised format its codes."""
        config = CacheConfig(
            num_layers=1,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=64 * CONTEXT // self.block_size,
            max_seqs=64,
            max_blocks_per_seq=CONTEXT // self.block_size,
            format=format,
            as_bits=False,
        )
        store = jax.eval_shape(lambda: init_store(config))
        return store.sealed if isinstance(store, QuantisedStore) else store


CALLS = (
    Call("qwen3_8b", 32, 8, 128),
    Call("qwen2.5_0.5b", 14, 2, 64),
    Call("qwen3_8b", 32, 8, 128, rows=1),
    Call("qwen3_8b", 32, 8, 128, rows=1, query_len=512),
    Call("qwen3_8b", 32, 8, 128, block_size=64),
    Call("qwen3_8b", 32, 8, 128, block_size=128),
)
PLAIN = ("bfloat16", "float32")
CODES = ("int8", "fp8_e4m3", "int4")
FLOAT32_Q = ".float32_q"  # after a format's name: codes read by float32 queries
FORMATS = (*PLAIN, *CODES, *(name + FLOAT32_Q for name in CODES))


def calls_of(format: str) -> list[Call]:
    """The calls a format is measured on: over codes those of CALLS, each once, with blocks of the format's own size."""
    if format in PLAIN:
        return list(CALLS)
    size = default_block_size(format.removesuffix(FLOAT32_Q))
    return list(dict.fromkeys(dataclasses.replace(call, block_size=size) for call in CALLS))


def spec(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """An array that exists only as shape and dtype."""
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_ours(arch: str, call: Call, format: str) -> tuple[CudaProgram, CudaProgram | None]:
    """Compiles (attention, write) of a call; the write once, for it does not depend on the block size or on codes."""
    store = call.store(format.removesuffix(FLOAT32_Q))
    dtype = jnp.dtype(jnp.bfloat16 if format in ("bfloat16", *CODES) else jnp.float32)
    columns, rows, query_len = CONTEXT // call.block_size, call.rows, call.query_len
    view = BatchView(spec(rows, columns), spec(rows), spec(rows), spec(rows, query_len))
    q = spec(rows, query_len, call.num_q_heads, call.head_dim, dtype=dtype)
    k = spec(rows, query_len, call.num_kv_heads, call.head_dim, dtype=dtype)

    def attend(q: Any, store: Any, layer: Any, view: Any) -> Any:
        return paged_attention_triton(
            q, store, layer, view, scale=call.head_dim**-0.5, soft_cap=None, window=None
        )

    attention = compile_for(TARGETS[arch], attend, (q, store, spec(), view))
    if format not in PLAIN or call.block_size != Call.block_size:
        return attention, None
    return attention, compile_for(TARGETS[arch], write_kv_triton, (store, spec(), k, k, view), (0,))


def compile_stock(arch: str, call: Call, format: str) -> CudaProgram:
    """Compiles upstream's decode kernel on the same shapes, with its own default tiling."""
    layout = call.store(format).layout
    dtype = layout.format.dtype
    shape = (call.num_kv_heads, layout.num_blocks, call.block_size, call.head_dim)
    pages = spec(*shape, dtype=dtype)
    q = spec(call.rows, call.num_q_heads, call.head_dim, dtype=dtype)
    args = (q, pages, pages, spec(call.rows, CONTEXT // call.block_size), spec(call.rows))
    per_step = max(1, 128 // call.block_size)  # 128 keys a step, as its default of 8 pages of 16

    def attend(q: Any, k: Any, v: Any, tables: Any, lengths: Any) -> Any:
        return stock_ops.paged_attention(q, k, v, tables, lengths, pages_per_compute_block=per_step)

    return compile_for(TARGETS[arch], attend, args)


def figures(program: CudaProgram, kernel: str) -> dict[str, float]:
    """The figures of a compiled call and its main kernel."""
    stats = program.kernel(kernel)
    widths = stats.load_widths()
    return {
        "launches": len(program.launches),
        "spill_bytes": stats.spill_bytes,
        "registers": stats.registers,
        "shared_bytes": stats.shared_bytes,
        "blocks_per_core": program.target.blocks_per_core(stats),
        "tensor_core": stats.tensor_core_instructions,
        "wide_loads": widths.get(128, 0),
        "narrow_loads": sum(n for bits, n in widths.items() if bits < 128),
        "temp_bytes": program.memory.temp_size_in_bytes,
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one kernel on one target, and upstream's where it can do the same."""

    arch: str
    format: str
    kernel: str
    call: Call
    ours: dict[str, float]
    stock: dict[str, float]

    def results(self) -> list[harness.Result]:
        """One result a figure; those the kernels must keep carry their limit."""
        limits = {"launches": 1 if self.kernel == "write" else 2, "spill_bytes": 0}
        shapes = {"kernel": self.kernel, "target": TARGETS[self.arch].name}
        return [
            harness.Result(
                f"static_gpu.{self.arch}.{self.format}.{figure}",
                value,
                UNITS[figure],
                shapes | dataclasses.asdict(self.call),
                versus="stock" if self.stock else None,
                versus_value=self.stock.get(figure),
                ratio=value / self.stock[figure] if self.stock.get(figure) else None,
                limit=limits.get(figure),
            )
            for figure, value in self.ours.items()
        ]


def measure(arch: str, format: str, call: Call) -> list[Row]:
    """Compiles one call, and upstream's kernel where it can do it (decode)."""
    attention, write = compile_ours(arch, call, format)
    stock: dict[str, float] = {}
    if call.query_len == 1 and format in PLAIN:
        stock = figures(compile_stock(arch, call, format), "paged_attention")
    ours = figures(attention, "paged_attention")
    rows = [Row(arch, format, "attention", call, ours, stock)]
    if write is not None:
        rows.append(Row(arch, format, "write", call, figures(write, "write_kv"), {}))
    return rows


def table_lines(results: list[harness.Result]) -> list[tuple[str, ...]]:
    """The cells of the table: one line a kernel, upstream's under ours."""
    kernels: dict[tuple[str, ...], dict[str, harness.Result]] = {}
    for r in results:
        _, arch, *format, figure = r.metric.split(".")
        of = r.shapes
        call = f"{of['model']} rows {of['rows']} queries {of['query_len']} block {of['block_size']}"
        key = (f"{arch} {'.'.join(format)}", of["kernel"], call)
        kernels.setdefault(key, {})[figure] = r
    lines = []
    for (target, kernel, call), figures in kernels.items():
        values = [figures[name].value for name in UNITS]
        lines.append((target, kernel, call, *(f"{value:,.0f}" for value in values)))
        stock = [figures[name].versus_value for name in UNITS]
        if None not in stock:
            lines.append((target, "stock", call, *(f"{value:,.0f}" for value in stock)))
    return lines


def print_table(results: list[harness.Result]) -> None:
    """Prints the table."""
    table = Table(title="Triton kernels through the CUDA compilers", title_justify="left")
    for column in ("target", "kernel", "call", *UNITS):
        table.add_column(column, justify="right" if column in UNITS else "left")
    for line in table_lines(results):
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def save(folder: Path, results: list[harness.Result]) -> None:
    """Merges into static_gpu.jsonl, a line a figure, and writes static_gpu.md, its table with what made it."""
    results = harness.merge(folder / "static_gpu.jsonl", results)
    ptxas = subprocess.run([tool("ptxas"), "--version"], check=True, capture_output=True, text=True)
    versions = harness.versions() | {
        "jax-cuda13-plugin": importlib.metadata.version("jax-cuda13-plugin"),
        "ptxas": ptxas.stdout.split()[-1],
    }
    heads = ("target", "kernel", "call", *UNITS)
    table = [heads, ("---",) * 3 + ("---:",) * len(UNITS), *table_lines(results)]
    lines = [
        "# Triton kernels through the CUDA compilers",
        "",
        "`python benchmarks/static_gpu.py --save benchmarks/results`, no GPU.  "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        (__doc__ or "").split("\n\n")[1].replace("\n", " "),
        "`stock`: jax.experimental.pallas.ops.gpu.paged_attention on the same shapes.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
    ]
    (folder / "static_gpu.md").write_text("\n".join(lines))


def main() -> None:
    """Compiles for sm_80, sm_90 and sm_100 (quick: two of each, bfloat16) and prints; exit 1 past a limit."""
    archs = ("sm_80", "sm_90", "sm_100")
    parser = argparse.ArgumentParser(
        description="What CUDA's compilers made of the Triton kernels."
    )
    parser.add_argument("--quick", action="store_true", help="sm_80 and sm_90, two calls, bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, no table")
    parser.add_argument("--save", type=Path, help="folder for static_gpu.md and static_gpu.jsonl")
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, metavar="FORMAT", help="some of them"
    )
    parser.add_argument("--archs", nargs="+", choices=archs, metavar="ARCH", help="some of them")
    options = parser.parse_args()
    formats = options.formats or (("bfloat16",) if options.quick else FORMATS)
    reason = skip_reason()
    if reason:
        sys.exit(f"static_gpu: {reason}")
    results = [
        result
        for arch in options.archs or (archs[:2] if options.quick else archs)
        for format in formats
        for call in calls_of(format)[: 2 if options.quick else None]
        for row in measure(arch, format, call)
        for result in row.results()
    ]
    if options.save:
        save(options.save, results)
    if options.json:
        for result in results:
            print(result.line())
    else:
        print_table(results)
    if any(result.limit is not None and result.value > result.limit for result in results):
        sys.exit(1)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
