"""GGUF files written here: formats, architectures, metadata, damage, and the tokenizer rebuilt from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen_cases import CASES, seed_weights

from models.qwen import LoadedModel, QwenConfig, dense_forward, load
from models.qwen.gguf import GGUFFile, config_from_gguf, gguf_name, halves
from models.qwen.hf_weights import hf_name
from models.qwen.modeling import layer_shapes, top_shapes

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra jaxkv[gguf])")

TOKENS = ["<|end|>", "<think>", "a", "b", "c", "ab", "Ġ", "Ġab", "abc", "1", "2"]
KINDS = [3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1]
MERGES = ["a b", "Ġ ab", "ab c"]


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a llama: (i, i + d/2) become neighbours."""
    shape = rows.shape
    return rows.reshape(num_heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    name: str = "qwen3_head_dim_tied",
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    **given: Any,
) -> tuple[QwenConfig, Path]:
    """Writes a case as GGUF, matrices in `kind` where their rows allow it."""
    config = QwenConfig.from_hf(CASES[name] | given)
    arch = config.model_type
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_q_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope.type))
        writer.add_rope_scaling_factor(config.rope.factor)
    if config.rope.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position_embeddings)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}{{ eos_token }}")
    for key, value in (metadata or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        (writer.add_string if isinstance(value, str) else add)(key, value)
    tensors = seed_weights(config)
    names = [(n, None) for n in top_shapes(config)]
    names += [(n, layer) for layer in range(config.num_layers) for n in layer_shapes(config)]
    for ours, layer in names:
        if gguf_name(ours, layer) in drop:
            continue
        tensor = tensors[hf_name(ours, layer)]
        if arch == "llama" and ours in ("q_proj", "k_proj", "q_bias", "k_bias"):
            heads = config.num_q_heads if ours[0] == "q" else config.num_kv_heads
            tensor = interleave(tensor, heads)
        quant = gguf.GGMLQuantizationType[kind]
        block = gguf.GGML_QUANT_SIZES[quant][0]
        if tensor.ndim == 1 or kind == "F32" or tensor.shape[-1] % block:
            writer.add_tensor(gguf_name(ours, layer), tensor)
        else:
            data = gguf.quants.quantize(tensor, quant)
            writer.add_tensor(gguf_name(ours, layer), data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, path


@pytest.mark.parametrize(
    "name",
    ["qwen2_group7_tied", "qwen3_head_dim_tied", "llama_linear_bias_head_dim", "qwen2_yarn_group3"],
)
def test_gguf_gives_the_model_and_config_of_the_safetensors(
    name: str, tmp_path: Path, case_model: Callable[[str], LoadedModel]
) -> None:
    """Exact in F32: names, shapes, rope pairs, biases, tied head and metadata all come out the same."""
    config, path = write_gguf(tmp_path / "m.gguf", name, eos_token_id=0)
    loaded = load(path)
    assert loaded.config.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    assert loaded.eos_token_ids == (0,)
    for field in ("rope", "qkv_bias", "o_bias", "qk_norm", "tie_word_embeddings", "head_dim"):
        assert getattr(loaded.config, field) == getattr(config, field), field
    expected = jax.tree.leaves(case_model(name).model)
    for ours, theirs in zip(jax.tree.leaves(loaded.model), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "atol"),
    [("F16", 1e-3), ("BF16", 1e-2), ("Q8_0", 2e-2), ("Q4_1", 0.3)],
)
def test_formats_dequantise_to_the_weights(kind: str, atol: float, tmp_path: Path) -> None:
    """atol: rounding of values up to about 1 (4 bits: steps of range / 15)."""
    config, path = write_gguf(tmp_path / "m.gguf", kind=kind)
    embed = load(path).model.embed[...]
    exact = seed_weights(config)["model.embed_tokens.weight"]
    assert embed.dtype == jnp.float32
    np.testing.assert_allclose(embed, exact, atol=atol)
    assert np.abs(np.asarray(embed) - exact).max() > 0


def test_halves_undoes_the_interleaving_and_is_needed(tmp_path: Path) -> None:
    rows = np.arange(24.0).reshape(12, 2)
    np.testing.assert_array_equal(halves(interleave(rows, 3), 3), rows)
    np.testing.assert_array_equal(halves(np.arange(8), 1), [0, 2, 4, 6, 1, 3, 5, 7])
    assert not np.array_equal(halves(rows, 3), rows)


def test_yarn_attn_factor_of_gguf_multiplies(tmp_path: Path) -> None:
    """GGUF's number multiplies the derived 0.1 ln(8) + 1; a Hugging Face config's replaces it."""
    _, path = write_gguf(
        tmp_path / "m.gguf", "qwen2_yarn_group3", metadata={"qwen2.rope.scaling.attn_factor": 0.5}
    )
    rope = config_from_gguf(GGUFFile(path)).rope
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(8) + 1), rel=1e-6)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"qwen3.attention.sliding_window": 8}, NotImplementedError, "sliding layers are not read"),
        ({"qwen3.rope.dimension_count": 8}, NotImplementedError, "only the whole head_dim 16"),
        (
            {"qwen3.rope.scaling.type": "longrope"},
            NotImplementedError,
            "'longrope' is not supported",
        ),
    ],
)
def test_unsupported_metadata_is_refused(
    metadata: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    _, path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(error, match=re.escape(message)):
        load(path)


def test_other_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(NotImplementedError, match=r"'mamba' is not supported \(supported: qwen2"):
        load(tmp_path / "m.gguf")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    _, path = write_gguf(tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight", "output_norm.weight"))
    with pytest.raises(ValueError, match=r"missing blk\.1\.ffn_up\.weight, output_norm"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, 0.9])
def test_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    _, path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"m\.gguf: expected a whole GGUF file"):
        load(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf: no such file"):
        load(tmp_path / "absent.gguf")


def test_tokenizer_is_rebuilt_from_metadata(tmp_path: Path) -> None:
    _, path = write_gguf(tmp_path / "m.gguf")
    tokenizer = load(path).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("abc ab<think>12<|end|>")
    assert [TOKENS[i] for i in ids] == ["abc", "Ġab", "<think>", "1", "2", "<|end|>"]
    assert tokenizer.decode(ids) == "abc ab<think>12"  # control tokens are hidden, others shown
    assert tokenizer.decode(ids, skip_special_tokens=False) == "abc ab<think>12<|end|>"
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == "ab<|end|>"


def test_gguf_model_runs(tmp_path: Path) -> None:
    _, path = write_gguf(tmp_path / "m.gguf", kind="Q8_0")
    loaded = load(path, jnp.bfloat16)
    hidden = dense_forward(loaded.model, jnp.zeros((1, 3), jnp.int32))
    assert hidden.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(loaded.model.unembed(hidden))).all()
