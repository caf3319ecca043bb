"""One entry for models from a folder, a GGUF file or the hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from models.qwen import gguf, hf_weights
from models.qwen.config import QwenConfig
from models.qwen.gguf_tokenizer import tokenizer_from_gguf
from models.qwen.modeling import Qwen
from models.qwen.tokenizer import Tokenizer

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    hf_weights.INDEX,
)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What `load` found.

    Attributes:
      model: the decoder with its weights.
      config: its description.
      tokenizer: None where a folder has no tokenizer.json.
      eos_token_ids: ids that end a sequence: the union of all sources, ascending.
    """

    model: Qwen
    config: QwenConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


def load(
    path_or_repo_id: str | Path, dtype: DTypeLike = jnp.float32, implementation: str = "auto"
) -> LoadedModel:
    """Loads a model from a local folder, a .gguf file, or a hub id such as "Qwen/Qwen3-0.6B".

    Args:
      path_or_repo_id: a path that exists wins over a hub id of the same spelling.
      dtype: number type of the weights.
      implementation: passed to the cache's ops by the model.

    Raises:
      FileNotFoundError: a file is missing, or the hub cannot be reached and holds no copy; names what was asked.
      ValueError: damaged files, weights that do not fit the config, config values out of range.
      NotImplementedError: a model family or a switch that is not supported.
    """
    path = Path(path_or_repo_id)
    if path.suffix == ".gguf":
        return _load_gguf(path, dtype, implementation)
    if path.is_dir():
        return _load_folder(path, dtype, implementation)
    return _load_folder(download(str(path_or_repo_id)), dtype, implementation)


def config_from_folder(folder: str | Path, extra_eos: tuple[int, ...] = ()) -> QwenConfig:
    """Returns the config of a model folder; end ids from config.json, generation_config.json and `extra_eos`."""
    folder = Path(folder)
    generation = folder / "generation_config.json"
    return QwenConfig.from_hf(
        hf_weights.read_json(folder / "config.json"),
        hf_weights.read_json(generation) if generation.is_file() else None,
        extra_eos,
    )


def download(repo_id: str) -> Path:
    """Fetches the files a model needs from the hub (weights: what the index names) and returns their folder.

    Raises:
      FileNotFoundError: there is no such path, and the hub did not give it either; says why.
      ImportError: the package `huggingface_hub` is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ImportError(
            f"{repo_id}: not a local path, and fetching needs the package huggingface_hub"
        ) from error
    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(_SMALL_FILES)))
        index = folder / hf_weights.INDEX
        weights = [hf_weights.SINGLE]
        if index.is_file():
            weights = sorted(set(hf_weights.read_json(index).get("weight_map", {}).values()))
        return Path(
            huggingface_hub.snapshot_download(repo_id, allow_patterns=[*_SMALL_FILES, *weights])
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{repo_id}: expected a local folder, a .gguf file, or a hub id that can be fetched; {reason}"
        ) from error


def _load_folder(folder: Path, dtype: DTypeLike, implementation: str) -> LoadedModel:
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    config = config_from_folder(folder, tokenizer.eos_token_ids if tokenizer else ())
    model = hf_weights.load(folder, config, dtype, implementation)
    return LoadedModel(model, config, tokenizer, config.eos_token_ids)


def _load_gguf(path: Path, dtype: DTypeLike, implementation: str) -> LoadedModel:
    file = gguf.GGUFFile(path)
    config = gguf.config_from_gguf(file)
    model = gguf.load(file, config, dtype, implementation)
    return LoadedModel(model, config, tokenizer_from_gguf(file.metadata), config.eos_token_ids)
