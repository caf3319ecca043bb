"""What `jaxkv generate` and `jaxkv profile` do between the options and the terminal.

Invariants: the model comes from outside (`Loaded`), nothing here imports one; everything about a request is
checked before a block is allocated; standard output holds only text, or one JSON object.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxkv import ledger
from jaxkv.beam import BeamSearcher
from jaxkv.beam_loop import EarlyStopping
from jaxkv.cache import PagedKVCache
from jaxkv.cli_report import open_bytes
from jaxkv.cli_terminal import format_bytes, spinner, stderr
from jaxkv.config import CacheConfig
from jaxkv.format_bytes import OWN_OPTIONS, KVOptions, default_block_size
from jaxkv.generate import Completion, Generator, NewTokens
from jaxkv.mesh import mesh_of, num_row_shards
from jaxkv.model import DecoderModel
from jaxkv.profile import MemoryProfile, memory_profile
from jaxkv.sampling import SamplingParams

DEFAULT_NEW_TOKENS = 128
DEFAULT_PREFILL_CHUNK = 64


class TextTokenizer(Protocol):
    """What is asked of a tokenizer; `models.qwen.Tokenizer` is one."""

    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def stream(self) -> Any: ...
    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> str: ...


class Loaded(Protocol):
    """A model as its loader hands it over; `models.qwen.LoadedModel` is one."""

    @property
    def model(self) -> DecoderModel: ...
    @property
    def config(self) -> Any: ...
    @property
    def tokenizer(self) -> TextTokenizer | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a request is to run; None leaves the choice to the request's own size.

    Attributes:
      max_new_tokens: per sequence; None means 128, or what the model's context leaves.
      sampling: for all prompts.
      num_samples: sequences per prompt; with beams the best of them.
      num_beams: beams per prompt; None means no beam search.
      length_penalty, early_stopping: of a beam search, see `beam_search`.
      chat: put prompts into the tokenizer's chat template.
      kv_format, kv_options, block_size, num_blocks: the pool; block_size None means the format's own, num_blocks None enough
        for the request.
      prefill_chunk: prompt tokens per prefill call; None means 64, or the longest prompt if that is shorter.
      steps_per_dispatch: decode steps between two looks of the host.
    """

    max_new_tokens: int | None = None
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    num_samples: int = 1
    num_beams: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    chat: bool = False
    kv_format: str = "float32"
    kv_options: KVOptions = OWN_OPTIONS
    block_size: int | None = None
    num_blocks: int | None = None
    prefill_chunk: int | None = None
    steps_per_dispatch: int = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request: the prompts as text and ids, and the compiled generation that will serve it."""

    texts: list[str]
    prompts: list[list[int]]
    tokenizer: TextTokenizer
    generator: Generator
    max_new_tokens: int
    options: RunOptions

    def stream(self) -> Iterator[NewTokens | Completion]:
        """Starts the run; a beam search yields its hypotheses when it is done."""
        if isinstance(self.generator, BeamSearcher):
            found = self.generator.search(
                self.prompts,
                num_beams=self.options.num_beams or 1,
                max_new_tokens=self.max_new_tokens,
                length_penalty=self.options.length_penalty,
                early_stopping=self.options.early_stopping,
                num_return=self.options.num_samples,
            )
            return itertools.chain.from_iterable(found.hypotheses)
        return self.generator.stream(
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            sampling=self.options.sampling,
            num_samples=self.options.num_samples,
        )

    def text_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens that are text: without the end token."""
        return [token for token in tokens if token not in self.generator.eos_token_ids]


# Prompts ------------------------------------------------------------------------------------------


def read_prompts(arguments: Sequence[str], files: Sequence[Path], lines: bool) -> list[str]:
    """Returns the prompts: the arguments, then the files, else standard input.

    Args:
      arguments: one prompt each.
      files: one prompt each, without the line break at the end; "-" is standard input.
      lines: every line of a file or of standard input that is not blank is a prompt.

    Raises:
      ValueError: no prompt at all, an empty one, or a file that is not UTF-8.
      OSError: a file cannot be read.
    """
    texts = list(arguments)
    sources = list(files)
    if not texts and not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError(
                "prompt: expected an argument, --file or text on standard input, got none"
            )
        sources = [Path("-")]
    for source in sources:
        text = _read_text(source)
        parts = text.splitlines() if lines else [text.removesuffix("\n").removesuffix("\r")]
        texts += [part for part in parts if part.strip() or not lines]
    if not texts:
        raise ValueError("prompt: expected at least one line that is not blank, got none")
    for i, text in enumerate(texts, start=1):
        if not text:
            raise ValueError(f"prompt {i}: expected text, got an empty prompt")
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(f"prompt {i}: expected UTF-8 text, got {text[:40]!r}")
    return texts


