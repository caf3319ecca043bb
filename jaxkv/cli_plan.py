"""What `jaxkv plan` does between the options and the terminal: a shape in, tables, JSON and a picture out.

Invariants: pure arithmetic of `jaxkv.ledger` and `jaxkv.capacity`; JAX is not imported, no device is touched.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxkv import ledger
from jaxkv.capacity import CapacityPlan, KVSeries, kv_series, plan_capacity
from jaxkv.cli_terminal import format_bytes, one_line, two_columns
from jaxkv.format_bytes import OWN_OPTIONS, KVOptions, default_block_size
from jaxkv.hf_config import model_shape_from_config
from jaxkv.model_shape import ModelShape, model_shape, weights_bytes

DEFAULT_CONTEXT_LEN = 4096
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What to plan for; sizes in bytes.

    Attributes:
      free_bytes: free memory of one device; None plans no pool.
      context_len: tokens per sequence; None means 4,096, or the model's context if that is shorter.
      num_sequences: sequences in the table and the picture over context length.
      model_weights_bytes: the weights; None counts them in `weights_format`.
      kv_format, kv_options, block_size, tensor_parallel, weights_format, reserve_fraction, target: see
        `plan_capacity`; block_size None means the format's own.
    """

    free_bytes: int | None = None
    context_len: int | None = None
    num_sequences: int = 1
    kv_format: str = "bfloat16"
    kv_options: KVOptions = OWN_OPTIONS
    block_size: int | None = None
    tensor_parallel: int = 1
    weights_format: str = "bfloat16"
    model_weights_bytes: int | None = None
    reserve_fraction: float = 0.1
    target: str = "dense"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All figures of one invocation; `capacity` is None without a memory size, weights where unknown."""

    shape: ModelShape
    options: PlanOptions
    context_len: int
    block_size: int
    weights_bytes: int | None
    capacity: CapacityPlan | None
    series: KVSeries

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Bytes of one token in one (quantised) layer and in all, without open blocks."""
        return (
            self.shape.bytes_per_token_per_layer(self.options.kv_format, **self._sizes),
            self.shape.bytes_per_token(self.options.kv_format, **self._sizes),
        )

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "kv_options": self.options.kv_options}

    @property
    def open_block_bytes(self) -> int:
        """Bytes of a sequence's open block; 0 for formats without scales."""
        return self.shape.open_block_bytes(self.options.kv_format, **self._sizes)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of `context_len` tokens, without rounding to blocks and without the open block."""
        return ledger.sequence_bytes(self.context_len, self.token_bytes[1])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values only, ready for `json.dumps`."""
        in_layer, in_all = self.token_bytes
        return {
            "shape": dataclasses.asdict(self.shape),
            "kv_format": self.options.kv_format,
            "kv_options": dataclasses.asdict(self.options.kv_options),
            "context_len": self.context_len,
            "block_size": self.block_size,
            "bytes_per_token_per_layer": in_layer,
            "bytes_per_token": in_all,
            "sequence_bytes": self.sequence_bytes,
            "open_block_bytes": self.open_block_bytes,
            "weights_bytes": self.weights_bytes,
            "capacity": None if self.capacity is None else self.capacity.to_dict(),
            "series": self.series.to_dict(),
        }


# Shapes -------------------------------------------------------------------------------------------


def read_shape(source: str | None, numbers: dict[str, Any]) -> ModelShape:
    """Returns the shape of a config.json, its folder or a hub id, or of plain numbers.

    Args:
      source: where the config is, or None.
      numbers: the fields of `ModelShape` that were given.

    Raises:
      ValueError: both, neither, or not enough of them; a config that is wrong; a hub that does not answer.
    """
    if source is not None:
        if numbers:
            raise ValueError(
                f"model: expected a config or plain numbers, got {source!r} and {', '.join(numbers)}"
            )
        return _shape_from(source)
    required = ("num_layers", "num_q_heads", "num_kv_heads", "head_dim")
    missing = [name for name in required if name not in numbers]
    if missing:
        raise ValueError(
            "model: expected a config.json, its folder or a hub id, or else --layers, --q-heads, "
            f"--kv-heads and --head-dim; {', '.join(missing)} missing"
        )
    return model_shape(**numbers)


