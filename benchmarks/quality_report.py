"""What `quality.py` leaves behind: the table, the plot of perplexity against bits per element, the answers.

Invariants: everything is made from the JSON lines in the folder, so that runs of some rows add up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness


def line(result: harness.Result) -> str:
    """Returns one result for people."""
    low, high = result.spread or (0.0, 0.0)
    percent = f"{result.value:+.3f} % ({low:+.3f} .. {high:+.3f})"
    return f"{result.metric:48s} {percent}  {json.dumps(result.shapes)}"


def save(folder: Path, results: Sequence[harness.Result]) -> None:
    """Merges results into quality.jsonl; writes quality.md and quality.png from all that are there."""
    merged = harness.merge(folder / "quality.jsonl", results)
    rows: dict[str, dict[str, harness.Result]] = {}
    for r in merged:
        name, figure = r.metric.removeprefix("quality.").rsplit(".", 1)
        rows.setdefault(name, {})[figure.removesuffix("ppl_change_percent")] = r
    (folder / "quality.md").write_text("\n".join(_lines(rows)) + "\n")
    _plot({name: row[""] for name, row in rows.items()}, folder / "quality.png")


def _lines(rows: Mapping[str, Mapping[str, harness.Result]]) -> list[str]:
    plain = rows["float32"]
    lines = [
        "# Perplexity of SmolLM2-135M through the cache",
        "",
        f"`python benchmarks/quality.py --losses DIR --save`, CPU, {harness.versions()}.",
        "",
        f"Windows of 1,024 tokens of `pydoc_data.topics`. In chunks of 256: {plain[''].shapes['tokens']:,} predictions, perplexity of",
        f"the float32 cache {plain[''].versus_value:.3f}. One by one: the last 128 tokens of each window,",
        f"{plain['decode_'].shapes['tokens']:,} predictions, float32 {plain['decode_'].versus_value:.3f}. The change is against float32 on the same tokens, with one",
        "standard error over the windows; the limit is on the change in chunks. Bits are those of the pool (codes, scales, wide",
        "layers) per element; times: tokens per byte against bfloat16, by `nbytes` of 8,192 blocks and 64 open ones. Controls",
        "quantise per token and head with float32 scales, without a cache.",
        "",
        "| row | block | bits | times | in chunks | standard error | limit | one by one | standard error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        of, limit = row[""].shapes, row[""].limit
        cells = [
            name,
            str(of.get("block_size", "-")),
            f"{of['bits_per_element']:g}",
            f"{of['tokens_per_byte_vs_bf16']:.2f}" if "tokens_per_byte_vs_bf16" in of else "-",
            *_cells(row.get("")),
            "" if limit is None else f"+{limit:g} %",
            *_cells(row.get("decode_")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", "![Perplexity against bits per element](quality.png)"]


def _cells(result: harness.Result | None) -> tuple[str, str]:
    if result is None:
        return "-", "-"
    low, high = result.spread or (0.0, 0.0)
    return f"{result.value:+.3f} %", f"{(high - low) / 2:.3f}"


def _plot(rows: Mapping[str, harness.Result], path: Path) -> None:
    """Draws the change of perplexity against bits per element; needs the extra `plot`."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for is_control, marker, label in ((False, "o", "the cache"), (True, "x", "per token and head")):
        chosen = {n: r for n, r in rows.items() if n.startswith("control.") == is_control}
        bits = [r.shapes["bits_per_element"] for r in chosen.values()]
        errors = [(r.spread[1] - r.spread[0]) / 2 if r.spread else 0.0 for r in chosen.values()]
        values = [r.value for r in chosen.values()]
        axes.errorbar(bits, values, errors, fmt=marker, capsize=3, label=label)
        for x, (name, r) in zip(bits, chosen.items(), strict=True):
            at = (x, r.value)
            below = name in ("int4", "int8")  # their neighbours' names lie above
            shift = (5, -10 if below else 5)
            axes.annotate(name, at, textcoords="offset points", xytext=shift, fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 5, 6, 8, 10, 16, 32], ["4", "5", "6", "8", "10", "16", "32"])
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=-0.1)
    axes.set_xlim(3.8, 40)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set_xlabel("bits per element of K and V, scales counted")
    axes.set_ylabel("change of perplexity against float32 (%)")
    axes.set_title("SmolLM2-135M through the cache")
    axes.legend()
    figure.savefig(path, dpi=110)


def answers(
    prompts: Sequence[str], texts: Mapping[str, Sequence[str]], folder: Path | None
) -> None:
    """Prints the answers of every row beside the first row's, and writes quality_answers.md into the folder."""
    first, *others = texts
    lines = [
        "# Greedy answers of SmolLM2-135M",
        "",
        f"`python benchmarks/quality.py --text --save`, {harness.versions()}. 24 tokens each, after 256 tokens of `pydoc_data.topics`",
        f"(so that sealed blocks are read); `=` where a row says what {first} says.",
    ]
    for index, prompt in enumerate(prompts):
        lines += ["", f"## {prompt}", "", f"* {first}: {texts[first][index]!r}"]
        for name in others:
            same = texts[name][index] == texts[first][index]
            lines.append(f"* {name}: " + ("=" if same else repr(texts[name][index])))
    print("\n".join(lines))
    if folder is not None:
        folder.mkdir(exist_ok=True)
        (folder / "quality_answers.md").write_text("\n".join(lines) + "\n")
