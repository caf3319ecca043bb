"""The commands that run once: `jaxkv generate`, `profile`, `inspect` and `plan`.

Invariants: a command's context holds the function that loads a model; heavy modules are imported inside the commands, after
`start_jax` has made them quiet, so that `--help` is quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxkv import cli_terminal
from jaxkv.cli_options import (
    BlockSizeOption,
    DevicesOption,
    EarlyStop,
    JsonOption,
    KVFormatOption,
    ModelOption,
    NumBlocksOption,
    PromptArgument,
    SeedOption,
    SymmetricKeysOption,
    ValueGroupOption,
    WeightsFormatOption,
    WideLayersOption,
)

if TYPE_CHECKING:
    from jaxkv.cli_generate import Request
    from jaxkv.generate import Completion

UNFINISHED = 1  # exit code
PROFILE_PROMPT = (
    "Once upon a time there was a little girl who had a small dog. Every day they went to the park, and "
    "one day the dog found a big red ball under a tree."
)


def generate(
    context: typer.Context,
    prompts: PromptArgument = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", show_default=False, help="A file that is one prompt; '-' is stdin."
        ),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Every line of a file or of stdin is a prompt.")
    ] = False,
    model: ModelOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", "-n", show_default="128", help="Tokens to generate per sequence."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens of this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens at least this likely against the most likely one.")
    ] = 0.0,
    seed: SeedOption = 0,
    num_samples: Annotated[
        int, typer.Option(help="Sequences per prompt; they share its blocks.")
    ] = 1,
    beams: Annotated[
        int | None,
        typer.Option(
            show_default="no beam search",
            help="Search with this many beams per prompt; --num-samples of the best are written.",
        ),
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(help="With beams: above 1 favours long texts, below 1 short ones.")
    ] = 1.0,
    early_stopping: Annotated[
        EarlyStop,
        typer.Option(
            help="With beams: when a search with enough finished texts ends: at once (yes), when the best beam as it "
            "stands is no better (no), or when none can become better (never)."
        ),
    ] = EarlyStop.no,
    chat: Annotated[
        bool,
        typer.Option("--chat/--no-chat", help="Put each prompt into the model's chat template."),
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt before its text.")] = False,
    kv_format: KVFormatOption = "float32",
    weights_format: WeightsFormatOption = "float32",
    block_size: BlockSizeOption = None,
    symmetric_keys: SymmetricKeysOption = None,
    value_group: ValueGroupOption = None,
    num_wide_layers: WideLayersOption = 0,
    num_blocks: NumBlocksOption = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(show_default="64", help="Prompt tokens per prefill call.")
    ] = None,
    steps_per_dispatch: Annotated[
        int,
        typer.Option(help="Decode steps between two looks of the host; 1 streams token by token."),
    ] = 16,
    devices: DevicesOption = 1,
    stats: Annotated[
        bool, typer.Option("--stats", help="Write what the run cost to stderr.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts. They come as arguments, from files, or from standard input.

    One prompt streams to the terminal; several run together and are written when all are done.
    """
    platform = cli_terminal.start_jax(devices)
    from jaxkv import cli_generate, cli_report
    from jaxkv.format_bytes import KVOptions
    from jaxkv.sampling import SamplingParams

    texts = cli_generate.read_prompts(prompts or [], file or [], lines)
    options = cli_generate.RunOptions(
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature, top_k, top_p, min_p, seed),
        num_samples=num_samples,
        num_beams=beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping.rule,
        chat=chat,
        kv_format=kv_format,
        kv_options=KVOptions(symmetric_keys, value_group, num_wide_layers),
        block_size=block_size,
        num_blocks=num_blocks,
        prefill_chunk=prefill_chunk,
        steps_per_dispatch=steps_per_dispatch,
    )
    request = cli_generate.prepare(context.obj(model, weights_format, devices), texts, options)
    completions = _run(request, platform, as_json=as_json, echo=echo)
    if stats:
        cli_terminal.stderr().print(cli_report.stats_table(request.generator, platform))
    if cli_generate.note_unfinished(request, completions):
        raise typer.Exit(UNFINISHED)


def _run(request: Request, platform: str, *, as_json: bool, echo: bool) -> list[Completion]:
    """Runs a request and writes its result to standard output."""
    from jaxkv import cli_generate

    if as_json:
        completions = cli_generate.collect(request)
        cli_generate.write_json(request, completions, platform)
        return completions
    if request.generator.config.max_seqs == 1 and request.options.num_beams is None:
        return cli_generate.stream_text(request, echo=echo)
    completions = cli_generate.collect(request)
    cli_generate.write_labelled(request, completions)
    return completions


