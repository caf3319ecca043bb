"""The small model that ships: a Qwen3 of about a million weights that tells stories; see README.md beside this file.

Invariant: importing this package reads no file and loads no array library.
"""

from pathlib import Path


def path() -> Path:
    """Returns the folder that holds config.json, model.safetensors and tokenizer.json."""
    return Path(__file__).resolve().parent
