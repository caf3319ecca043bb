"""The small model that ships: its corpus, its tokenizer, its training, and what it writes without a cache."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from models import tiny
from models.qwen.config import QwenConfig
from models.qwen.dense import dense_forward
from models.qwen.hf_weights import read_json
from models.qwen.init import random_model
from models.qwen.modeling import Qwen
from models.tiny import corpus, lexicon, train
from models.tiny.tokenizer import CHAT_TEMPLATE, EOS, EOS_ID, train_tokenizer

MAX_BYTES = 4 * 1000 * 1000
MAX_NEW_TOKENS = 400
SHIPPED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

Generate = Callable[[str], tuple[str, bool]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny.path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def generate() -> Generate:
    """Greedy continuation by a full forward for each token, and whether it ended by itself."""
    model, tokenizer = train.load_folder(tiny.path())

    @jax.jit
    def next_token(model: Qwen, tokens: jax.Array, length: jax.Array) -> jax.Array:
        hidden = dense_forward(model, tokens)
        last = jax.lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
        return jnp.argmax(model.unembed(last))

    def run(prompt: str) -> tuple[str, bool]:
        ids = tokenizer.encode(prompt).ids
        start = len(ids)
        while len(ids) < start + MAX_NEW_TOKENS:
            width = 128 * (
                len(ids) // 128 + 1
            )  # few shapes, few compiles; causal, so padding is not seen
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(ids)] = ids
            token = int(next_token(model, jnp.asarray(tokens), jnp.int32(len(ids))))
            if token == EOS_ID:
                return tokenizer.decode(ids[start:]), True
            ids.append(token)
        return tokenizer.decode(ids[start:]), False

    return run


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]+(?:-[a-z]+)?", text))


def test_folder_shipped_is_at_most_4_mb() -> None:
    files = [path for path in tiny.path().rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.name for path in files} >= set(SHIPPED)
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_config_shipped_is_the_one_the_script_trains() -> None:
    folder = tiny.path()
    config = QwenConfig.from_hf(
        read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    )
    assert config == train.TINY
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


def test_corpus_same_seed_is_the_same_text() -> None:
    first = list(itertools.islice(corpus.documents(7), 50))
    assert first == list(itertools.islice(corpus.documents(7), 50))
    assert first[20:] == list(itertools.islice(corpus.documents(7, start=20), 30))
    assert first != list(itertools.islice(corpus.documents(8), 50))
    assert len(set(first)) > 40


def test_corpus_documents_are_clean_ascii_without_open_fields() -> None:
    for text in itertools.islice(corpus.documents(0), 2000):
        assert text == text.strip()
        assert re.fullmatch(r"[ -~\n]+", text)
        assert not re.search(r"[{}]| {2}|\n{3}| [.,]|\ba [aeiou]|\ban [^aeiouh]", text), text


def test_corpus_questions_after_a_story_have_their_answer_in_it() -> None:
    asked = 0
    for text in itertools.islice(corpus.documents(0), 2000):
        if "\n\nQ: " not in text:
            continue
        story, questions = text.split("\n\nQ: ", 1)
        for answer in re.findall(r"^A: (.*)\.$", questions, re.M):
            names = words(answer) & {name for group in lexicon.NAMES.values() for name in group}
            colours = words(answer) & set(lexicon.COLOURS)
            assert names | colours <= words(story)
            asked += 1
    assert asked > 300


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was a fox.",
        "A\n\n  B\tC",
        "Zażółć gęślą jaźń 🦊 日本語",
        "\x00\x7f",
        EOS[:-1],
    ],
)
def test_tokenizer_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_end_token_is_one_special_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == train.VOCAB_SIZE
    assert tokenizer.encode(EOS).ids == [EOS_ID]
    assert tokenizer.decode([EOS_ID]) == ""


def test_chat_template_makes_questions_and_answers() -> None:
    stored = read_json(tiny.path() / "tokenizer_config.json")["chat_template"]
    assert stored == CHAT_TEMPLATE
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    text = jinja2.Template(stored).render(messages=messages, add_generation_prompt=True)
    assert text == f"Q: Hello\nA: Hi.{EOS}Q: Bye\nA:"


def test_packed_rows_begin_with_a_document_and_hold_no_padding(tokenizer: Tokenizer) -> None:
    batch = next(train.packed_batches(tokenizer, 5, rows=2, length=300))
    assert batch.shape == (2, 301)
    assert batch.dtype == np.int32
    first = corpus.document(5, 0)
    ids = [*tokenizer.encode(first).ids, EOS_ID][:301]
    assert batch[0, : len(ids)].tolist() == ids


def test_training_few_steps_lower_the_loss_and_save_a_model_that_loads(tmp_path: Path) -> None:
    config = dataclasses.replace(
        train.TINY,
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        windows=(None, None),
    )
    tokenizer = train_tokenizer(itertools.islice(corpus.documents(1), 200), config.vocab_size)
    model = random_model(config, jax.random.key(0))
    optimizer = train.make_optimizer(30, 1e-2)
    state, update = optimizer.init(model), train.make_step(optimizer)
    batches = train.packed_batches(tokenizer, 2, rows=2, length=64)
    losses = []
    for tokens in itertools.islice(batches, 30):
        model, state, loss = update(model, state, jnp.asarray(tokens))
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(config.vocab_size), abs=0.5)
    assert np.mean(losses[-5:]) < losses[0] - 1.0
    train.save_folder(tmp_path, model, tokenizer)
    loaded, _ = train.load_folder(tmp_path)
    held_out = train.held_out_loss(loaded, tokenizer, rows=2, length=64)
    assert held_out == pytest.approx(float(np.mean(losses[-5:])), abs=0.5)


@pytest.mark.parametrize(
    "prompt",
    [
        "Once upon a time",
        "The cat",
        pytest.param("Tell me a story about a fox", marks=pytest.mark.exhaustive),
    ],
)
def test_generation_story_is_known_words_and_ends(generate: Generate, prompt: str) -> None:
    text, ended = generate(prompt)
    known = set().union(
        *(words(document) for document in itertools.islice(corpus.documents(0), 6000))
    )
    assert ended
    assert words(text) <= known
    assert len(words(text)) > 25
    assert text.rstrip().endswith((".", "!", "?", '"'))


@pytest.mark.parametrize(
    "prompt", ["Q: What colour is the sky? A:", "Q: What colour is the sky?\nA:"]
)
def test_generation_question_gets_its_answer(generate: Generate, prompt: str) -> None:
    assert generate(prompt) == (" The sky is blue.", True)