def _read_text(source: Path) -> str:
    try:
        return sys.stdin.read() if str(source) == "-" else source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: expected UTF-8 text, got {error}") from error


def _encode(tokenizer: TextTokenizer, texts: Sequence[str], chat: bool) -> list[list[int]]:
    if not chat:
        return [tokenizer.encode(text) for text in texts]
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in rendered]


# The run ------------------------------------------------------------------------------------------


def prepare(
    loaded: Loaded,
    texts: list[str],
    options: RunOptions,
    observe: Callable[[PagedKVCache], None] | None = None,
) -> Request:
    """Encodes the prompts and sizes the cache for them.

    Raises:
      ValueError: a prompt or an option that does not fit the model; no tokenizer; a pool larger than memory.
    """
    check_beams(options)
    if loaded.tokenizer is None:
        raise ValueError("model: expected a tokenizer.json beside the weights, got none")
    prompts = _encode(loaded.tokenizer, texts, options.chat)
    for i, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(
                f"prompt {i}: expected at least one token, got none for {texts[i - 1]!r}"
            )
    longest = max(map(len, prompts))
    max_new = _new_tokens(loaded.config, longest, options.max_new_tokens)
    config = cache_config(loaded.config, [len(prompt) for prompt in prompts], max_new, options)
    check_memory(config, copies=num_row_shards(mesh_of(loaded.model)))
    chunk = options.prefill_chunk
    make = Generator if options.num_beams is None else BeamSearcher
    generator = make(
        loaded.model,
        config,
        eos_token_ids=loaded.eos_token_ids,
        prefill_chunk=min(DEFAULT_PREFILL_CHUNK, longest) if chunk is None else chunk,
        steps_per_dispatch=options.steps_per_dispatch,
        observe=observe,
    )
    return Request(texts, prompts, loaded.tokenizer, generator, max_new, options)


def check_beams(options: RunOptions) -> None:
    """Checks that a beam search is asked for nothing that only sampling knows, and sampling for nothing of beams.

    Raises:
      ValueError: it is, or for more hypotheses than beams.
    """
    if options.num_beams is None:
        for name in ("length_penalty", "early_stopping"):
            if (given := getattr(options, name)) != getattr(RunOptions, name):
                raise ValueError(f"{name}: expected none without beams, got {given}")
        return
    for field in dataclasses.fields(SamplingParams):
        given = getattr(options.sampling, field.name)
        if given != field.default:
            raise ValueError(
                f"{field.name}: expected no sampling option with beams, which draw nothing, got {given}"
            )
    if options.num_beams < 1:
        raise ValueError(f"beams: expected at least 1, got {options.num_beams}")
    if options.num_samples > options.num_beams:
        raise ValueError(
            f"num_samples: expected at most the {options.num_beams} of beams, got {options.num_samples}"
        )


def _new_tokens(model_config: Any, longest: int, asked: int | None) -> int:
    """Returns max_new_tokens, checked against the positions the model knows."""
    limit = getattr(model_config, "max_position_embeddings", None)
    room = DEFAULT_NEW_TOKENS if limit is None else limit - longest
    count = min(DEFAULT_NEW_TOKENS, max(1, room)) if asked is None else asked
    if count < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {count}")
    if limit is not None and longest + count > limit:
        raise ValueError(
            f"max_new_tokens: expected prompt and new tokens within the model's {limit} positions, "
            f"got {longest} + {count}"
        )
    return count


def cache_config(
    model_config: Any, prompt_lens: Sequence[int], max_new_tokens: int, options: RunOptions
) -> CacheConfig:
    """Returns a cache in which every sequence of the request fits, with just enough blocks by default.

    The last token of a sequence is never fed back, so it takes no slot; samples (or beams) of one prompt share its
    full blocks and own everything after.

    Raises:
      ValueError: a size out of range.
    """
    size = options.block_size
    size = default_block_size(options.kv_format) if size is None else size
    ledger.check_count("block_size", size, 1)
    samples = ledger.check_count("num_samples", options.num_samples, 1)
    samples = samples if options.num_beams is None else options.num_beams
    needed = 0
    for length in prompt_lens:
        shared = length // size if samples > 1 else 0
        own = ledger.num_blocks_needed(length + max_new_tokens - 1, size) - shared
        needed += shared + samples * own
    return CacheConfig(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=size,
        num_blocks=needed if options.num_blocks is None else options.num_blocks,
        max_seqs=len(prompt_lens) * samples,
        max_blocks_per_seq=ledger.num_blocks_needed(max(prompt_lens) + max_new_tokens, size),
        format=options.kv_format,
        **dataclasses.asdict(options.kv_options),
    )


