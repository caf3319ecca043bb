"""Perplexity of SmolLM2-135M through every KV format, in chunked prefill and token by token.

The text is the English prose every Python ships (`pydoc_data.topics`), cut into windows that start afresh.  The change is
that of the mean perplexity against the float32 cache on the same windows; its uncertainty is the standard error over windows.
Controls that quantise per token and head exist only here, without a cache: the scheme most caches use.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import jax.numpy as jnp
import numpy as np
from cpu_decode import model_path

from jaxkv import CacheConfig, init_cache, reserve
from jaxkv.generate import Generator
from models.qwen import load
from models.qwen.dense import dense_attend
from pallas_kernels import quantiser
from pallas_kernels.sealed import SEALED_FORMATS

WINDOW, ROWS, CHUNK, DECODED = 1024, 4, 256, 64
PROMPTS = (
    "The capital of France is", "A paged cache is useful because", "Two plus two equals",
    "The quick brown fox", "In Python, a list comprehension", "Water boils at",
    "The largest planet is", "Once upon a time",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table: a cache config's options, and where they are measured."""

    name: str
    options: dict[str, Any]


SETTINGS = (
    Setting("float32", {"format": "float32", "block_size": 16}),
    Setting("bfloat16", {"format": "bfloat16", "block_size": 16}),
    Setting("int8", {"format": "int8", "block_size": 64}),
    Setting("int8.block32", {"format": "int8", "block_size": 32}),
    Setting("int8.symmetric", {"format": "int8", "block_size": 32, "symmetric_keys": True}),
    Setting("fp8_e4m3", {"format": "fp8_e4m3", "block_size": 32}),
    Setting("int4", {"format": "int4", "block_size": 64}),
    Setting("int4.smallest", {"format": "int4", "block_size": 64, "value_group": 64}),
    Setting("int4.block32", {"format": "int4", "block_size": 32}),
    Setting("int4.wide1", {"format": "int4", "block_size": 64, "num_wide_layers": 1}),
)
CONTROLS = ("int8", "fp8_e4m3", "int4")


