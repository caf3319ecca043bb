"""What `jaxkv inspect` does: serves a few requests with prefix reuse and looks at the pool after every step.

Requests wait in a queue; one at a time is admitted into a free slot, and all that run decode together.  A request
that ends is registered and released, so its blocks stay cached until somebody needs the room.

Invariants: the model comes from outside (`Loaded`), nothing here imports one; files are checked before the run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxkv import ledger, picture
from jaxkv.cache import PagedKVCache, init_cache, raise_for_status, release, reserve
from jaxkv.cli_generate import Loaded
from jaxkv.cli_terminal import spinner
from jaxkv.config import CacheConfig
from jaxkv.format_bytes import default_block_size
from jaxkv.namespace import Namespace
from jaxkv.sharing import admit, register, with_prefix_reuse
from jaxkv.snapshot import PoolSnapshot, pool_snapshot

_STORY = "Once upon a time, in a small house by the river, there lived "
DEFAULT_PROMPTS = (
    _STORY + "a careful old woman", _STORY + "a kind young fox", "Q: What colour is the sky? A:",
    _STORY + "a careful old man named Ben", _STORY + "a kind young girl", "Q: What colour is the grass? A:",
)  # fmt: skip
Array = jax.Array


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """How the run is to be.

    Attributes:
      max_new_tokens: of each request, greedy; end tokens do not end a request, so that every run is the same.
      num_slots: requests that run at once.
      steps_per_look: decode steps between two snapshots.
      block_size: None means the format's own.
      num_blocks: None means room for all that run at once and half as much again.
    """

    max_new_tokens: int = 24
    num_slots: int = 3
    steps_per_look: int = 4
    kv_format: str = "float32"
    block_size: int | None = None
    num_blocks: int | None = None


def encode(loaded: Loaded, texts: Sequence[str]) -> list[list[int]]:
    """Returns the prompts as ids.

    Raises:
      ValueError: no tokenizer, or a prompt without tokens.
    """
    if loaded.tokenizer is None:
        raise ValueError("model: expected a tokenizer.json beside the weights, got none")
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    for i, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"prompt {i}: expected at least one token, got none")
    return prompts


def inspect_config(model: Any, prompts: list[list[int]], options: InspectOptions) -> CacheConfig:
    """Returns a cache in which the requests that run at once always fit.

    Raises:
      ValueError: an option out of range, a pool too small, or sequences longer than the model's positions.
    """
    for name in ("max_new_tokens", "num_slots", "steps_per_look"):
        ledger.check_count(name, getattr(options, name), 1)
    size = options.block_size
    size = default_block_size(options.kv_format) if size is None else size
    ledger.check_count("block_size", size, 1)
    longest = max(map(len, prompts)) + options.max_new_tokens
    limit = getattr(model, "max_position_embeddings", longest)
    if longest > limit:
        raise ValueError(
            f"max_new_tokens: expected prompt and new tokens within the model's {limit} positions, "
            f"got {longest - options.max_new_tokens} + {options.max_new_tokens}"
        )
    each = ledger.num_blocks_needed(longest, size)
    at_once = each * min(options.num_slots, len(prompts))
    blocks = at_once + at_once // 2 if options.num_blocks is None else options.num_blocks
    if blocks < at_once:
        raise ValueError(
            f"num_blocks: expected at least {at_once}, which {min(options.num_slots, len(prompts))} "
            f"requests of up to {longest} tokens need, got {blocks}"
        )
    return CacheConfig(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=size,
        num_blocks=blocks,
        max_seqs=min(options.num_slots, len(prompts)),
        max_blocks_per_seq=each,
        format=options.kv_format,
    )


class Run:
    """The requests, the cache, and the programs that move them on.

    Args:
      model: any `DecoderModel`.
      config: from `inspect_config`.
      prompts: token ids of each request.
      options: of the run.
    """

    def __init__(
        self, model: Any, config: CacheConfig, prompts: list[list[int]], options: InspectOptions
    ) -> None:
        self.model, self.config, self.options = model, config, options
        self.cache = with_prefix_reuse(config, init_cache(config))
        self.waiting = list(enumerate(prompts, start=1))
        self.left: dict[int, int] = {}  # slot -> tokens its request still wants
        self.width = max(map(len, prompts))
        self.texts = jnp.zeros((config.max_seqs, config.max_seq_len), jnp.int32)
        self.words = jnp.asarray(Namespace(format=config.format).words())[None]
        self.looks: list[PoolSnapshot] = []
        self._start = jax.jit(functools.partial(start, config), donate_argnums=(1, 2))
        self._decode = jax.jit(functools.partial(decode, config), donate_argnums=(1, 2))
        self._register = jax.jit(functools.partial(note, config), donate_argnums=0)
        self._release = jax.jit(functools.partial(release, config), donate_argnums=0)

    def run(self) -> list[PoolSnapshot]:
        """Serves all requests and returns the pool after every step."""
        self._look("an empty pool")
        while self.waiting or self.left:
            free = sorted(set(range(self.config.max_seqs)) - set(self.left))
            if self.waiting and free:
                self._admit(free[0])
            steps = min(self.options.steps_per_look, *self.left.values())
            active = self._mask(list(self.left))
            self.cache, self.texts = self._decode(
                self.model, self.cache, self.texts, active, jnp.int32(steps)
            )
            self.left = {slot: left - steps for slot, left in self.left.items()}
            self._look(f"decoding: {len(self.left)} running, {steps} tokens each")
            self._end([slot for slot, left in self.left.items() if left == 0])
        return self.looks

    def _admit(self, slot: int) -> None:
        number, prompt = self.waiting.pop(0)
        tokens = np.zeros((1, self.width), np.int32)
        tokens[0, : len(prompt)] = prompt
        row = (jnp.int32(slot)[None], tokens, jnp.int32(len(prompt))[None], self.words)
        self.cache, self.texts, hits = self._start(self.model, self.cache, self.texts, *row)
        self.cache = self._register(self.cache, self.texts, self._mask([slot]))
        self.left[slot] = self.options.max_new_tokens
        self._look(f"request {number} starts: {int(hits[0])} of {len(prompt)} tokens found")

    def _end(self, slots: list[int]) -> None:
        if slots:
            mask = self._mask(slots)
            self.cache = self._release(self._register(self.cache, self.texts, mask), mask)
            self.left = {slot: left for slot, left in self.left.items() if slot not in slots}
            self._look(
                f"{' and '.join(map(picture.letter_of, slots))} ended: full blocks stay cached"
            )

    def _mask(self, slots: list[int]) -> np.ndarray:
        return np.isin(np.arange(self.config.max_seqs), slots)

    def _look(self, title: str) -> None:
        raise_for_status(self.cache)
        self.looks.append(pool_snapshot(self.cache, title))


def start(
    config: CacheConfig, model: Any, cache: PagedKVCache, texts: Array, *row: Array
) -> tuple[PagedKVCache, Array, Array]:
    """Admits one request, computes what is left of its prompt, and chooses its first token.

    Args:
      config: the cache's config.
      model, cache: DONATES the cache under the caller's jit.
      texts: i32[seq, max_seq_len], what each slot holds and the token it feeds next.
      *row: seq_ids i32[1], tokens i32[1, width], prompt_lens i32[1], namespaces i32[1, 8].

    Returns:
      The cache, the texts, and i32[1] tokens found.
    """
    seq_ids, tokens, lens, words = row
    cache, view, hits = admit(config, cache, seq_ids, tokens, lens, words)
    width = tokens.shape[1]
    place = jnp.minimum(hits[:, None] + jnp.arange(width)[None, :], width - 1)
    hidden, store = model(jnp.take_along_axis(tokens, place, axis=1), cache.store, view)
    last = hidden[jnp.arange(1), jnp.maximum(view.q_lens - 1, 0)]
    first = jnp.argmax(model.unembed(last), axis=-1).astype(jnp.int32)
    texts = texts.at[seq_ids, :width].set(tokens)
    cache = dataclasses.replace(cache, store=store)
    return cache, texts.at[seq_ids, lens].set(first), hits


def decode(
    config: CacheConfig, model: Any, cache: PagedKVCache, texts: Array, active: Array, count: Array
) -> tuple[PagedKVCache, Array]:
    """Feeds `count` (i32[]) tokens of each active (bool[seq]) slot and notes what the model chooses after each."""
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)

    def step(_: Array, carry: tuple[PagedKVCache, Array]) -> tuple[PagedKVCache, Array]:
        cache, texts = carry
        at = jnp.minimum(cache.tables.kv_lens, config.max_seq_len - 1)
        cache, view = reserve(config, cache, rows, active.astype(jnp.int32), 1)
        hidden, store = model(texts[rows, at][:, None], cache.store, view)
        chosen = jnp.argmax(model.unembed(hidden[:, 0]), axis=-1).astype(jnp.int32)
        at = jnp.where(active, at + 1, config.max_seq_len)
        texts = texts.at[rows, at].set(chosen, mode="drop")
        return dataclasses.replace(cache, store=store), texts

    return jax.lax.fori_loop(0, count, step, (cache, texts))


def note(config: CacheConfig, cache: PagedKVCache, texts: Array, mask: Array) -> PagedKVCache:
    """Makes the full blocks of the slots of a mask, bool[seq], findable."""
    rows = jnp.arange(config.max_seqs, dtype=jnp.int32)
    return register(config, cache, jnp.where(mask, rows, config.no_seq), texts)[0]


# Output -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Where the looks go; files are None where none is asked for."""

    png: Path | None = None
    animate: Path | None = None
    as_json: bool = False

    def check(self, config: CacheConfig | None = None) -> None:
        """Refuses files that could not be written, and a pool that could not be shown.

        Raises:
          ValueError, OSError: see `picture`.
        """
        if self.png is not None:
            picture.check_file("png", self.png, (".png",))
        if self.animate is not None:
            picture.check_file("animate", self.animate, (".gif",))
        if config is None:
            return
        if self.png is not None or self.animate is not None:
            picture.check_size(config.num_blocks, picture.MAX_FILE_BLOCKS, "a file")
        elif not self.as_json:
            picture.check_size(config.num_blocks, picture.MAX_TERMINAL_BLOCKS, "the terminal")


