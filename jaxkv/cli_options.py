"""Options that several commands of `jaxkv` share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer


class EarlyStop(enum.StrEnum):
    """The rules of stopping a beam search by name."""

    no = "no"
    yes = "yes"
    never = "never"

    @property
    def rule(self) -> bool | str:
        """As `beam_search` takes it."""
        return {"no": False, "yes": True}.get(self.value, self.value)


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", show_default="the small model that ships",
        help="A local folder, a .gguf file, or a hub id.",
    ),
]  # fmt: skip
PromptArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", show_default=False, help="One prompt per argument."),
]
KVFormatOption = Annotated[
    str,
    typer.Option(
        help="Elements of the cache: float32, bfloat16, float16, or quantised: int8, fp8_e4m3, int4."
    ),
]
WeightsFormatOption = Annotated[
    str, typer.Option(help="Elements of the weights: float32, bfloat16 or float16.")
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(show_default="16; quantised: 64", help="Tokens a block holds."),
]
SymmetricKeysOption = Annotated[
    bool | None,
    typer.Option(
        "--symmetric-keys/--asymmetric-keys", show_default="the format's own",
        help="Quantised formats: keys without or with a centre a channel.",
    ),
]  # fmt: skip
ValueGroupOption = Annotated[
    int | None,
    typer.Option(
        show_default="a head; int4: 32", help="Quantised formats: channels of V that share a scale."
    ),
]
WideLayersOption = Annotated[
    int,
    typer.Option(
        "--num-wide-layers", help="Quantised formats: layers at each end that stay in bfloat16."
    ),
]
DevicesOption = Annotated[
    int,
    typer.Option(
        help="Devices to divide the model and its cache over; on CPU, cores that each work as one."
    ),
]
NumBlocksOption = Annotated[
    int | None, typer.Option(show_default="enough for the request", help="Blocks of the pool.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of the random numbers.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object.")]

# Of the commands that run an engine.
MaxSeqsOption = Annotated[int, typer.Option(help="Sequences that run at once.")]
MaxLenOption = Annotated[
    int | None,
    typer.Option(
        show_default="the model's context, at most 4096", help="Tokens of a prompt with its answer."
    ),
]
EngineBlocksOption = Annotated[
    int | None, typer.Option(show_default="enough for all sequences", help="Blocks of the pool.")
]
PrefillTokensOption = Annotated[int, typer.Option(help="Prompt tokens of one prefill call.")]
DraftLenOption = Annotated[
    int,
    typer.Option(
        help="Tokens guessed ahead in each step, by --draft-model, else from the text so far; 0: none."
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model", metavar="MODEL", show_default=False,
        help="A smaller model of the same vocabulary that guesses ahead; see --draft-len.",
    ),
]  # fmt: skip
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy", metavar="POLICY",
        help="Which cached block goes first: lru, lfu, aged-lfu, cost-aware; fair with --tenant-weights.",
    ),
]  # fmt: skip
TenantWeightsOption = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="For --policy fair: shares of the pool of tenant 0, 1, ..., such as 3,1.",
    ),
]
