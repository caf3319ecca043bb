"""Drives a model through a paged store with hand-made, scattered block tables; and compares layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.qwen import DecoderLayer, Qwen, dense_attend
from models.qwen.modeling import layer_windows
from models.qwen.rope import cos_sin
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format

BLOCK_SIZE = 4


def make_store(model: Qwen, num_blocks: int, store_format: str = "float32") -> KVStore:
    """Returns a pool whose every slot holds NaN: what nobody wrote must not reach an output."""
    config = model.config
    layout = KVLayout(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=config.head_dim,
        format=kv_format(store_format),
        as_bits=False,
    )
    return KVStore(jnp.full(layout.shape, jnp.nan, layout.dtype), layout)


def scattered_tables(num_rows: int, max_blocks: int, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Returns i32[row, max_blocks] distinct block ids in random order, block 0 in use."""
    ids = np.random.RandomState(seed).permutation(num_blocks)[: num_rows * max_blocks]
    if 0 not in ids:
        ids[1] = 0
    return ids.reshape(num_rows, max_blocks).astype(np.int32)


def make_view(
    tables: np.ndarray, kv_lens: Sequence[int], q_lens: Sequence[int], query_len: int, no_block: int
) -> BatchView:
    """Returns the view `reserve` would: NO_BLOCK past the last block, position 0 in padding."""
    kv, q = np.asarray(kv_lens, np.int32), np.asarray(q_lens, np.int32)
    used = -(-kv // BLOCK_SIZE)
    blocks = np.where(np.arange(tables.shape[1])[None] < used[:, None], tables, no_block)
    index = np.arange(query_len)[None]
    positions = np.where(index < q[:, None], (kv - q)[:, None] + index, 0)
    return BatchView(
        jnp.asarray(blocks, jnp.int32),
        jnp.asarray(kv),
        jnp.asarray(q),
        jnp.asarray(positions, jnp.int32),
    )


@jax.jit
def _step(
    model: Qwen, tokens: jax.Array, store: KVStore, view: BatchView
) -> tuple[jax.Array, KVStore]:
    hidden, store = model(tokens, store, view)
    return model.unembed(hidden), store


def cached_logits(
    model: Qwen,
    tokens: np.ndarray,
    chunks: Sequence[int],
    store_format: str = "float32",
    tables: np.ndarray | None = None,
    store: KVStore | None = None,
    start: int = 0,
) -> tuple[np.ndarray, KVStore]:
    """Runs i32[row, q_pos] tokens in chunks of the given lengths, padded to the longest but for single tokens.

    Args:
      chunks: lengths that add up to q_pos; 1 is a decode step.
      tables, store, start: continue rows that already hold `start` tokens.

    Returns:
      Logits f32[row, q_pos, vocab] and the store.
    """
    rows, length = tokens.shape
    max_blocks = -(-(start + length) // BLOCK_SIZE)
    num_blocks = rows * max_blocks + 3
    tables = scattered_tables(rows, max_blocks, num_blocks) if tables is None else tables
    store = make_store(model, num_blocks, store_format) if store is None else store
    out, done = [], 0
    for chunk in chunks:
        query_len = 1 if chunk == 1 else max(chunks)
        padded = np.zeros((rows, query_len), np.int32)
        padded[:, :chunk] = tokens[:, done : done + chunk]
        kv_len = start + done + chunk
        view = make_view(tables, [kv_len] * rows, [chunk] * rows, query_len, store.layout.no_block)
        logits, store = _step(model, jnp.asarray(padded), store, view)
        out.append(np.asarray(logits)[:, :chunk])
        done += chunk
    assert done == length
    return np.concatenate(out, axis=1), store


def layer_of_first_difference(
    model: Qwen, tokens: np.ndarray, hidden: np.ndarray, atol: float
) -> str | None:
    """Runs the model layer by layer and names the first one whose output differs from the oracle's.

    Args:
      hidden: f32[layer + 1, row, q_pos, hidden]; see `hf_oracle.full_forward`.

    Returns:
      None if all agree, else a sentence with the layer and the largest difference.
    """
    config = model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    cos, sin = cos_sin(config.rope, config.head_dim, positions)
    x = jnp.take(model.embed[...], jnp.asarray(tokens), axis=0)
    windows = layer_windows(config)
    attend = dense_attend(config.head_dim**-0.5)
    for layer in range(config.num_layers):
        difference = float(np.abs(np.asarray(x) - hidden[layer]).max())
        if not difference <= atol:
            what = "the embedding" if layer == 0 else f"layer {layer - 1}"
            return f"{what} differs by up to {difference:.3g}"
        weights: DecoderLayer = jax.tree.map(lambda leaf, layer=layer: leaf[layer], model.layers)
        window = None if windows is None else windows[layer]
        x, _ = weights(x, cos, sin, jnp.int32(layer), window, weights.product, attend, None)
    return None