def inspect_run(
    loaded: Loaded, texts: Sequence[str], options: InspectOptions, out: Outputs
) -> None:
    """Serves the requests and writes the busiest moment and the end, or whatever `out` asks for.

    Raises:
      ValueError, OSError: see `encode`, `inspect_config` and `picture`.
      CapacityError: the pool ran out, which `inspect_config` rules out.
    """
    out.check()
    prompts = encode(loaded, texts or DEFAULT_PROMPTS)
    config = inspect_config(loaded.config, prompts, options)
    out.check(config)
    with spinner("serving"):
        looks = Run(loaded.model, config, prompts, options).run()
    busiest = max(looks, key=_interest)
    if out.png is not None:
        picture.save_png(busiest, out.png)
    if out.animate is not None:
        picture.save_gif(looks, out.animate)
    if out.as_json:
        moments = {"busiest": busiest.to_dict(), "after": looks[-1].to_dict()}
        sys.stdout.write(json.dumps(moments) + "\n")
    elif config.num_blocks <= picture.MAX_TERMINAL_BLOCKS:
        console = Console(highlight=False)
        for look in (busiest, looks[-1]):
            console.print(picture.terminal_picture(look, console.width))


def _interest(look: PoolSnapshot) -> tuple[int, int, int]:
    """Returns what makes a moment worth showing: blocks saved by sharing, then live ones, then cached ones."""
    return int(look.ref_counts.sum()) - look.num_live, look.num_live, look.num_cached
