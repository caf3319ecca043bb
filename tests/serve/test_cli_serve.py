"""The command `jaxkv serve`: what it refuses before it costs time, and a run from the first line to the signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import models.tiny
from jaxkv import cli, cli_engine, cli_serve
from jaxkv.cli_engine import EngineOptions
from jaxkv.serve import bind

MODEL = SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=8, max_position_embeddings=100)
LOADED: Any = SimpleNamespace(model=None, config=MODEL)


def test_serve_refuses_bad_options_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda *_: pytest.fail("the model was loaded"))
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (["--port", "70000"], "port: expected one in [0, 65536), got 70000"),
            (["--port", port], f"got 127.0.0.1, {port}: "),
            (["--host", "no such host"], "host, port: expected an address"),
            (["--api-key", ""], "api_key: expected printable characters"),
            (["--max-queue", "0"], "max_queue: expected an integer of at least 1, got 0"),
            (["--max-body", "many"], "max_body: expected a size"),
            (["--name", ""], "name: expected one that is not empty"),
            (["--draft-model", "a"], "draft_len: expected at least 1 with a draft model, got 0"),
            (
                ["--policy", "fifo"],
                "policy: expected one of lru, lfu, aged-lfu, cost-aware, fair, got 'fifo'",
            ),
            (
                ["--policy", "fair"],
                "tenant_weights: expected some with policy fair and none without, got none",
            ),
            (
                ["--tenant-weights", "3,1"],
                "tenant_weights: expected some with policy fair and none without, got 3,1",
            ),
            (
                ["--policy", "fair", "--tenant-weights", "3,x"],
                "positive integers such as 3,1, got '3,x'",
            ),
            (["--keep-alive", "-1"], "keep_alive_s: expected a number above 0, got -1.0"),
        ]
        for args, part in cases:
            result = CliRunner().invoke(cli.app, ["serve", "--port", "0", *args])
            assert (result.exit_code, result.stdout) == (cli.BAD_INPUT, ""), args
            assert part in result.stderr, result.stderr
            assert result.stderr.count("\n") == 1


def test_serve_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_serve, "_PACKAGES", ("starlette", "no_such_package"))
    result = CliRunner().invoke(cli.app, ["serve"])
    assert result.exit_code == cli.BAD_INPUT
    assert result.stderr == (
        "jaxkv: serve: expected no_such_package, which is not installed; pip install 'jaxkv[serve]'\n"
    )


def test_cache_config_holds_all_sequences_unless_told_otherwise() -> None:
    config, max_len = cli_engine.cache_config(LOADED, EngineOptions(max_seqs=3, scrub_on_free=True))
    assert config.scrub_on_free
    assert (max_len, config.max_blocks_per_seq, config.num_blocks) == (100, 7, 21)
    config, max_len = cli_engine.cache_config(
        LOADED, EngineOptions(max_len=33, kv_format="int8", num_blocks=5)
    )
    assert (max_len, config.block_size, config.num_blocks, config.format) == (33, 64, 5, "int8")
    with pytest.raises(ValueError, match="max_len: expected at most the model's 100 positions"):
        cli_engine.cache_config(LOADED, EngineOptions(max_len=101))


def test_options_name_the_policy() -> None:
    def policy(**fields: Any) -> Any:
        return EngineOptions(**fields).eviction(16)

    weights = cli_engine.parse_weights("3,1")
    assert policy(policy="fair", tenant_weights=weights).weights == (3, 1)
    assert policy(policy="cost-aware").full_cost == 16
    kinds = [type(policy(policy=name)).__name__ for name in ("lru", "lfu", "aged-lfu")]
    assert kinds == ["Lru", "Lfu", "AgedLfu"]


def test_draft_of_takes_a_model_with_the_same_tokens_and_context() -> None:
    def loaded(context: int, letter: str) -> Any:
        sizes = SimpleNamespace(
            **vars(MODEL) | {"max_position_embeddings": context, "vocab_size": 100}
        )
        tokenizer = SimpleNamespace(decode=lambda ids: letter * (ids[0] > 50))
        return SimpleNamespace(model=None, config=sizes, tokenizer=tokenizer)

    target = loaded(100, "a")
    config, max_len = cli_engine.cache_config(target, EngineOptions(max_len=64))
    draft = cli_engine.draft_of(loaded(64, "a"), target, config, max_len)
    assert (draft.num_layers, draft.num_kv_heads, draft.head_dim) == (2, 2, 8)
    for other, words in (
        (loaded(63, "a"), "draft_model: expected a context of at least 64 positions, got 63"),
        (
            loaded(64, "b"),
            "draft_model: expected the tokens of the model, whose 52 is 'a', got 'b'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            cli_engine.draft_of(other, target, config, max_len)


def test_model_name_is_the_folder_the_file_or_the_hub_id(tmp_path: Any) -> None:
    (tmp_path / "a.b.gguf").touch()
    assert cli_serve.model_name(None, None) == "tiny"
    assert cli_serve.model_name(str(tmp_path / "a.b.gguf"), None) == "a.b"
    assert cli_serve.model_name(f"{tmp_path}/", None) == tmp_path.name
    assert cli_serve.model_name("Qwen/Qwen3-0.6B", None) == "Qwen/Qwen3-0.6B"
    assert cli_serve.model_name("Qwen/Qwen3-0.6B", "q") == "q"


@pytest.mark.slow
def test_serve_answers_until_the_signal_and_ends_with_0() -> None:
    command = [
        sys.executable, "-c", "from jaxkv.cli import main; main()", "serve", "--port", "0", "--max-seqs", "1",
        "--max-len", "64", "--prefill-tokens", "16", "--steps-per-dispatch", "4", "--draft-len", "2",
        "--draft-model", str(models.tiny.path()), "--policy", "fair", "--tenant-weights", "3,1",
    ]  # fmt: skip
    environment = {**os.environ, "JAXKV_API_KEY": "secret", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        [url] = re.findall(r"^jaxkv: serving tiny at (http://127.0.0.1:\d+/v1) \(4 blocks", line)
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 3}
        headers = {"Authorization": "Bearer secret"}
        with httpx.Client(trust_env=False, timeout=60) as client:
            assert client.post(f"{url}/completions", json=body).status_code == 401
            answer = client.post(f"{url}/completions", json=body, headers=headers)
            assert answer.json()["usage"]["completion_tokens"] == 3
            body |= {"tenant": 2}
            refused = client.post(f"{url}/completions", json=body, headers=headers)
            assert refused.json()["error"]["message"] == "tenant: expected one in [0, 2), got 2"
            text = client.get(url.replace("/v1", "/metrics")).text
        counts = [
            re.findall(rf"^jaxkv_{kind}_tokens_total (\S+)", text, re.MULTILINE)
            for kind in ("drafted", "accepted")
        ]
        assert (
            counts[0] == counts[1] == [str(float(counts[0][0]))] != ["0.0"]
        )  # it drafts for itself
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=30)
        assert (process.returncode, rest, errors) == (0, "", "")
    finally:
        process.kill()
        process.communicate()
