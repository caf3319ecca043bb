"""The command line: `jaxkv generate`, `serve`, `bench`, `plan`, `profile` and `inspect`.

The composition root: the only file of the package that imports `models`.

Invariants: heavy modules are imported inside the commands, after `start_jax` has made them quiet, so that
`--help` is quick; bad input ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console

from jaxkv import cli_terminal
from jaxkv.cli_options import (
    BlockSizeOption,
    DraftLenOption,
    DraftModelOption,
    EarlyStop,
    EngineBlocksOption,
    JsonOption,
    KVFormatOption,
    MaxLenOption,
    MaxSeqsOption,
    ModelOption,
    NumBlocksOption,
    PolicyOption,
    PrefillTokensOption,
    PromptArgument,
    SeedOption,
    SymmetricKeysOption,
    TenantWeightsOption,
    ValueGroupOption,
    WeightsFormatOption,
    WideLayersOption,
)

if TYPE_CHECKING:
    from jaxkv.cli_generate import Loaded, Request
    from jaxkv.generate import Completion

BAD_INPUT = 2
UNFINISHED = 1
PROFILE_PROMPT = (
    "Once upon a time there was a little girl who had a small dog. Every day they went to the park, and "
    "one day the dog found a big red ball under a tree."
)


class _Program(typer.core.TyperGroup):
    """The group of commands; turns errors of the user's making into one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            result = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except Exception as error:
            if cli_terminal.debugging() or not _is_expected(error):
                raise
            given = _given_value(error, sys.argv[1:] if args is None else args)
            print(f"jaxkv: {cli_terminal.one_line(error)}{given}", file=sys.stderr)
            result = BAD_INPUT
        code = result if isinstance(result, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code


def _given_value(error: Exception, args: Sequence[str]) -> str:
    """Returns ", got ..." for an option that could not be parsed: its own message leaves the value out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, _, value = arg.partition("=")
        if name in names:
            return f", got {value or following!r}"
    return ""


def _is_expected(error: Exception) -> bool:
    """Whether an error says what is wrong with the input (usage, values, files, capacity)."""
    status = sys.modules.get("jaxkv.status")  # what can raise its errors has imported it
    capacity = (status.CapacityError,) if status else ()
    known = (ValueError, NotImplementedError, ImportError, OSError, FloatingPointError, *capacity)
    return isinstance(error, known) or hasattr(error, "format_message")


app = typer.Typer(cls=_Program, add_completion=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A paged KV cache for JAX: generate text with it, plan its memory, look at its memory."""
    if version:
        print(f"jaxkv {importlib.metadata.version('jaxkv')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def generate(
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
    stats: Annotated[
        bool, typer.Option("--stats", help="Write what the run cost to stderr.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts. They come as arguments, from files, or from standard input.

    One prompt streams to the terminal; several run together and are written when all are done.
    """
    platform = cli_terminal.start_jax()
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
    request = cli_generate.prepare(_load(model, weights_format), texts, options)
    completions = _run(request, platform, as_json=as_json, echo=echo)
    if stats:
        config = request.generator.config
        cli_terminal.stderr().print(
            cli_report.stats_table(request.generator.stats, config, platform)
        )
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


@app.command()
def serve(
    model: ModelOption = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines call.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="JAXKV_API_KEY",
            show_default=False,
            help="Callers must send it; see JAXKV_API_KEY.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(show_default="the model's", help="What callers write into the field model."),
    ] = None,
    max_seqs: MaxSeqsOption = 8,
    max_len: MaxLenOption = None,
    kv_format: KVFormatOption = "float32",
    weights_format: WeightsFormatOption = "float32",
    block_size: BlockSizeOption = None,
    num_blocks: EngineBlocksOption = None,
    prefill_tokens: PrefillTokensOption = 256,
    steps_per_dispatch: Annotated[
        int,
        typer.Option(help="Decode steps between two looks of the host; 1 streams token by token."),
    ] = 8,
    draft_len: DraftLenOption = 0,
    draft_model: DraftModelOption = None,
    policy: PolicyOption = "lru",
    tenant_weights: TenantWeightsOption = None,
    max_queue: Annotated[
        int, typer.Option(help="Sequences that run or wait; more are answered 429.")
    ] = 256,
    max_n: Annotated[int, typer.Option(help="Samples of one prompt.")] = 16,
    max_body: Annotated[str, typer.Option(help="Size of a request, e.g. 4MiB.")] = "4MiB",
    keep_alive: Annotated[
        float,
        typer.Option(help="Seconds without a token after which a stream gets a comment; 0: none."),
    ] = 15.0,
    grace: Annotated[
        float, typer.Option(help="Seconds for running requests to finish at the end.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP, in OpenAI's form: completions and chat, streamed or not.

    It writes one line when it is ready. SIGINT and SIGTERM end it in good order.
    """
    cli_terminal.start_jax()
    from jaxkv import cli_engine, cli_serve

    cli_serve.check_packages()
    cli_serve.check_api_key(api_key)
    from jaxkv.serve import Limits, bind

    limits = Limits(
        max_body_bytes=cli_terminal.parse_bytes("max_body", max_body),
        max_n=max_n,
        max_queue=max_queue,
        keep_alive_s=keep_alive or None,
    )
    options = cli_engine.EngineOptions(
        max_seqs=max_seqs,
        max_len=max_len,
        kv_format=kv_format,
        block_size=block_size,
        num_blocks=num_blocks,
        prefill_tokens=prefill_tokens,
        steps_per_dispatch=steps_per_dispatch,
        draft_len=draft_len,
        has_draft=draft_model is not None,
        policy=policy,
        tenant_weights=cli_engine.parse_weights(tenant_weights),
    )
    load_draft = None
    if draft_model is not None:
        load_draft = functools.partial(_load, draft_model, weights_format)
    with bind(host, port) as listener:
        cli_serve.run(
            lambda: _load(model, weights_format),
            cli_serve.model_name(model, name),
            listener,
            options,
            limits,
            api_key=api_key,
            grace_s=grace,
            load_draft=load_draft,
        )


@app.command()
def bench(
    model: ModelOption = None,
    requests: Annotated[int, typer.Option(help="How many.")] = 32,
    prompt_len: Annotated[str, typer.Option(help="Tokens of a prompt: least:most.")] = "16:128",
    output_len: Annotated[str, typer.Option(help="Tokens to generate: least:most.")] = "16:64",
    shared_prefix: Annotated[int, typer.Option(help="First tokens that all prompts share.")] = 0,
    dataset: Annotated[
        Path | None,
        typer.Option(show_default=False, help="A ShareGPT-like JSON file instead of random ids."),
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests a second; 0: all at once.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of lengths, ids and arrivals.")] = 0,
    max_seqs: MaxSeqsOption = 8,
    max_len: MaxLenOption = None,
    kv_format: KVFormatOption = "float32",
    weights_format: WeightsFormatOption = "float32",
    block_size: BlockSizeOption = None,
    num_blocks: EngineBlocksOption = None,
    prefill_tokens: PrefillTokensOption = 256,
    steps_per_dispatch: Annotated[
        int, typer.Option(help="Decode steps between two looks of the host.")
    ] = 16,
    draft_len: DraftLenOption = 0,
    draft_model: DraftModelOption = None,
    policy: PolicyOption = "lru",
    tenant_weights: TenantWeightsOption = None,
    plot: Annotated[
        Path | None, typer.Option(show_default=False, help="Draw the latencies into this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput and latency of continuous batching on a workload."""
    platform = cli_terminal.start_jax()
    from jaxkv import cli_bench
    from jaxkv.cli_engine import EngineOptions, parse_weights

    workload = cli_bench.Workload(
        num_requests=requests,
        prompt_lens=cli_bench.parse_range("prompt_len", prompt_len),
        max_tokens=cli_bench.parse_range("output_len", output_len),
        shared_prefix=shared_prefix,
        rate=rate,
        dataset=dataset,
        seed=seed,
    )
    options = EngineOptions(
        max_seqs=max_seqs,
        max_len=max_len,
        kv_format=kv_format,
        block_size=block_size,
        num_blocks=num_blocks,
        prefill_tokens=prefill_tokens,
        steps_per_dispatch=steps_per_dispatch,
        draft_len=draft_len,
        has_draft=draft_model is not None,
        policy=policy,
        tenant_weights=parse_weights(tenant_weights),
    )
    draft = None if draft_model is None else _load(draft_model, weights_format)
    report, stats = cli_bench.run(_load(model, weights_format), options, workload, draft)
    if plot is not None:
        cli_bench.save_plot(report, plot)
    if as_json:
        print(json.dumps({"platform": platform, **cli_bench.figures(report, stats)}))
    else:
        Console().print(cli_bench.table(report, stats))


@app.command()
def profile(
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
    loaded = _load(model, weights_format)
    profiles = cli_generate.profile_run(loaded, prompts or [PROFILE_PROMPT], options)
    fullest = max(profiles, key=lambda profile: profile.used_blocks)
    if as_json:
        print(json.dumps({"fullest": fullest.to_dict(), "after": profiles[-1].to_dict()}))
        return
    title = f"At the fullest ({platform}, {kv_format})"
    Console().print(cli_report.profile_table(fullest, title))
    Console().print(cli_report.profile_table(profiles[-1], "After the run"))


@app.command()
def inspect(
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
    cli_inspect.inspect_run(_load(model, weights_format), prompts or [], options, out)


@app.command()
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


def _load(model: str | None, weights_format: str) -> Loaded:
    """Loads a model; the one that ships where none is named.

    Raises:
      FileNotFoundError, ValueError, NotImplementedError, ImportError: see `models.qwen.load`.
    """
    from pallas_kernels.layout import kv_format

    dtype = kv_format(weights_format).dtype
    here = model is None or Path(model).exists()
    with cli_terminal.spinner("loading the model", show=here):  # a download shows its own progress
        import jax

        import models.qwen
        import models.tiny

        loaded = models.qwen.load(models.tiny.path() if model is None else model, dtype=dtype)
        if jax.default_backend() == "cpu":
            loaded = dataclasses.replace(loaded, model=loaded.model.spread())
        return loaded


def main() -> None:
    """Entry point of the console script `jaxkv`."""
    if not cli_terminal.debugging():
        warnings.simplefilter("ignore")
    app(prog_name="jaxkv")
