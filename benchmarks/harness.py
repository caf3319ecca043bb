"""What all benchmarks share: measuring, the table for people and the lines for machines.

Invariants:
  * A benchmark verifies what it times, and times only what it has verified.
  * Lowering, compiling, the first call and the steady state are told apart.
  * Times are medians with their spread (the middle half); ratios come from runs that alternate, so that a
    change of the machine's speed meets both sides.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Result:
    """One figure.

    Attributes:
      metric: its id, dotted.
      value, unit: the figure.
      shapes: the sizes it was measured at.
      versus, versus_value, ratio: what it is compared with, if anything, and value / versus_value.
      spread: the middle half of the measurements, in the unit of `value`; None where nothing varies.
      limit: the most it may be; None where nothing limits it.
      least: the least it may be; None where nothing asks for it.
    """

    metric: str
    value: float
    unit: str
    shapes: dict[str, Any]
    versus: str | None = None
    versus_value: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    limit: float | None = None
    least: float | None = None

    @property
    def misses(self) -> bool:
        """Whether the figure lies past its limit or below its least."""
        past = self.limit is not None and self.value > self.limit
        return past or (self.least is not None and self.value < self.least)

    def line(self) -> str:
        """Returns the result as one JSON object, with versions and device."""
        fields = dataclasses.asdict(self)
        return json.dumps(fields | {"versions": versions(), "device": device()})


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program with what it took to make it; times in seconds."""

    call: Callable[..., Any]
    lower_s: float
    compile_s: float
    memory: Any


def merge(path: Path, results: Sequence[Result]) -> list[Result]:
    """Writes results to a file of JSON lines and returns all that it now holds.

    A result replaces the one of the same metric and shapes; others in the file stay as they were measured.
    """

    def identity(line: dict[str, Any]) -> str:
        return json.dumps([line["metric"], line["shapes"]], sort_keys=True)

    old = path.read_text().splitlines() if path.is_file() else []
    lines = {identity(json.loads(line)): line for line in old}
    lines |= {identity(json.loads(line)): line for line in (result.line() for result in results)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines.values()))
    return [_read(json.loads(line)) for line in lines.values()]


def _read(line: dict[str, Any]) -> Result:
    fields = {name: value for name, value in line.items() if name not in ("versions", "device")}
    spread = fields.get("spread")
    return Result(**fields | {"spread": None if spread is None else tuple(spread)})


def versions() -> dict[str, str]:
    """Returns the versions that a figure depends on."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jaxkv")}
    return {"python": platform.python_version(), **packages}


def device() -> str:
    """Returns the device in words."""
    first = jax.devices()[0]
    return f"{first.platform}: {first.device_kind}"


SETTLE_S = 0.3


def compile_program(
    function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()
) -> Compiled:
    """Lowers and compiles a function for arguments, abstract or concrete."""
    begin = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*args)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    return Compiled(compiled, middle - begin, end - middle, compiled.memory_analysis())


def seconds(function: Callable[[], Any]) -> float:
    """Returns how long one call takes until its result is there."""
    begin = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - begin


def alternate(rounds: int, *functions: Callable[[], Any]) -> list[list[float]]:
    """Times functions in turn, so that each round meets the machine in one mood; seconds per call.

    A short pause comes before each call: worker threads of the one before (OpenMP's spin for a while) must sleep.
    """
    times: list[list[float]] = [[] for _ in functions]
    for round_ in range(rounds):
        order = range(len(functions)) if round_ % 2 == 0 else reversed(range(len(functions)))
        for index in order:
            time.sleep(SETTLE_S)
            times[index].append(seconds(functions[index]))
    return times


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Returns the first and third quartile."""
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all leaves, abstract or concrete; a random key counts with its words."""

    def leaf_bytes(leaf: Any) -> int:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        return leaf.size * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))


def main(description: str, run: Callable[[bool], list[Result]]) -> None:
    """Runs a benchmark from the command line and prints its results; exit status 1 past a limit.

    Args:
      description: one line for --help and above the table.
      run: called with whether to be quick.
    """
    parser = argparse.ArgumentParser(description=description)
    add_options(parser)
    options = parser.parse_args()
    report(description, run(options.quick), options.json)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, no table")


def report(description: str, results: list[Result], as_json: bool) -> None:
    """Prints results; exit status 1 past a limit."""
    if as_json:
        for result in results:
            print(result.line())
    else:
        _print_table(description, results)
    if any(result.misses for result in results):
        sys.exit(1)


def _asked(result: Result) -> str:
    """Returns what a figure is held to, in words."""
    most = [] if result.limit is None else [f"{result.limit:.4g}"]
    least = [] if result.least is None else [f"at least {result.least:.4g}"]
    return ", ".join(most + least)


def _print_table(description: str, results: list[Result]) -> None:
    table = Table(title=description, title_justify="left", caption=f"{device()}  {versions()}")
    table.caption_justify = "left"
    for column in ("metric", "value", "middle half", "limit", "versus", "ratio", "shapes"):
        table.add_column(column, overflow="fold")
    for r in results:
        table.add_row(
            r.metric,
            f"{r.value:.4g} {r.unit}",
            "" if r.spread is None else f"{r.spread[0]:.4g} to {r.spread[1]:.4g}",
            _asked(r),
            "" if r.versus is None else f"{r.versus} {r.versus_value:.4g}",
            "" if r.ratio is None else f"{r.ratio:.3f}",
            ", ".join(f"{key} {value}" for key, value in r.shapes.items()),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
