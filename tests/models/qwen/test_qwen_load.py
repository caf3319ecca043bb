"""The one entry: folder, GGUF file, hub id; and the end ids it gathers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from qwen_cases import CASES, seed_weights, write_folder
from test_qwen_tokenizer import write_tokenizer

from models.qwen import QwenConfig, load
from models.qwen import load as load_function


def make_folder(folder: Path) -> Path:
    hf = CASES["qwen3_head_dim_tied"] | {"eos_token_id": 43, "num_hidden_layers": 1}
    return write_folder(folder, hf, seed_weights(QwenConfig.from_hf(hf)))


@pytest.mark.parametrize("generation_eos", [45, [45, 43]])
def test_folder_gathers_eos_of_config_generation_and_tokenizer(
    generation_eos: Any, tmp_path: Path
) -> None:
    """Field case O5, end to end: 43 in config, 45 in generation_config, 1 in the tokenizer."""
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    write_tokenizer(folder, {"eos_token": "<|im_end|>"})
    loaded = load(folder)
    assert loaded.eos_token_ids == (1, 43, 45)
    assert loaded.config.eos_token_ids == (1, 43, 45)
    assert loaded.tokenizer is not None


def test_unreachable_hub_id_says_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = "nobody/nothing: expected a local folder, a .gguf file, or a hub id"
    with pytest.raises(FileNotFoundError, match=message):
        load("nobody/nothing")


def test_malformed_hub_id_says_what_was_expected() -> None:
    with pytest.raises(FileNotFoundError, match="expected a local folder"):
        load("no/such/folder/at all")


def test_hub_download_asks_for_the_files_of_the_index_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def snapshot(repo_id: str, allow_patterns: list[str]) -> str:
        assert repo_id == "owner/name"
        asked.append(allow_patterns)
        return str(make_folder(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors, part-2\.safetensors"):
        load_function("owner/name")  # the fake hub gives no shards
    assert "model.safetensors.index.json" in asked[0]
    assert not any(name.endswith(".safetensors") for name in asked[0])
    assert asked[1][-2:] == ["part-1.safetensors", "part-2.safetensors"]
