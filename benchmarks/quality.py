"""Perplexity of SmolLM2-135M through every KV format, in chunked prefill and token by token.

The text is the English prose every Python ships (`pydoc_data.topics`), cut into windows that start afresh.  The change is
that of the mean perplexity against the float32 cache on the same windows; its uncertainty is the standard error over windows.
Controls that quantise per token and head exist only here, without a cache: the scheme most caches use.

    python benchmarks/quality.py --losses DIR --save    # about 7 minutes a format on one core; DIR lets a run be resumed
    python benchmarks/quality.py --text --save          # greedy answers only
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness
import jax
import jax.numpy as jnp
import numpy as np
import quality_report
from cpu_decode import model_path

from jaxkv import CacheConfig, init_cache, reserve
from jaxkv.generate import Generator
from jaxkv.kv_store import init_store
from models.qwen import load
from models.qwen.dense import dense_attend
from pallas_kernels import quantiser
from pallas_kernels.sealed import SEALED_FORMATS

WINDOW, ROWS, CHUNK, DECODED = 1024, 4, 256, 128
PREAMBLE = 256  # tokens before a prompt; with fewer than a block every format answers from its open block alone
PROMPTS = (
    "The capital of France is", "A paged cache is useful because", "Two plus two equals",
    "The quick brown fox", "In Python, a list comprehension", "Water boils at",
    "The largest planet is", "Once upon a time",
)  # fmt: skip


Losses = tuple[
    np.ndarray, np.ndarray
]  # f32[window, token]: fed in chunks; one by one, the last DECODED

OPTIONS: dict[
    str, dict[str, Any]
] = {  # fields of CacheConfig by the row's name, the most telling first
    "float32": {"format": "float32", "block_size": 16},
    "int8": {"format": "int8", "block_size": 64},
    "fp8_e4m3": {"format": "fp8_e4m3", "block_size": 64},
    "int4": {"format": "int4", "block_size": 64},
    "int4.smallest": {"format": "int4", "block_size": 64, "value_group": 64},
    "int4.block32": {"format": "int4", "block_size": 32},
    "int8.block32": {"format": "int8", "block_size": 32},
    "fp8_e4m3.block32": {"format": "fp8_e4m3", "block_size": 32},
    "int4.wide1": {"format": "int4", "block_size": 64, "num_wide_layers": 1},
    "int8.symmetric": {"format": "int8", "block_size": 32, "symmetric_keys": True},
    "bfloat16": {"format": "bfloat16", "block_size": 16},
}
CONTROLS = ("int8", "fp8_e4m3", "int4")
LIMITS = {
    "int8": 0.1,
    "fp8_e4m3": 0.7,
    "int4": 2.0,
    "int4.smallest": 3.0,
}  # percent, of perplexity in chunks
RESULTS = Path(__file__).parent / "results"


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


def through_cache(
    model: Any, config: CacheConfig, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses through the cache, fed in chunks and fed one by one.

    Returns:
      f32[window, WINDOW - 1], all of a window fed in chunks; and f32[window, DECODED - 1], the window's last DECODED
      tokens fed one by one, from a copy of the cache that the chunks before them filled.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def step(model: Any, cache: Any, now: jax.Array, following: jax.Array) -> tuple[Any, jax.Array]:
        rows = jnp.arange(ROWS, dtype=jnp.int32)
        lens = jnp.full(ROWS, now.shape[1], jnp.int32)
        cache, view = reserve(config, cache, rows, lens, now.shape[1])
        hidden, store = model(now, cache.store, view)
        return dataclasses.replace(cache, store=store), losses_of(model, hidden, following)

    def feed(
        cache: Any, batch: np.ndarray, begin: int, end: int, size: int
    ) -> tuple[Any, list[Any]]:
        following, found = np.roll(batch, -1, axis=1), []
        for at in range(begin, end, size):
            part = np.s_[:, at : min(at + size, end)]
            cache, loss = step(model, cache, jnp.asarray(batch[part]), jnp.asarray(following[part]))
            found.append(np.asarray(loss))
        if int(cache.status.bits):
            raise AssertionError(f"a reserve failed: {cache.status}")
        return cache, found

    chunked, one_by_one, early = [], [], WINDOW - DECODED
    for batch in np.split(tokens, len(tokens) // ROWS):
        cache, first = feed(init_cache(config), batch, 0, early, CHUNK)
        _, last = feed(jax.tree.map(jnp.copy, cache), batch, early, WINDOW, CHUNK)
        _, single = feed(cache, batch, early, WINDOW, 1)
        chunked.append(np.concatenate(first + last, axis=1)[:, :-1])
        one_by_one.append(np.concatenate(single, axis=1)[:, :-1])
    return np.concatenate(chunked), np.concatenate(one_by_one)


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


def control_bits(format: str, head_dim: int) -> float:
    """Returns bits of codes and float32 scales (and centres) per element of a control."""
    return SEALED_FORMATS[format].bits + (32 if format == "fp8_e4m3" else 64) / head_dim


def tokens_per_byte(config: CacheConfig) -> float:
    """Returns slots over `nbytes` of a store of 8,192 blocks with open blocks for 64 sequences."""
    large = dataclasses.replace(config, num_blocks=8192, max_seqs=64, max_blocks_per_seq=8192)
    store = jax.eval_shape(lambda: init_store(large))
    return large.num_blocks * large.block_size / harness.tree_bytes(store)


def shapes_of(model: Any, name: str) -> dict[str, Any]:
    """Returns what a row is about, and what it costs: bits of the pool per element, tokens per byte against bfloat16."""
    if name.startswith("control."):
        format = name.removeprefix("control.")
        bits = control_bits(format, model.config.head_dim)
        return {"per": "token and head", "bits_per_element": bits}
    config = cache_config(model, OPTIONS[name])
    plain = cache_config(model, OPTIONS["bfloat16"])
    return OPTIONS[name] | {
        "bits_per_element": round(bits_per_element(config), 3),
        "tokens_per_byte_vs_bf16": round(tokens_per_byte(config) / tokens_per_byte(plain), 3),
    }


def results(
    name: str, losses: Losses, base: Losses, shapes: dict[str, Any]
) -> list[harness.Result]:
    """Returns the changes of perplexity against the float32 cache, in percent: in chunks, and one by one."""
    found = []
    for path, mine, plain in zip(("", "decode_"), losses, base, strict=True):
        if not mine.size:
            continue
        gap = np.float64(mine) - plain
        error = gap.mean(axis=1).std(ddof=1) / len(gap) ** 0.5
        percent = [100 * np.expm1(x) for x in (gap.mean(), gap.mean() - error, gap.mean() + error)]
        found.append(
            harness.Result(
                metric=f"quality.{name}.{path}ppl_change_percent",
                value=percent[0],
                unit="%",
                shapes=shapes | {"tokens": int(gap.size)},
                versus="float32 cache, perplexity",
                versus_value=float(np.exp(np.float64(plain).mean())),
                spread=(percent[1], percent[2]),
                limit=None if path else LIMITS.get(name),
            )
        )
    return found


def greedy(model: Any, tokenizer: Any, options: dict[str, Any]) -> list[str]:
    """Returns the greedy continuations of PROMPTS, 24 tokens each, after PREAMBLE tokens of the text: sealed blocks."""
    before = windows(tokenizer, 1)[0, :PREAMBLE].tolist()
    prompts = [before + list(tokenizer.encode("\n\n" + text)) for text in PROMPTS]
    longest = max(map(len, prompts)) + 24
    config = dataclasses.replace(
        cache_config(model, options),
        num_blocks=len(prompts) * -(-longest // options["block_size"]),
        max_seqs=len(prompts),
    )
    done = Generator(model, config, prefill_chunk=64).generate(prompts, max_new_tokens=24)
    return [tokenizer.decode(completion.tokens) for completion in done]


def measured(model: Any, name: str, tokens: np.ndarray, folder: Path | None) -> Losses:
    """Returns the losses of a setting or control; those in the folder are not measured again."""
    path = None if folder is None else folder / f"{name}.npz"
    if path is not None and path.is_file():
        with np.load(path) as kept:
            return kept["chunked"], kept["single"]
    if name.startswith("control."):
        chunked = through_control(model, name.removeprefix("control."), tokens)
        single = np.zeros((len(tokens), 0), np.float32)  # nothing is cached
    else:
        chunked, single = through_cache(model, cache_config(model, OPTIONS[name]), tokens)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, chunked=chunked, single=single)
    return chunked, single


def main() -> None:
    """Measures and prints each figure as it comes; exit status 1 past a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 windows instead of 16")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--text", action="store_true", help="greedy answers instead of perplexity")
    parser.add_argument("--losses", type=Path, help="folder that keeps the losses of each row")
    parser.add_argument("--save", action="store_true", help="merge into benchmarks/results")
    known = [*OPTIONS, *(f"control.{format}" for format in CONTROLS)]
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="NAME")
    args = parser.parse_args()
    loaded = load(model_path())
    if args.text:
        names = [name for name in args.only if name in OPTIONS]
        texts = {name: greedy(loaded.model, loaded.tokenizer, OPTIONS[name]) for name in names}
        quality_report.answers(PROMPTS, texts, RESULTS if args.save else None)
        return
    tokens = windows(loaded.tokenizer, 4 if args.quick else 16)
    base = measured(loaded.model, "float32", tokens, args.losses)
    found = []
    for name in args.only:
        losses = measured(loaded.model, name, tokens, args.losses)
        for one in results(name, losses, base, shapes_of(loaded.model, name)):
            print(one.line() if args.json else quality_report.line(one), flush=True)
            found.append(one)
        if args.save:
            quality_report.save(RESULTS, found)
    sys.exit(any(one.misses for one in found))


if __name__ == "__main__":
    main()
