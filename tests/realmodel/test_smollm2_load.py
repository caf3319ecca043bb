"""SmolLM2-135M from its GGUF: config, token ids and the choice at every step against transformers' (fixture).

The model is run once over prompt and continuation together, through the cache, so one forward checks every step;
that generation itself finds the same tokens is the subject of test_smollm2_greedy.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.qwen import LoadedModel
from pallas_kernels.layout import BatchView, KVLayout, KVStore, kv_format

pytestmark = pytest.mark.realmodel

GOLDEN = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]
NEAR_TIE = 1e-3  # top-two gap below which another choice is not a fault
BLOCK_SIZE = 16


def test_config_comes_from_the_metadata(smollm2: LoadedModel) -> None:
    config = smollm2.config
    sizes = (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert config.rope.theta == 100000.0
    assert config.tie_word_embeddings
    assert smollm2.eos_token_ids == (2,)
    assert sum(leaf.size for leaf in jax.tree.leaves(smollm2.model)) == 134_515_008


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_token_ids_equal_transformers(case: dict[str, Any], smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode(case["prompt"]) == case["prompt_ids"]


def test_stream_of_golden_tokens_joins_to_their_text(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    for case in CASES:
        stream = tokenizer.stream()
        pieces = [stream.push([token]) for token in case["tokens"]]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(case["tokens"])


def test_chat_template_of_the_file_renders(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer is not None
    text = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_every_greedy_choice_equals_transformers(smollm2: LoadedModel) -> None:
    """Equal wherever transformers' two best logits are further apart than 1e-3."""
    sequences = [case["prompt_ids"] + case["tokens"][:-1] for case in CASES]
    chosen = np.asarray(_argmax_everywhere(smollm2, sequences))
    for row, case in enumerate(CASES):
        first = len(case["prompt_ids"]) - 1
        ours = chosen[row, first : first + len(case["tokens"])]
        clear = np.asarray(case["top2_gap"]) > NEAR_TIE
        np.testing.assert_array_equal(ours[clear], np.asarray(case["tokens"])[clear])
        assert clear.mean() > 0.9


def _argmax_everywhere(smollm2: LoadedModel, sequences: list[list[int]]) -> jax.Array:
    """Returns i32[row, q_pos], the most likely next token after each one; blocks are handed out shuffled."""
    config = smollm2.config
    rows, length = len(sequences), max(len(ids) for ids in sequences)
    max_blocks = -(-length // BLOCK_SIZE)
    num_blocks = rows * max_blocks
    layout = KVLayout(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=config.head_dim,
        format=kv_format("float32"),
        as_bits=False,
    )
    store = KVStore(jnp.full(layout.shape, jnp.nan, layout.dtype), layout)
    lens = np.array([len(ids) for ids in sequences], np.int32)
    tokens = np.zeros((rows, length), np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
    tables = np.random.RandomState(0).permutation(num_blocks).reshape(rows, max_blocks)
    used = np.arange(max_blocks)[None] < -(-lens // BLOCK_SIZE)[:, None]
    index = np.arange(length)[None]
    view = BatchView(
        block_tables=jnp.asarray(np.where(used, tables, num_blocks), jnp.int32),
        kv_lens=jnp.asarray(lens),
        q_lens=jnp.asarray(lens),
        positions=jnp.asarray(np.where(index < lens[:, None], index, 0), jnp.int32),
    )

    @jax.jit
    def run(model: Any, tokens: jax.Array, store: KVStore, view: BatchView) -> jax.Array:
        hidden, _ = model(tokens, store, view)
        return jnp.argmax(model.unembed(hidden), axis=-1).astype(jnp.int32)

    return run(smollm2.model, jnp.asarray(tokens), store, view)
