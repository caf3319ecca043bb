"""The commands around the engine: `jaxkv serve` and `jaxkv bench`.

Invariants: those of `cli_commands`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxkv import cli_terminal
from jaxkv.cli_options import (
    BlockSizeOption,
    DevicesOption,
    DraftLenOption,
    DraftModelOption,
    EngineBlocksOption,
    JsonOption,
    KVFormatOption,
    MaxLenOption,
    MaxSeqsOption,
    ModelOption,
    PolicyOption,
    PrefillTokensOption,
    TenantWeightsOption,
    WeightsFormatOption,
)


def serve(
    context: typer.Context,
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
    devices: DevicesOption = 1,
    policy: PolicyOption = "lru",
    tenant_weights: TenantWeightsOption = None,
    scrub: Annotated[
        bool, typer.Option("--scrub", help="Zero the bytes of every block that is freed.")
    ] = False,
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
    cli_terminal.start_jax(devices)
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
        scrub_on_free=scrub,
    )
    load_draft = None
    if draft_model is not None:
        load_draft = functools.partial(context.obj, draft_model, weights_format, devices)
    with bind(host, port) as listener:
        cli_serve.run(
            lambda: context.obj(model, weights_format, devices),
            cli_serve.model_name(model, name),
            listener,
            options,
            limits,
            api_key=api_key,
            grace_s=grace,
            load_draft=load_draft,
        )


def bench(
    context: typer.Context,
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
    devices: DevicesOption = 1,
    policy: PolicyOption = "lru",
    tenant_weights: TenantWeightsOption = None,
    plot: Annotated[
        Path | None, typer.Option(show_default=False, help="Draw the latencies into this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput and latency of continuous batching on a workload."""
    platform = cli_terminal.start_jax(devices)
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
    draft = None if draft_model is None else context.obj(draft_model, weights_format, devices)
    report, stats = cli_bench.run(
        context.obj(model, weights_format, devices), options, workload, draft
    )
    if plot is not None:
        cli_bench.save_plot(report, plot)
    if as_json:
        print(json.dumps({"platform": platform, **cli_bench.figures(report, stats)}))
    else:
        Console().print(cli_bench.table(report, stats))