def _shape_from(source: str) -> ModelShape:
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model: expected a config.json in the folder {source!r}, found none")
    if path.exists():
        return model_shape_from_config(path)
    if _HUB_ID.fullmatch(source) is None:
        raise ValueError(f"model: expected a config.json, its folder, or a hub id, got {source!r}")
    return model_shape_from_config(_hub_config(source))


def _hub_config(repo_id: str) -> Path:
    import huggingface_hub
    import huggingface_hub.errors

    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, "config.json"))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"model: expected a local config or a hub id that can be fetched, got {repo_id!r}; "
            f"{reason[0] if reason else one_line(error)}"
        ) from error


# The plan -----------------------------------------------------------------------------------------


def make_plan(shape: ModelShape, options: PlanOptions) -> Plan:
    """Returns all figures.

    Raises:
      ValueError, NotImplementedError: as `plan_capacity`; shards without a memory size to plan for.
    """
    context = options.context_len
    if context is None:
        context = min(DEFAULT_CONTEXT_LEN, shape.max_context_len or DEFAULT_CONTEXT_LEN)
    ledger.check_count("context_len", context, 1)
    size = options.block_size
    size = default_block_size(options.kv_format) if size is None else size
    ledger.check_count("block_size", size, 1)
    if options.free_bytes is None and options.tensor_parallel != 1:
        raise ValueError(
            f"tensor_parallel: expected --memory with {options.tensor_parallel} devices"
        )
    weights = options.model_weights_bytes
    if weights is None:
        weights = _counted_weights(shape, options)
    series = kv_series(
        shape,
        num_sequences=options.num_sequences,
        kv_format=options.kv_format,
        kv_options=options.kv_options,
        block_size=size,
        weights_format=options.weights_format,
        model_weights_bytes=weights,
    )
    capacity = _capacity(shape, context, size, weights, options)
    return Plan(shape, options, context, size, weights, capacity, series)


def _counted_weights(shape: ModelShape, options: PlanOptions) -> int | None:
    """Returns the weights' bytes, or None where they cannot be counted and nothing depends on them."""
    try:
        return weights_bytes(shape, options.weights_format)
    except NotImplementedError as error:
        if options.free_bytes is None:
            return None
        raise NotImplementedError(f"{error} (--weights 15GiB)") from error


def _capacity(
    shape: ModelShape, context_len: int, size: int, weights: int | None, options: PlanOptions
) -> CapacityPlan | None:
    if options.free_bytes is None:
        return None
    return plan_capacity(
        shape,
        free_bytes=options.free_bytes,
        context_len=context_len,
        block_size=size,
        kv_format=options.kv_format,
        kv_options=options.kv_options,
        weights_format=options.weights_format,
        model_weights_bytes=weights,
        reserve_fraction=options.reserve_fraction,
        tensor_parallel=options.tensor_parallel,
        target=options.target,
    )


# Output -------------------------------------------------------------------------------------------


def plan_tables(plan: Plan) -> list[Table]:
    """Returns the figures for people: the model, the pool if there is a memory size, and the series."""
    tables = [_model_table(plan), _series_table(plan)]
    if plan.capacity is not None:
        tables.insert(1, _capacity_table(plan.capacity))
    return tables


