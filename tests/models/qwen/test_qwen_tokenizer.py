"""Encoding, decoding, streaming and chat templates, with a small byte-level tokenizer made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from models.qwen import Tokenizer
from models.qwen.gguf_tokenizer import SUPPORTED_PRE, tokenizer_from_gguf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> list[str]:
    """The 256 byte tokens of a byte-level vocabulary, a word and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, "he", "<|im_end|>", "<|im_start|>"]


def metadata(pre: str = "qwen2") -> dict[str, Any]:
    tokens = byte_tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(metadata())


TEXTS = ["hello", " two  spaces ", "naïve ☕ 日本語 🙂", "line\n\nbreaks\t", "2024 3.14", ""]


@pytest.mark.parametrize("pre", SUPPORTED_PRE)
@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(pre: str, text: str) -> None:
    tokenizer = tokenizer_from_gguf(metadata(pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_stream_pieces_join_to_the_text_and_never_break_a_character(
    text: str, size: int, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_stream_flush_gives_an_unfinished_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    stream = tokenizer.stream()
    assert stream.push(ids) == ""  # "a" waits with the rest: it came in the same push
    assert stream.flush() == "a\ufffd"
    assert stream.flush() == ""


def test_stream_passes_a_literal_replacement_character_at_the_latest_with_flush(
    tokenizer: Tokenizer,
) -> None:
    stream = tokenizer.stream()
    text = "x\ufffdy\ufffd"
    out = "".join(stream.push([i]) for i in tokenizer.encode(text))
    assert out + stream.flush() == text


def test_control_tokens_are_whole_and_skipped(tokenizer: Tokenizer) -> None:
    end, start = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    ids = tokenizer.encode("<|im_start|>he<|im_end|>")
    assert ids == [start, end - 1, end]
    assert tokenizer.decode(ids) == "he"
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(stream.push([i]) for i in ids) == "<|im_start|>he<|im_end|>"


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_unknown_id_raises(bad: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"token id: expected one in the vocabulary .*got {bad}"):
        tokenizer.decode([0, bad])


def test_chat_template_renders_and_can_leave_the_assistant_out(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "he"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    short = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert short == "<|im_start|>user\nhe<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<"}]'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ eos_token }}{{ enable_thinking }}", "<|im_end|>False"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_chat_template_helpers(template: str, expected: str, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "é<"}]
    assert tokenizer.apply_chat_template(messages, enable_thinking=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "chat_template"),
        (None, "chat_template: expected one in the tokenizer's files, got none"),
    ],
)
def test_chat_template_refusals(template: str | None, message: str, tokenizer: Tokenizer) -> None:
    """A template runs sandboxed: it reaches no Python internals."""
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, NotImplementedError, "only 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, NotImplementedError, "'tekken' is not supported"),
        ({"tokenizer.ggml.merges": []}, ValueError, "tokenizer.ggml.merges: expected a list"),
    ],
)
def test_gguf_tokenizer_refusals(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(metadata() | change)


def write_tokenizer(folder: Path, config: dict[str, Any]) -> Path:
    backend = tokenizers.Tokenizer(BPE({"a": 0, "<|im_end|>": 1, "<|endoftext|>": 2}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True, "__type": "AddedToken"}]
)
def test_folder_tokenizer_reads_eos_as_text_or_dict(eos: Any, tmp_path: Path) -> None:
    """Field case O5, the tokenizer's part."""
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path, {"eos_token": eos}))
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert tokenizer.vocab_size == 3


def test_template_file_wins_over_config_and_named_list_gives_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_tokenizer(tmp_path, {"eos_token": None, "chat_template": named})
    assert Tokenizer.from_folder(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(folder).chat_template == "F"
    assert Tokenizer.from_folder(folder).eos_token_ids == ()


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizers file"):
        Tokenizer.from_folder(tmp_path)
