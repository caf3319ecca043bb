"""Text to token ids and back, streaming, and chat templates.

Invariants: ids outside the vocabulary raise; a stream never emits half a character; templates run sandboxed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models.qwen.hf_weights import read_json

_REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


class Tokenizer:
    """A `tokenizers` tokenizer with what a model folder says around it.

    Attributes:
      eos_token_ids: ids that end a sequence, ascending.
      chat_template: jinja2 source, or None.
      special_tokens: names like "bos_token" -> text, handed to the template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json and chat_template.jinja.

        Raises:
          FileNotFoundError: no tokenizer.json.
          ValueError: a file is damaged; names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"{path}: expected a tokenizers file, got {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        special = _special_tokens(config)
        eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return cls(
            backend,
            eos_token_ids=() if eos is None else (eos,),
            chat_template=_chat_template(folder, config),
            special_tokens=special,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids.  `add_special_tokens` adds what the tokenizer itself puts around a text, if anything."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns text; bytes that are no UTF-8 come out as U+FFFD.

        Raises:
          ValueError: an id is not in the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if i < 0 or self.backend.id_to_token(i) is None:
                raise ValueError(
                    f"token id: expected one in the vocabulary of {self.vocab_size}, got {i}"
                )
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """Returns a fresh incremental decoder for one sequence."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Returns the prompt text of a conversation; encode it with `add_special_tokens=False`.

        Args:
          messages: dicts with "role" and "content".
          add_generation_prompt: end with the opening of the assistant's turn.
          tools: tool descriptions, for templates that take them.
          variables: anything else the template reads, e.g. enable_thinking.

        Raises:
          ValueError: there is no template, or it refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError("chat_template: expected one in the tokenizer's files, got none")
        import jinja2

        try:
            return (
                _environment()
                .from_string(self.chat_template)
                .render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    **self.special_tokens,
                    **variables,
                )
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template: {error}") from error


class TextStream:
    """Decodes one sequence as its tokens arrive.

    `push` returns only text that later tokens cannot change: a character whose bytes are spread over several
    tokens waits until it is whole.  The pieces joined, with `flush` at the end, are `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # from the last safe cut on
        self._given = ""  # text of self._ids that is already out

    def push(self, ids: Iterable[int]) -> str:
        """Takes new ids, returns new text (may be empty)."""
        self._ids.extend(int(i) for i in ids)
        text = self._decode()
        if text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._given) :]
        # Keep the last id for context: some decoders strip a space at the start of a text.
        self._ids = self._ids[-1:]
        self._given = self._decode()
        return new

    def flush(self) -> str:
        """Returns what was held back; the stream is empty afterwards."""
        new = self._decode()[len(self._given) :]
        self._ids, self._given = [], ""
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of a tokenizer_config.json; a token is a string or a dict with its content."""
    out = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            out[name] = value
    return out


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template: its own file first, else the config's string, else the one named "default" in its list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value}.get("default")
    return value


def _environment() -> Any:
    """A sandboxed jinja2 environment with the helpers that published templates use."""
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