def profile(
    context: typer.Context,
    prompts: PromptArgument = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens per sequence.")
    ] = 64,
    num_samples: Annotated[
        int, typer.Option(help="Sequences per prompt; they share its blocks.")
    ] = 4,
    seed: SeedOption = 0,
    kv_format: KVFormatOption = "float32",
    weights_format: WeightsFormatOption = "float32",
    block_size: BlockSizeOption = None,
    symmetric_keys: SymmetricKeysOption = None,
    value_group: ValueGroupOption = None,
    num_wide_layers: WideLayersOption = 0,
    num_blocks: NumBlocksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a short generation and show the memory of the live cache, from its real arrays."""
    platform = cli_terminal.start_jax()
    from jaxkv import cli_generate, cli_report
    from jaxkv.format_bytes import KVOptions
    from jaxkv.sampling import SamplingParams

    options = cli_generate.RunOptions(
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature=0.8, seed=seed),
        num_samples=num_samples,
        kv_format=kv_format,
        kv_options=KVOptions(symmetric_keys, value_group, num_wide_layers),
        block_size=block_size,
        num_blocks=num_blocks,
        steps_per_dispatch=8,
    )
    loaded = context.obj(model, weights_format)
    profiles = cli_generate.profile_run(loaded, prompts or [PROFILE_PROMPT], options)
    fullest = max(profiles, key=lambda profile: profile.used_blocks)
    if as_json:
        print(json.dumps({"fullest": fullest.to_dict(), "after": profiles[-1].to_dict()}))
        return
    title = f"At the fullest ({platform}, {kv_format})"
    Console().print(cli_report.profile_table(fullest, title))
    Console().print(cli_report.profile_table(profiles[-1], "After the run"))


def inspect(
    context: typer.Context,
    prompts: PromptArgument = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Tokens of each request.")
    ] = 24,
    num_slots: Annotated[int, typer.Option(help="Requests that run at once.")] = 3,
    steps_per_look: Annotated[int, typer.Option(help="Decode steps between two looks.")] = 4,
    kv_format: KVFormatOption = "float32",
    weights_format: WeightsFormatOption = "float32",
    block_size: BlockSizeOption = None,
    num_blocks: NumBlocksOption = None,
    png: Annotated[
        Path | None, typer.Option(show_default=False, help="Write the busiest moment to this .png.")
    ] = None,
    animate: Annotated[
        Path | None, typer.Option(show_default=False, help="Write the whole run to this .gif.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a few requests that share prefixes and show the blocks of the pool: whose, shared, cached, free."""
    cli_terminal.start_jax()
    from jaxkv import cli_inspect

    out = cli_inspect.Outputs(png, animate, as_json)
    out.check()
    options = cli_inspect.InspectOptions(
        max_new_tokens, num_slots, steps_per_look, kv_format, block_size, num_blocks
    )
    cli_inspect.inspect_run(context.obj(model, weights_format), prompts or [], options, out)


def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG", show_default=False, help="A config.json, its folder, or a hub id."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(show_default=False, help="Free memory of one device, e.g. 24GiB.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(show_default="4096", help="Tokens of a sequence.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences in the table over context length.")] = 1,
    kv_format: KVFormatOption = "bfloat16",
    weights_format: WeightsFormatOption = "bfloat16",
    block_size: BlockSizeOption = None,
    symmetric_keys: SymmetricKeysOption = None,
    value_group: ValueGroupOption = None,
    num_wide_layers: WideLayersOption = 0,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the kv heads.")] = 1,
    reserve: Annotated[float, typer.Option(help="Share of the memory to keep back.")] = 0.1,
    target: Annotated[
        str, typer.Option(help="'tpu' counts tiling padding, 'dense' none.")
    ] = "dense",
    weights: Annotated[
        str | None, typer.Option(show_default="counted", help="Bytes of the weights, e.g. 15GiB.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Without a config: layers.")] = None,
    q_heads: Annotated[int | None, typer.Option(help="Without a config: query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Without a config: kv heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Without a config: width of a head.")] = None,
    hidden: Annotated[int | None, typer.Option(help="To count weights: hidden size.")] = None,
    intermediate: Annotated[int | None, typer.Option(help="To count weights: MLP width.")] = None,
    vocab: Annotated[int | None, typer.Option(help="To count weights: vocabulary.")] = None,
    kv_lora_rank: Annotated[int | None, typer.Option(help="MLA: width of the latent.")] = None,
    rope_head_dim: Annotated[int | None, typer.Option(help="MLA: width of the rotary key.")] = None,
    plot: Annotated[
        Path | None, typer.Option(show_default=False, help="Write the picture to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count what a cache costs and what fits a memory size, before anything is allocated."""
    from jaxkv import cli_plan
    from jaxkv.format_bytes import KVOptions

    numbers = {
        "num_layers": layers, "num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": head_dim,
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab,
        "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": rope_head_dim,
    }  # fmt: skip
    given = {name: value for name, value in numbers.items() if value is not None}
    options = cli_plan.PlanOptions(
        free_bytes=None if memory is None else cli_terminal.parse_bytes("memory", memory),
        context_len=context,
        num_sequences=sequences,
        kv_format=kv_format,
        kv_options=KVOptions(symmetric_keys, value_group, num_wide_layers),
        block_size=block_size,
        tensor_parallel=tensor_parallel,
        weights_format=weights_format,
        model_weights_bytes=None
        if weights is None
        else cli_terminal.parse_bytes("weights", weights),
        reserve_fraction=reserve,
        target=target,
    )
    result = cli_plan.make_plan(cli_plan.read_shape(source, given), options)
    if plot is not None:
        cli_plan.save_plot(result, plot)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        Console().print(*cli_plan.plan_tables(result), sep="\n")