def _model_table(plan: Plan) -> Table:
    shape, size = plan.shape, plan.block_size
    in_layer, in_all = plan.token_bytes
    heads = "MLA latent" if shape.is_mla else f"{shape.num_q_heads} / {shape.num_kv_heads}"
    rows = [
        ("layers, query / kv heads, head_dim", f"{shape.num_layers}, {heads}, {shape.head_dim}"),
        ("weights", "unknown" if plan.weights_bytes is None else format_bytes(plan.weights_bytes)),
        ("KV per token and layer", f"{in_layer:,} B"),
        ("KV per token", f"{in_all:,} B"),
        (f"KV of {plan.context_len:,} tokens", format_bytes(plan.sequence_bytes)),
        (
            f"blocks of {size} for them",
            f"{ledger.num_blocks_needed(plan.context_len, size):,}, "
            f"{ledger.tail_waste(plan.context_len, size)} slots unused",
        ),
    ]
    if plan.open_block_bytes:
        rows.append(("open block of a sequence", format_bytes(plan.open_block_bytes)))
    if not shape.is_mla and shape.num_q_heads != shape.num_kv_heads:
        saving = ledger.gqa_saving(shape.num_q_heads, shape.num_kv_heads)
        rows.append(("smaller than with all heads", f"{saving:g} times"))
    rows += [(name, str(value)) for name, value in plan.options.kv_options.asked().items()]
    return two_columns(f"Model, KV in {plan.options.kv_format}", rows)


def _capacity_table(plan: CapacityPlan) -> Table:
    devices = "" if plan.tensor_parallel == 1 else f", each of {plan.tensor_parallel} devices"
    ratio = "-" if plan.kv_to_weights is None else f"{plan.kv_to_weights:.2f}"
    rows = [
        ("kept back", format_bytes(plan.reserve_bytes)),
        ("weights", format_bytes(plan.weights_bytes)),
        ("left for the cache", format_bytes(plan.budget_bytes)),
        (
            "blocks",
            f"{plan.num_blocks:,} of {plan.block_size} tokens, {format_bytes(plan.block_bytes)}",
        ),
        ("tokens", f"{plan.num_tokens:,}"),
        (f"sequences of {plan.context_len:,} tokens", f"{plan.concurrency:,}"),
        ("pool", format_bytes(plan.pool_bytes)),
        ("bookkeeping", format_bytes(plan.bookkeeping_bytes)),
        ("KV over weights", ratio),
    ]
    if plan.open_block_bytes:
        rows.insert(-2, ("open blocks, one a sequence", format_bytes(plan.open_bytes)))
    table = two_columns(f"Pool in {format_bytes(plan.free_bytes)} of free memory{devices}", rows)
    table.caption = "\n".join(plan.warnings) or None
    table.caption_justify = "left"
    return table


def _series_table(plan: Plan) -> Table:
    series = plan.series
    count = series.num_sequences
    table = Table(title=f"KV of {count:,} sequence{'s' * (count > 1)}", title_justify="left")
    for name in ("context", "KV", "KV over weights"):
        table.add_column(name, justify="right")
    for context, kv in zip(series.context_lens, series.kv_bytes, strict=True):
        share = f"{kv / series.weights_bytes:.2f}" if series.weights_bytes else "-"
        table.add_row(f"{context:,}", format_bytes(kv), share)
    return table


def save_plot(plan: Plan, path: Path) -> None:
    """Writes the picture "KV against weights over context length"; the file's ending says the format.

    Raises:
      ValueError: matplotlib is not installed, or does not know the ending.
      OSError: the file cannot be written.
    """
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ValueError(
            "plot: expected matplotlib, which is not installed; pip install 'jaxkv[plot]'"
        ) from error
    series = plan.series
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for count in sorted({1, series.num_sequences}):
        kv = [bytes_ * count // series.num_sequences for bytes_ in series.kv_bytes]
        label = f"KV, {count:,} sequence{'s' * (count > 1)} ({plan.options.kv_format})"
        axes.plot(series.context_lens, kv, marker="o", label=label)
    if series.weights_bytes:
        axes.axhline(series.weights_bytes, color="black", linestyle="--", label="weights")
    if plan.options.free_bytes is not None:
        axes.axhline(plan.options.free_bytes, color="grey", linestyle=":", label="free memory")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(round(value))))
    axes.set_xlabel("context length (tokens)")
    axes.set_title("KV cache against weights")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
