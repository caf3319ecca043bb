"""Folders of safetensors: heads, shards, names, shapes, damage, dtypes, and saving."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from qwen_cases import CASES, seed_weights, write_folder

from models.qwen import QwenConfig, hf_weights, load, random_model

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def small(name: str = "qwen2_yarn_group3", **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    hf = CASES[name] | {"num_hidden_layers": 1} | given
    return hf, seed_weights(QwenConfig.from_hf(hf))


def logits_of(folder: Path) -> np.ndarray:
    model = load(folder).model
    return np.asarray(model.unembed(jnp.eye(model.config.hidden_size)[None]))[0]


@pytest.mark.parametrize(
    ("tied", "head_in_file", "expected"),
    [(True, True, EMBED), (True, False, EMBED), (False, True, HEAD)],
)
def test_head_used_is_the_embedding_only_if_tied(
    tied: bool, head_in_file: bool, expected: str, tmp_path: Path
) -> None:
    """Field case O1, head and embedding differ."""
    hf, tensors = small(tie_word_embeddings=tied)
    head = np.full_like(tensors[EMBED], 0.5) if head_in_file else None
    if head is not None:
        tensors[HEAD] = head
    logits = logits_of(write_folder(tmp_path, hf, tensors))
    np.testing.assert_allclose(logits, tensors[expected].T, rtol=1e-6)


def test_untied_without_head_names_the_tensor(tmp_path: Path) -> None:
    """Field case O1."""
    hf, tensors = small()
    del tensors[HEAD]
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        load(write_folder(tmp_path, hf, tensors))


def test_all_faulty_names_are_reported_at_once(tmp_path: Path) -> None:
    hf, tensors = small("qwen3_head_dim_tied")
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.k_norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 40), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(96, np.float32)
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((96, 32), np.float32)
    with pytest.raises(ValueError, match="weights do not fit the config") as error:
        load(write_folder(tmp_path, hf, tensors))
    for part in (
        "missing model.layers.0.self_attn.k_norm.weight, model.norm.weight;",
        "unexpected model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_proj.weight;",
        "misshapen model.layers.0.mlp.up_proj.weight (expected [40, 32], got [32, 40])",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("name", "attention_bias"), [("qwen2_yarn_group3", None), ("qwen3_head_dim_tied", False)]
)
def test_unused_bias_is_reported(name: str, attention_bias: bool | None, tmp_path: Path) -> None:
    """Field case O2: o bias in a qwen2 file, q bias in a qwen3 file without attention_bias."""
    hf, tensors = small(name)
    if attention_bias is not None:
        hf["attention_bias"] = attention_bias
    part = "o_proj" if name.startswith("qwen2") else "q_proj"
    bias = f"model.layers.0.self_attn.{part}.bias"
    tensors[bias] = np.ones(tensors[bias.replace("bias", "weight")].shape[0], np.float32)
    with pytest.raises(ValueError, match=re.escape(f"unexpected {bias}")):
        load(write_folder(tmp_path, hf, tensors))


def shard(folder: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> list[str]:
    """Writes two shards and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    names = sorted(tensors)
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        safetensors.numpy.save_file(part, str(folder / file))
    (folder / hf_weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_shards_of_the_index_are_read_and_a_stray_file_is_not(tmp_path: Path) -> None:
    """Field case O4."""
    hf, tensors = small()
    shard(tmp_path, hf, tensors)
    stray = {name: tensor + 7 for name, tensor in tensors.items()}
    safetensors.numpy.save_file(stray, str(tmp_path / "model.safetensors"))
    np.testing.assert_allclose(logits_of(tmp_path), tensors[HEAD].T, rtol=1e-6)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """Field case O4."""
    hf, tensors = small()
    files = shard(tmp_path, hf, tensors)
    (tmp_path / files[1]).unlink()
    with pytest.raises(FileNotFoundError, match=files[1]):
        load(tmp_path)


def test_index_naming_a_tensor_its_file_lacks_raises(tmp_path: Path) -> None:
    hf, tensors = small()
    files = shard(tmp_path, hf, tensors)
    index = json.loads((tmp_path / hf_weights.INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], files[0])
    (tmp_path / hf_weights.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names tensors its files do not hold"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0.5, -1, 4, 0])
def test_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    hf, tensors = small()
    path = write_folder(tmp_path, hf, tensors) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a whole safetensors file"):
        load(tmp_path)


def test_folder_without_weights_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small()[0]))
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON"):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    hf, tensors = small()
    tensors[EMBED] = tensors[EMBED].astype(np.int8)
    with pytest.raises(
        ValueError, match=re.escape(f"{EMBED}: expected floating-point weights, got I8")
    ):
        load(write_folder(tmp_path, hf, tensors))


def test_bfloat16_file_widens_exactly_and_float16_overflow_raises(tmp_path: Path) -> None:
    hf, tensors = small()
    narrow = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    folder = write_folder(tmp_path, hf, narrow)
    model = load(folder).model
    np.testing.assert_array_equal(model.embed[...], narrow[EMBED].astype(np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(load(folder, jnp.float16).model)} == {
        np.dtype(np.float16)
    }
    narrow["model.norm.weight"][0] = 1e5
    with pytest.raises(ValueError, match=r"model.norm.weight: expected values that fit float16"):
        load(write_folder(tmp_path, hf, narrow), jnp.float16)


@pytest.mark.parametrize("name", CASES)
def test_saved_model_loads_as_the_same(name: str, tmp_path: Path) -> None:
    config = QwenConfig.from_hf(CASES[name])
    model = random_model(config, jax.random.key(1))
    hf_weights.save(tmp_path, model)
    loaded = load(tmp_path)
    assert loaded.config == config
    assert loaded.tokenizer is None
    jax.tree.map(np.testing.assert_array_equal, model, loaded.model)