def check_memory(config: CacheConfig, *others: CacheConfig, copies: int = 1) -> None:
    """Refuses a pool beyond the machine's memory; a CPU would start to fill it and be killed.

    Args:
      config: the pool.
      others: of further models that keep K and V under the same block ids.
      copies: of the pool, on devices that hold the same heads.

    Raises:
      ValueError: the pool is larger.
    """
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    nbytes = copies * sum(each.layout.nbytes for each in (config, *others))
    if nbytes > memory:
        raise ValueError(
            f"num_blocks: expected a pool within the {format_bytes(memory)} of this machine, "
            f"got {config.num_blocks} blocks, {format_bytes(nbytes)}"
        )


def profile_run(loaded: Loaded, texts: list[str], options: RunOptions) -> list[MemoryProfile]:
    """Runs a request and returns the profile of its cache at every look of the host, in order."""
    profiles: list[MemoryProfile] = []

    def look(cache: PagedKVCache) -> None:
        peak = request.generator.stats.peak_blocks
        profiles.append(memory_profile(cache, model=loaded.model, peak_blocks=peak))

    request = prepare(loaded, texts, options, observe=look)
    collect(request)
    return profiles


# Output -------------------------------------------------------------------------------------------


def stream_text(request: Request, *, echo: bool = False) -> list[Completion]:
    """Writes the text of a single sequence to standard output as it is generated, after its prompt if `echo`.

    The spinner stays until the decode program has run once, so it covers all compilation.
    """
    stream = request.tokenizer.stream()
    events = request.stream()
    done: list[Completion] = []
    with spinner("compiling"):
        first = list(itertools.islice(events, 2))
    sys.stdout.write(request.texts[0] if echo else "")
    for event in itertools.chain(first, events):
        if isinstance(event, Completion):
            done.append(event)
            continue
        sys.stdout.write(stream.push(request.text_tokens(event.tokens)))
        sys.stdout.flush()
    sys.stdout.write(stream.flush() + "\n")
    sys.stdout.flush()
    return done


def collect(request: Request, *, show: bool = True) -> list[Completion]:
    """Runs the request to its end under a spinner."""
    with spinner("generating", show=show):
        return [event for event in request.stream() if isinstance(event, Completion)]


def write_labelled(request: Request, completions: Sequence[Completion]) -> None:
    """Writes several completed texts to standard output, each under its prompt."""
    blocks = []
    for completion in completions:
        number = str(completion.prompt_index + 1)
        if request.options.num_samples > 1:
            number += f".{completion.sample_index + 1}"
        prompt = " ".join(request.texts[completion.prompt_index].split())
        prompt = prompt if len(prompt) <= 72 else prompt[:71] + "…"
        text = request.tokenizer.decode(request.text_tokens(completion.tokens))
        blocks.append(f"[{number}] {prompt}\n{text}\n")
    sys.stdout.write("\n".join(blocks))
    sys.stdout.flush()


def write_json(request: Request, completions: Sequence[Completion], platform: str) -> None:
    """Writes one JSON object: the completions with their texts and tokens, and the statistics."""
    entries = [
        {
            **dataclasses.asdict(completion),
            "prompt": request.texts[completion.prompt_index],
            "text": request.tokenizer.decode(request.text_tokens(completion.tokens)),
        }
        for completion in completions
    ]
    stats, mesh = request.generator.stats, request.generator.mesh
    figures = {
        **dataclasses.asdict(stats),
        "tokens_per_s": stats.tokens_per_s,
        "block_size": request.generator.config.block_size,
        "kv_format": request.generator.config.format,
        "kv_bytes": request.generator.config.layout.nbytes,
        "kv_open_bytes": open_bytes(request.generator.config),
        "platform": platform,
        "devices": 1 if mesh is None else mesh.size,
    }
    sys.stdout.write(
        json.dumps({"completions": entries, "stats": figures}, ensure_ascii=False) + "\n"
    )


def note_unfinished(request: Request, completions: Sequence[Completion]) -> bool:
    """Says on standard error which sequences the pool cut short; returns whether any was."""
    cut = [c for c in completions if c.finish_reason == "out_of_blocks"]
    if cut:
        config = request.generator.config
        stderr().print(
            f"jaxkv: {len(cut)} of {len(completions)} sequences stopped early, after "
            f"{', '.join(str(len(c.tokens)) for c in cut)} tokens: the pool of {config.num_blocks} blocks "
            f"of {config.block_size} tokens is full; raise --num-blocks",
            markup=False,
            soft_wrap=True,
        )
    return bool(cut)
