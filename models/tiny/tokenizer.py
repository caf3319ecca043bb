"""The model's tokenizer: byte-level BPE, trained on the corpus; and the files that let others load it.

Invariants: any text round-trips, since all 256 bytes are in the vocabulary; `EOS` is the only special token and has
id 0; it ends every document and every answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
EOS_ID = 0

# A user's turn is a question, the model's an answer, as in the corpus.  There is no system turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'A: ' + message['content'] + '" + EOS + "' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of exactly `vocab_size` ids if the texts hold enough merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json (end token, chat template, longest sequence)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": max_len,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
