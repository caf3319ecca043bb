"""Trains the small model that ships and writes its folder in Hugging Face form.

    python -m models.tiny.train --steps 3000 --out /tmp/tiny

All text comes from the grammar in `models.tiny.corpus`: generated on the fly, never the same document twice, nothing
downloaded or copied in.  Needs optax (the extra `train`).

Invariants:
  * The same arguments and versions give the same tokenizer and the same batches; weights agree up to the order of
    float32 sums.
  * A row of a batch begins with the first token of a document; documents follow one another with the end token between
    them, and the last one is cut.  No padding, so every position counts.
  * Weights are trained in float32 and saved in bfloat16; the loss reported at the end is that of the saved file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

from models.qwen import hf_weights
from models.qwen.config import QwenConfig
from models.qwen.dense import dense_attend
from models.qwen.init import random_model
from models.qwen.modeling import Array, Qwen
from models.qwen.rope import RopeConfig
from models.tiny.corpus import documents
from models.tiny.tokenizer import EOS_ID, save_tokenizer, train_tokenizer

VOCAB_SIZE = 1536
MAX_LEN = 1024
TOKENIZER_DOCUMENTS = 20_000
TOKENIZER_SEED, TRAIN_SEED, HELD_OUT_SEED = 1, 2, 3

TINY = QwenConfig(
    model_type="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=320,
    num_layers=4,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=MAX_LEN,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
    tie_word_embeddings=True,
    windows=(None,) * 4,
    eos_token_ids=(EOS_ID,),
)

Step = Callable[[Qwen, optax.OptState, Array], tuple[Qwen, optax.OptState, Array]]


def packed_rows(tokenizer: Tokenizer, seed: int, length: int) -> Iterator[np.ndarray]:
    """Yields i32[length + 1] rows without end: whole documents, each with its end token, the last one cut."""
    stream = documents(seed)
    while True:
        row: list[int] = []
        while len(row) <= length:
            row += [*tokenizer.encode(next(stream)).ids, EOS_ID]
        yield np.asarray(row[: length + 1], np.int32)


def packed_batches(tokenizer: Tokenizer, seed: int, rows: int, length: int) -> Iterator[np.ndarray]:
    """Yields i32[rows, length + 1] batches without end."""
    stream = packed_rows(tokenizer, seed, length)
    while True:
        yield np.stack(list(islice(stream, rows)))


def batch_loss(model: Qwen, tokens: Array) -> Array:
    """Returns f32[], the mean cross entropy in nats a token of i32[row, length + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape)
    # scores are computed again in the backward pass: saved, they would be most of a step's memory traffic
    attend = jax.checkpoint(dense_attend(model.config.head_dim**-0.5))
    hidden, _ = model.forward(inputs, positions, attend, None)
    return optax.softmax_cross_entropy_with_integer_labels(model.unembed(hidden), targets).mean()


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """Returns AdamW with warmup, cosine decay to 2 % of `peak`, clipping, and decay on matrices alone."""
    warmup = max(1, min(100, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, max(steps, warmup + 1), peak * 0.02
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b1=0.9,
            b2=0.97,
            weight_decay=0.05,
            mask=lambda tree: jax.tree.map(_is_matrix, tree),
        ),
    )


def _is_matrix(leaf: Array) -> bool:
    """Whether a weight (stacked or not) is a matrix; a stacked norm is [layer, n] with few layers."""
    return leaf.ndim == 3 or (leaf.ndim == 2 and leaf.shape[0] > 64)


def make_step(optimizer: optax.GradientTransformation) -> Step:
    """Returns the jitted update `(model, state, tokens) -> (model, state, loss)`; DONATES model and state."""

    def step(
        model: Qwen, state: optax.OptState, tokens: Array
    ) -> tuple[Qwen, optax.OptState, Array]:
        loss, gradient = jax.value_and_grad(batch_loss)(model, tokens)
        updates, state = optimizer.update(gradient, state, model)
        return optax.apply_updates(model, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def save_folder(folder: Path, model: Qwen, tokenizer: Tokenizer) -> None:
    """Writes weights in bfloat16, config.json, generation_config.json and the tokenizer's files."""
    hf_weights.save(folder, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model))
    save_tokenizer(tokenizer, folder, MAX_LEN)
    generation = {
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "do_sample": False,
        "max_new_tokens": 400,
    }
    (folder / "generation_config.json").write_text(
        json.dumps(generation, indent=2) + "\n", encoding="utf-8"
    )


def load_folder(folder: Path) -> tuple[Qwen, Tokenizer]:
    """Returns the model, its weights widened to float32, and the tokenizer that `save_folder` wrote."""
    config = QwenConfig.from_hf(
        hf_weights.read_json(folder / "config.json"),
        hf_weights.read_json(folder / "generation_config.json"),
    )
    return hf_weights.load(folder, config), Tokenizer.from_file(str(folder / "tokenizer.json"))


def held_out_loss(model: Qwen, tokenizer: Tokenizer, rows: int = 32, length: int = 512) -> float:
    """Returns the mean loss on documents that training never draws, in nats a token."""
    loss = jax.jit(batch_loss)
    stream = packed_batches(tokenizer, HELD_OUT_SEED, 2, length)
    return float(
        np.mean([loss(model, jnp.asarray(tokens)) for tokens in islice(stream, rows // 2)])
    )


def train(
    steps: int, out: Path, batch_tokens: int = 1024, peak: float = 3e-3, save_every: int = 500
) -> None:
    """Trains and saves the model; three quarters of the steps on rows of 256 tokens, the rest on rows of 512.

    Args:
      steps: updates.
      out: folder for the model and loss.csv (step, mean loss since the last line, seconds).
      batch_tokens: tokens of an update; a multiple of 512.
      peak: highest learning rate.
      save_every: updates between two savings of the model as it is.
    """
    tokenizer = train_tokenizer(islice(documents(TOKENIZER_SEED), TOKENIZER_DOCUMENTS), VOCAB_SIZE)
    model = random_model(TINY, jax.random.key(0))
    optimizer = make_optimizer(steps, peak)
    state = optimizer.init(model)
    update = make_step(optimizer)
    short = packed_batches(tokenizer, TRAIN_SEED, batch_tokens // 256, 256)
    long = packed_batches(tokenizer, TRAIN_SEED + 100, batch_tokens // 512, 512)
    out.mkdir(parents=True, exist_ok=True)
    start, losses = time.monotonic(), []
    with (out / "loss.csv").open("w", encoding="utf-8") as log:
        log.write("step,loss,seconds\n")
        for number in range(1, steps + 1):
            tokens = next(short if number <= steps * 3 // 4 else long)
            model, state, loss = update(model, state, jnp.asarray(tokens))
            losses.append(float(loss))
            if number % 50 == 0 or number == steps:
                line = f"{number},{np.mean(losses):.4f},{time.monotonic() - start:.0f}"
                print(line, flush=True)
                log.write(line + "\n")
                log.flush()
                losses = []
            if number % save_every == 0 or number == steps:
                save_folder(out, model, tokenizer)
    saved, tokenizer = load_folder(out)
    print(
        f"held-out loss of the saved file: {held_out_loss(saved, tokenizer):.4f} nats a token",
        flush=True,
    )


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="train the small story model on generated text")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    train(args.steps, args.out)


if __name__ == "__main__":
    main()
