"""Rebuilds a byte-level BPE tokenizer from the metadata of a GGUF file.

Invariants: ids are positions in the file's token list; control tokens are special, user-defined ones are matched whole
but shown; how text is cut before the merges comes from `tokenizer.ggml.pre`, and an unknown value is refused, because
a wrong cut gives wrong ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from models.qwen.gguf import eos_from_gguf
from models.qwen.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4


def _word_pattern(numbers: str) -> str:
    """The cut that GPT-4 introduced: contractions, words, numbers, punctuation, line ends, blanks."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    punctuation = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return "|".join([contraction, word, numbers, punctuation, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])


_DIGIT_BY_DIGIT = ("qwen2", "deepseek-r1-qwen")
_THREE_DIGITS = ("llama-bpe", "llama3", "llama-v3")
_GPT2_DIGITS = ("smollm",)
_GPT2 = ("gpt-2", "default")
SUPPORTED_PRE = (*_DIGIT_BY_DIGIT, *_THREE_DIGITS, *_GPT2_DIGITS, *_GPT2)


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that a GGUF file's metadata describes.

    Raises:
      ValueError: the token list or the merges are missing.
      NotImplementedError: another kind of vocabulary or pre-tokenizer; names what is supported.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise NotImplementedError(
            f"tokenizer.ggml.model: only 'gpt2' (byte-level BPE) is supported, got {kind!r}"
        )
    if pre not in SUPPORTED_PRE:
        raise NotImplementedError(
            f"tokenizer.ggml.pre: {pre!r} is not supported (supported: {', '.join(SUPPORTED_PRE)})"
        )
    for key in ("tokens", "merges"):
        if not metadata.get(f"tokenizer.ggml.{key}"):
            raise ValueError(f"tokenizer.ggml.{key}: expected a list, got none")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=pre in _THREE_DIGITS,
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre in _DIGIT_BY_DIGIT:
        backend.normalizer = normalizers.NFC()
    _add_special(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    special = _named_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        _prepend_bos(backend, special["bos_token"])
    return Tokenizer(
        backend,
        eos_token_ids=eos_from_gguf(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=special,
    )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before the merges."""
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    pattern = _word_pattern(r"\p{N}" if pre in _DIGIT_BY_DIGIT else r"\p{N}{1,3}")
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Marks control tokens as special and user-defined ones as whole words; both are in the vocabulary already."""
    by_kind = (
        {
            kind: [
                tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, its_kind in zip(tokens, kinds, strict=True)
                if its_kind == kind
            ]
            for kind in (_CONTROL, _USER_DEFINED)
        }
        if kinds
        else {}
    )
    backend.add_special_tokens(by_kind.get(_CONTROL, []))
    backend.add_tokens(by_kind.get(_USER_DEFINED, []))


def _named_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


def _prepend_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    template = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, backend.token_to_id(bos))],
    )
    backend.post_processor = template