def windows(tokenizer: Any, num_windows: int) -> np.ndarray:
    """Returns i32[window, WINDOW]: evenly spaced pieces of the text."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = np.asarray(tokenizer.encode(text), np.int32)
    starts = np.linspace(0, len(ids) - WINDOW, num_windows).astype(int)
    return np.stack([ids[start : start + WINDOW] for start in starts])


def cache_config(model: Any, options: dict[str, Any]) -> CacheConfig:
    """Returns a cache for ROWS windows."""
    blocks = WINDOW // options["block_size"]
    return CacheConfig(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        num_blocks=ROWS * blocks,
        max_seqs=ROWS,
        max_blocks_per_seq=blocks,
        **options,
    )


def losses_of(model: Any, hidden: jax.Array, next_tokens: jax.Array) -> jax.Array:
    """Returns f32[row, q_pos]: the negative log likelihood of each next token."""
    logits = model.unembed(hidden)
    own = jnp.take_along_axis(logits, next_tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def through_cache(model: Any, config: CacheConfig, tokens: np.ndarray, decoded: int) -> np.ndarray:
    """Returns f32[window, WINDOW - 1]: losses, the last `decoded` tokens of a window fed one by one."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(model: Any, cache: Any, now: jax.Array, following: jax.Array) -> tuple[Any, jax.Array]:
        rows = jnp.arange(ROWS, dtype=jnp.int32)
        lens = jnp.full(ROWS, now.shape[1], jnp.int32)
        cache, view = reserve(config, cache, rows, lens, now.shape[1])
        hidden, store = model(now, cache.store, view)
        return dataclasses.replace(cache, store=store), losses_of(model, hidden, following)

    pieces = [CHUNK] * ((WINDOW - decoded) // CHUNK)
    pieces += [WINDOW - decoded - sum(pieces)] * (sum(pieces) < WINDOW - decoded)
    pieces += [1] * decoded
    out = []
    for begin in range(0, len(tokens), ROWS):
        batch = tokens[begin : begin + ROWS]
        following = np.roll(batch, -1, axis=1)
        cache, at, found = init_cache(config), 0, []
        for size in pieces:
            part = np.s_[:, at : at + size]
            cache, loss = step(model, cache, jnp.asarray(batch[part]), jnp.asarray(following[part]))
            found.append(np.asarray(loss))
            at += size
        if int(cache.status.bits):
            raise AssertionError(f"a reserve failed: {cache.status}")
        out.append(np.concatenate(found, axis=1)[:, :-1])
    return np.concatenate(out)


def per_token(format: str, x: jax.Array) -> jax.Array:
    """Returns x[..., head_dim] quantised and read back with one float32 scale per token and head."""
    if format == "fp8_e4m3":
        quantised = quantiser.quantize_fp8(x, -1, scale_dtype=jnp.float32)
    else:
        bits = SEALED_FORMATS[format].bits
        quantised = quantiser.quantize_groups(
            x, -1, bits=bits, symmetric=False, scale_dtype=jnp.float32
        )
    return quantiser.dequantize_groups(quantised)


def through_control(model: Any, format: str, tokens: np.ndarray) -> np.ndarray:
    """Returns f32[window, WINDOW - 1] losses where every K and V is quantised per token and head."""
    attend = dense_attend(model.config.head_dim**-0.5)

    def quantised(carry: Any, layer: Any, q: Any, k: Any, v: Any, window: Any) -> Any:
        return attend(carry, layer, q, per_token(format, k), per_token(format, v), window)

    @jax.jit
    def run(model: Any, batch: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(WINDOW, dtype=jnp.int32)[None], batch.shape)
        hidden, _ = model.forward(batch, positions, quantised, None)
        return losses_of(model, hidden[:, :-1], batch[:, 1:])

    pieces = [run(model, jnp.asarray(tokens[i : i + 1])) for i in range(len(tokens))]
    return np.concatenate([np.asarray(x) for x in pieces])


def bits_per_element(config: CacheConfig) -> float:
    """Returns bits of the pool (codes and scales) per element of K and V; open blocks are not counted."""
    elements = config.num_layers * config.num_blocks * config.block_size
    elements *= config.num_kv_heads * 2 * config.head_dim
    layout = config.layout
    return 8 * (layout.nbytes - (layout.open.nbytes if config.is_quantised else 0)) / elements


def result(
    name: str, losses: np.ndarray, base: np.ndarray, shapes: dict[str, Any]
) -> harness.Result:
    """Returns the table's row: change of perplexity against the float32 cache, in percent."""
    per_window = (losses - base).mean(axis=1)
    change, error = (losses - base).mean(), per_window.std(ddof=1) / len(per_window) ** 0.5
    percent = 100 * (np.exp([change, change - error, change + error]) - 1)
    return harness.Result(
        metric=f"quality.{name}.ppl_change_percent",
        value=float(percent[0]),
        unit="%",
        shapes=shapes | {"tokens": int(losses.size)},
        versus="float32 cache, perplexity",
        versus_value=float(np.exp(base.mean())),
        spread=(float(percent[1]), float(percent[2])),
    )


def greedy(model: Any, tokenizer: Any, options: dict[str, Any]) -> list[str]:
    """Returns the greedy continuations of PROMPTS, 24 tokens each."""
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS]
    longest = max(map(len, prompts)) + 24
    config = dataclasses.replace(
        cache_config(model, options),
        num_blocks=len(prompts) * -(-longest // options["block_size"]),
        max_seqs=len(prompts),
    )
    done = Generator(model, config, prefill_chunk=16).generate(prompts, max_new_tokens=24)
    return [tokenizer.decode(completion.tokens) for completion in done]


def measure(
    num_windows: int, names: list[str], report: Callable[[harness.Result], None], with_text: bool
) -> None:
    """Measures the settings and controls whose names are asked for, one after the other."""
    loaded = load(model_path())
    model = loaded.model
    tokens = windows(loaded.tokenizer, num_windows)
    settings = {setting.name: setting for setting in SETTINGS}
    base = through_cache(model, cache_config(model, settings["float32"].options), tokens, 0)
    for name in names:
        begin = time.perf_counter()
        if name.startswith("control."):
            format = name.removeprefix("control.")
            losses = through_control(model, format, tokens)
            shapes = {
                "per": "token and head",
                "bits_per_element": SEALED_FORMATS[format].bits + 0.5,
            }
        else:
            options = settings[name].options
            config = cache_config(model, options)
            losses = base if name == "float32" else through_cache(model, config, tokens, 0)
            shapes = options | {"bits_per_element": round(bits_per_element(config), 3)}
        report(result(name, losses, base, shapes | {"s": round(time.perf_counter() - begin)}))
        if not name.startswith("control.") and with_text:
            print(f"# {name}", file=sys.stderr)
            for prompt, text in zip(PROMPTS, greedy(model, loaded.tokenizer, options), strict=True):
                print(f"#   {prompt!r} -> {text!r}", file=sys.stderr)
            part = tokens[:ROWS]
            one_by_one = through_cache(model, config, part, DECODED)
            gap = float(np.abs(one_by_one - losses[:ROWS]).max())
            print(
                f"#   last {DECODED} tokens of {ROWS} windows one by one: largest change of a loss {gap:.2e}",
                file=sys.stderr,
            )


def main() -> None:
    """Prints the table, or with --json one object a line as each is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 windows instead of 16")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--text", action="store_true", help="also greedy answers, and the decode path"
    )
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file, too")
    known = [s.name for s in SETTINGS] + [f"control.{c}" for c in CONTROLS]
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="NAME")
    args = parser.parse_args()
    results = []

    def report(one: harness.Result) -> None:
        results.append(one)
        if args.out:
            with args.out.open("a") as file:
                file.write(one.line() + "\n")
        low, high = one.spread or (0.0, 0.0)
        line = (
            one.line()
            if args.json
            else f"{one.metric:45s} {one.value:+.3f} % ({low:+.3f} .. {high:+.3f})  {json.dumps(one.shapes)}"
        )
        print(line, flush=True)

    measure(4 if args.quick else 16, args.only, report, args.text)


if __name__ == "__main__":
    main()
