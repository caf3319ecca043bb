"""The command line: what it prints, where, and how it refuses bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_model import dense_greedy, dense_logits, fake_model
from oracles import beam as beam_oracle
from rich.console import Console
from typer.testing import CliRunner

from jaxkv import (
    CacheConfig,
    cli,
    cli_commands,
    cli_generate,
    cli_report,
    cli_terminal,
    init_cache,
    memory_profile,
)
from jaxkv.cli_generate import RunOptions
from jaxkv.status import CapacityError

LETTERS = (
    "#abcdefghijklmnopqrstuvwxyz .,!"  # 31 characters: the vocabulary of the fake model; # is id 0
)
CONFIG = SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=8, max_position_embeddings=128)
QWEN_05B = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


class LetterTokenizer:
    """One id a character; its stream holds nothing back."""

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[i] for i in ids)

    def stream(self) -> Any:
        return SimpleNamespace(push=self.decode, flush=lambda: "")

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> str:
        return "".join(f"{m['role']}. {m['content']}! " for m in messages)


@dataclasses.dataclass(frozen=True)
class FakeLoaded:
    """What the loader would return."""

    model: Any = dataclasses.field(default_factory=fake_model)
    config: Any = dataclasses.field(default_factory=lambda: CONFIG)
    tokenizer: LetterTokenizer | None = dataclasses.field(default_factory=LetterTokenizer)
    eos_token_ids: tuple[int, ...] = ()


def expected_text(loaded: FakeLoaded, prompt: str, count: int) -> str:
    """The greedy continuation by the dense twin, without its end token."""
    tokens = dense_greedy(
        loaded.model, LetterTokenizer().encode(prompt), count, loaded.eos_token_ids
    )
    return LetterTokenizer().decode([t for t in tokens if t not in loaded.eos_token_ids])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> FakeLoaded:
    """Puts the fake model in the loader's place."""
    fake = FakeLoaded()
    monkeypatch.setattr(cli, "_load", lambda *_: fake)
    return fake


def run(*args: str, stdin: str | None = None) -> Any:
    """Invokes the program; standard output and standard error come apart."""
    return CliRunner().invoke(cli.app, list(args), input=stdin)


# generate -----------------------------------------------------------------------------------------


def test_generate_one_prompt_writes_only_its_text(loaded: FakeLoaded) -> None:
    result = run("generate", "once upon", "-n", "20", "--steps-per-dispatch", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == expected_text(loaded, "once upon", 20) + "\n"


def test_generate_stops_at_the_end_token_and_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = LetterTokenizer().encode(expected_text(FakeLoaded(), "once upon", 20))
    fake = FakeLoaded(eos_token_ids=(whole[7],))
    monkeypatch.setattr(cli, "_load", lambda *_: fake)
    result = run("generate", "-n", "20", "--echo", stdin="once upon\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "once upon" + expected_text(fake, "once upon", 20) + "\n"
    assert len(result.stdout) <= len("once upon") + 7 + 1


def test_generate_several_prompts_are_labelled_and_stats_go_to_stderr(
    loaded: FakeLoaded, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog\n")
    args = ["generate", "once", "--file", str(tmp_path / "prompts.txt"), "--lines"]
    result = run(*args, "-n", "6", "--block-size", "4", "--stats")
    assert result.exit_code == 0
    texts = [(p, expected_text(loaded, p, 6)) for p in ("once", "a cat", "a dog")]
    assert result.stdout == "\n".join(f"[{i}] {p}\n{t}\n" for i, (p, t) in enumerate(texts, 1))
    for word in ("tokens/s", "compile time", "dispatches", "blocks, peak", "fragmentation"):
        assert word in result.stderr
    assert "9 of 9 (100.0 %)" in result.stderr  # 9, 10 and 10 tokens held: 3 blocks of 4 each


def test_generate_json_samples_share_the_prompt(loaded: FakeLoaded) -> None:
    args = ["generate", "once upon a", "-n", "5", "--block-size", "4", "--num-samples", "2"]
    result = run(*args, "--temperature", "2.0", "--kv-format", "bfloat16", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert [(c["prompt_index"], c["sample_index"]) for c in answer["completions"]] == [
        (0, 0),
        (0, 1),
    ]
    for completion in answer["completions"]:
        assert completion["text"] == LetterTokenizer().decode(completion["tokens"])
        assert completion["finish_reason"] == "length"
    # 11 prompt tokens and 4 fed back: 2 full blocks shared, 2 of each sample's own
    assert answer["stats"]["num_blocks"] == answer["stats"]["peak_blocks"] == 6
    assert answer["stats"]["used_blocks"] == 0
    assert answer["stats"]["new_tokens"] == 10


def test_generate_beams_writes_the_best_of_them(loaded: FakeLoaded) -> None:
    """The two best of three beams, with their scores, in a pool with just enough blocks."""
    args = ["generate", "once upon a", "-n", "5", "--block-size", "4", "--beams", "3"]
    args += ["--length-penalty", "-1", "--early-stopping", "never"]
    result = run(*args, "--num-samples", "2", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)

    def logits(tokens: Sequence[int]) -> Any:
        return dense_logits(loaded.model, list(tokens))[-1]

    prompt = LetterTokenizer().encode("once upon a")
    best = beam_oracle.beam_search(logits, prompt, 3, 5, (), -1.0, "never")[0][:2]
    assert [c["tokens"] for c in answer["completions"]] == [tokens for _, tokens in best]
    scores = [c["score"] for c in answer["completions"]]
    assert scores == pytest.approx([score for score, _ in best], abs=1e-4)
    assert answer["stats"]["used_blocks"] == 0
    assert answer["stats"]["num_blocks"] == 2 + 3 * 2


def test_generate_pool_that_fills_up_says_so_and_exits_1(loaded: FakeLoaded) -> None:
    result = run("generate", "once upon", "-n", "20", "--block-size", "4", "--num-blocks", "4")
    assert result.exit_code == cli_commands.UNFINISHED
    assert result.stdout == expected_text(loaded, "once upon", 8) + "\n"
    assert result.stderr.count("\n") == 1
    assert "pool of 4 blocks" in result.stderr


def test_generate_quantised_format_brings_its_block_size_and_counts_open_blocks(
    loaded: FakeLoaded,
) -> None:
    """69 tokens of a sequence are held: one block of 64 is sealed on the way."""
    options = ["--symmetric-keys", "--value-group", "4"]
    result = run("generate", "once upon", "-n", "61", "--kv-format", "int4", *options, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    stats = answer["stats"]
    assert len(answer["completions"][0]["tokens"]) == 61
    assert (stats["kv_format"], stats["block_size"], stats["num_blocks"]) == ("int4", 64, 2)
    assert stats["kv_open_bytes"] == 2 * 2 * 64 * 16 * 2  # layers, heads, tokens, K and V, bfloat16
    # Codes and two V scales of each head; the lone row of K scales, padded.
    sealed = 2 * (2 * (64 * 16 // 2 + 2 * 64 * 2) + 2 * 128 * 2)
    assert stats["kv_bytes"] == stats["num_blocks"] * sealed + stats["kv_open_bytes"]


@pytest.mark.parametrize("kv_format", ["float32", "int8", "fp8_e4m3", "int4"])
def test_cache_config_block_size_comes_from_the_format(kv_format: str) -> None:
    config = cli_generate.cache_config(CONFIG, [9], 120, RunOptions(kv_format=kv_format))
    assert config.block_size == (16 if kv_format == "float32" else 64)
    assert config.num_blocks == -(-128 // config.block_size)


def test_prepare_uses_the_chat_template_when_asked() -> None:
    plain, chatty = FakeLoaded(), FakeLoaded(tokenizer=LetterTokenizer("template"))
    encode = LetterTokenizer().encode

    def prompt(loaded: FakeLoaded, chat: bool) -> list[int]:
        return cli_generate.prepare(loaded, ["hi"], RunOptions(chat=chat)).prompts[0]

    assert prompt(plain, False) == encode("hi")
    assert prompt(chatty, True) == encode("user. hi! ")
    assert prompt(chatty, False) == encode("hi")


def test_prepare_default_length_stays_within_the_model() -> None:
    request = cli_generate.prepare(FakeLoaded(), ["a" * 100], RunOptions())
    assert request.max_new_tokens == 28
    assert request.generator.prefill_chunk == 64
    assert cli_generate.prepare(FakeLoaded(), ["a"], RunOptions()).max_new_tokens == 127


@pytest.mark.parametrize(
    ("lens", "new", "samples", "blocks"),
    [
        ([4], 1, 1, 1),
        ([4], 2, 1, 2),
        ([5], 4, 1, 2),
        ([8], 1, 3, 2),
        ([8], 2, 3, 5),
        ([9], 4, 3, 5),
    ],
)
def test_cache_config_takes_just_enough_blocks(
    lens: list[int], new: int, samples: int, blocks: int
) -> None:
    options = RunOptions(block_size=4, num_samples=samples)
    config = cli_generate.cache_config(CONFIG, lens, new, options)
    assert config.num_blocks == blocks
    assert config.max_seqs == samples * len(lens)


def test_read_prompts_files_are_whole_unless_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("one\ntwo\n\n")
    assert cli_generate.read_prompts(["zero"], [path], lines=False) == ["zero", "one\ntwo\n"]
    assert cli_generate.read_prompts(["zero"], [path], lines=True) == ["zero", "one", "two"]


# Bad input ----------------------------------------------------------------------------------------

BAD_GENERATE = [
    (["--max-new-tokens", "0"], "max_new_tokens: expected at least 1, got 0"),
    (["--max-new-tokens", "500"], "within the model's 128 positions, got 4 + 500"),
    (["--max-new-tokens", "many"], "'many'"),
    (["--temperature", "-1"], "temperature: expected a "),
    (["--temperature", "nan"], "got nan"),
    (["--top-k", "-1"], "top_k: expected an integer "),
    (["--top-p", "0"], "top_p: expected a number in "),
    (["--min-p", "2"], "min_p: expected a number in "),
    (["--seed", "-3"], "seed: expected an integer in "),
    (["--num-samples", "0"], "num_samples: expected an integer >= 1, got 0"),
    (["--kv-format", "int9"], "'int9'"),
    (["--block-size", "0"], "block_size: expected an integer >= 1, got 0"),
    (["--num-blocks", "0"], "num_blocks: expected an integer in [1, 2**31 - 1), got 0"),
    (["--num-blocks", "2000000000"], "num_blocks: expected a pool within"),
    (["--num-blocks", "1", "--block-size", "2"], "need 2 blocks of 2 tokens, free 1"),
    (["--prefill-chunk", "0"], "prefill_chunk: expected at least 1, got 0"),
    (["--steps-per-dispatch", "0"], "steps_per_dispatch: expected at least 1, got 0"),
    (["--beams", "0"], "beams: expected at least 1, got 0"),
    (["--length-penalty", "2"], "length_penalty: expected none without beams, got 2.0"),
    (["--early-stopping", "yes"], "early_stopping: expected none without beams, got True"),
    (["--beams", "2", "--early-stopping", "soon"], "'soon'"),
    (["--beams", "2", "--temperature", "0.7"], "temperature: expected no sampling option with"),
    (["--beams", "2", "--seed", "3"], "seed: expected no sampling option with beams"),
    (["--beams", "2", "--num-samples", "3"], "num_samples: expected at most the 2 of beams, got 3"),
    (["--kv-format", "int8", "--num-wide-layers", "1"], "less than half of 2 layers, got 1"),
    (["--value-group", "8"], "value_group: expected only with a quantised format, got 'float32'"),
    (["--chat"], "chat_template"),
    (["--file", "/nowhere/at/all"], "/nowhere/at/all"),
    ([""], "prompt 2: expected text, got an empty prompt"),
    (["--no-such-option"], "--no-such-option"),
]


@pytest.mark.parametrize(
    ("args", "message"), BAD_GENERATE, ids=[" ".join(a) for a, _ in BAD_GENERATE]
)
def test_generate_bad_input_is_one_line_and_exit_2(
    loaded: FakeLoaded, args: list[str], message: str
) -> None:
    if "--chat" in args:
        _refuse_chat(loaded)
    check_refused(run("generate", "once", *args), message)


def _refuse_chat(loaded: FakeLoaded) -> None:
    def refuse(messages: Sequence[dict[str, Any]]) -> str:
        raise ValueError("chat_template: expected one in the tokenizer's files, got none")

    assert loaded.tokenizer is not None
    loaded.tokenizer.apply_chat_template = refuse  # type: ignore[method-assign]


def check_refused(result: Any, message: str) -> None:
    """One line on standard error that holds `message`, nothing on standard output, exit code 2."""
    assert result.exit_code == cli.BAD_INPUT
    assert result.stdout == ""
    assert result.stderr.startswith("jaxkv: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_generate_without_any_prompt_is_refused(loaded: FakeLoaded) -> None:
    check_refused(run("generate", "--lines", stdin="\n  \n"), "prompt: expected at least one line")
    check_refused(run("generate", stdin=""), "prompt 1: expected text, got an empty prompt")


def test_generate_prompt_that_is_no_utf8_is_refused(loaded: FakeLoaded, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    check_refused(run("generate", "--file", str(tmp_path / "latin")), "expected UTF-8 text")
    check_refused(run("generate", "caf\udce9"), "prompt 1: expected UTF-8 text, got 'caf\\udce9'")


def test_generate_model_without_a_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda *_: FakeLoaded(tokenizer=None))
    check_refused(run("generate", "once"), "model: expected a tokenizer.json")


@pytest.mark.parametrize("model", ["./nowhere", "no-such-owner/no-such-model"])
def test_generate_unknown_model_is_refused(model: str) -> None:
    check_refused(run("generate", "once", "--model", model), model)


def test_capacity_error_carries_need_and_free(loaded: FakeLoaded) -> None:
    options = RunOptions(block_size=2, num_blocks=1, max_new_tokens=3)
    with pytest.raises(CapacityError) as caught:
        cli_generate.prepare(loaded, ["once"], options).stream()
    assert (caught.value.need, caught.value.free) == (2, 1)


def test_debug_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXKV_DEBUG", "1")
    assert isinstance(run("plan", "./nowhere").exception, ValueError)


# plan ---------------------------------------------------------------------------------------------


@pytest.fixture
def config_json(tmp_path: Path) -> str:
    """The config of Qwen2.5-0.5B, the documents' example."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B))
    return str(tmp_path / "config.json")


def test_plan_json_gives_the_documents_numbers(config_json: str) -> None:
    result = run("plan", config_json, "--context", "2048", "--memory", "24GiB", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["bytes_per_token_per_layer"] == 512
    assert answer["bytes_per_token"] == 12288
    assert answer["sequence_bytes"] == 24 * 2**20
    assert answer["weights_bytes"] == 2 * 494_032_768
    capacity = answer["capacity"]
    assert capacity["free_bytes"] == 24 * 2**30
    assert capacity["concurrency"] == capacity["num_blocks"] // 128
    assert capacity["pool_bytes"] + capacity["bookkeeping_bytes"] <= capacity["budget_bytes"]


def test_plan_folder_and_numbers_agree(config_json: str) -> None:
    folder = str(Path(config_json).parent)
    numbers = ["--layers", "24", "--q-heads", "14", "--kv-heads", "2", "--head-dim", "64"]
    by_config = json.loads(run("plan", folder, "--kv-format", "float32", "--json").stdout)
    by_numbers = json.loads(run("plan", *numbers, "--kv-format", "float32", "--json").stdout)
    for name in ("bytes_per_token", "sequence_bytes", "context_len", "kv_format"):
        assert by_config[name] == by_numbers[name]
    assert by_config["bytes_per_token"] == 24576
    assert by_numbers["weights_bytes"] is by_numbers["capacity"] is None


@pytest.mark.parametrize(
    ("kv_format", "size", "per_token"),
    [("int8", 64, 272), ("fp8_e4m3", 64, 272), ("int4", 64, 144), ("float16", 16, 512)],
)
def test_plan_accounts_every_format(
    config_json: str, kv_format: str, size: int, per_token: int
) -> None:
    """Codes, scales and open blocks by hand: 2 kv heads of 64 in 24 layers."""
    args = ["plan", config_json, "--context", "2048", "--memory", "8GiB", "--kv-format", kv_format]
    answer = json.loads(run(*args, "--json").stdout)
    open_block = 0 if kv_format == "float16" else 24 * size * 512
    assert answer["bytes_per_token_per_layer"] == per_token
    assert answer["sequence_bytes"] == 2048 * 24 * per_token
    assert (answer["block_size"], answer["open_block_bytes"]) == (size, open_block)
    pool = answer["capacity"]
    assert pool["block_bytes"] == size * 24 * per_token
    assert pool["open_bytes"] == pool["concurrency"] * open_block
    assert answer["series"]["kv_bytes"][0] == 1024 * 24 * per_token + open_block
    table = run(*args, "--target", "tpu")  # every format has its padding
    assert (table.exit_code, table.stderr) == (0, "")
    assert f"KV in {kv_format}" in table.stdout
    assert ("open blocks, one a sequence" in table.stdout) == bool(open_block)


def test_plan_counts_the_options_of_quantised_formats(config_json: str) -> None:
    """int4 by hand, 2 kv heads of 64: 128 bytes of codes; K's scales without centres and V's are padded to 8 each; 4 wide layers."""
    args = ["plan", config_json, "--context", "2048", "--memory", "8GiB", "--kv-format", "int4"]
    args += ["--symmetric-keys", "--value-group", "64", "--num-wide-layers", "2"]
    answer = json.loads(run(*args, "--json").stdout)
    per_token = 20 * (128 + 8 + 8) + 4 * 512
    assert answer["bytes_per_token_per_layer"] == 144
    assert answer["sequence_bytes"] == answer["capacity"]["sequence_bytes"] == 2048 * per_token
    assert answer["open_block_bytes"] == 20 * 64 * 512
    assert answer["capacity"]["block_bytes"] == 64 * per_token
    assert answer["series"]["kv_bytes"][0] == 1024 * per_token + 20 * 64 * 512
    table = run(*args).stdout
    assert all(name in table for name in ("symmetric_keys", "value_group", "num_wide_layers"))


def test_plan_table_shows_pool_and_series(config_json: str) -> None:
    result = run(
        "plan", config_json, "--memory", "24GiB", "--sequences", "8", "--tensor-parallel", "2"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("12,288 B", "24.00 GiB", "each of 2 devices", "KV of 8 sequences", "192.00 MiB"):
        assert part in result.stdout


def test_plan_plot_writes_a_picture(config_json: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    result = run(
        "plan", config_json, "--memory", "1GiB", "--weights", "0.5GiB", "--plot", str(path),
        "--kv-format", "int8",
    )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plan_plot_without_matplotlib_names_the_extra(
    config_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    check_refused(run("plan", config_json, "--plot", "x.png"), "pip install 'jaxkv[plot]'")


BAD_PLAN = [
    ([], "model: expected a config.json"),
    (["./nowhere"], "got './nowhere'"),
    (["no-such-owner/no-such-model"], "'no-such-owner/no-such-model'"),
    (["CONFIG", "--layers", "3"], "expected a config or plain numbers"),
    (["CONFIG", "--memory", "24G"], "memory: expected a size such as 24GiB"),
    (["CONFIG", "--memory", "-1GiB"], "'-1GiB'"),
    (["CONFIG", "--memory", "1MiB"], "free_bytes: expected more than weights"),
    (["CONFIG", "--context", "0"], "context_len: expected an integer >= 1, got 0"),
    (["CONFIG", "--context", "long"], "got 'long'"),
    (["CONFIG", "--kv-format", "int9"], "'int9'"),
    (["CONFIG", "--weights-format", "int8"], "'int8'"),
    (["CONFIG", "--kv-format", "int4", "--block-size", "7"], "block_size: expected an even number"),
    (
        ["CONFIG", "--kv-format", "int8", "--value-group", "48"],
        "value_group: expected a divisor of head_dim 64, got 48",
    ),
    (
        ["CONFIG", "--kv-format", "int8", "--num-wide-layers", "12"],
        "num_wide_layers: expected less than half of 24 layers, got 12",
    ),
    (
        ["CONFIG", "--kv-format", "fp8_e4m3", "--asymmetric-keys"],
        "symmetric_keys: expected True for fp8_e4m3, got False",
    ),
    (["CONFIG", "--symmetric-keys"], "symmetric_keys: expected only with a quantised format"),
    (
        [
            "--layers",
            "2",
            "--q-heads",
            "4",
            "--kv-heads",
            "4",
            "--head-dim",
            "8",
            "--kv-lora-rank",
            "16",
            "--rope-head-dim",
            "8",
            "--kv-format",
            "int8",
        ],
        "for MLA (kv_lora_rank 16), got 'int8'",
    ),
    (["CONFIG", "--block-size", "0"], "block_size: expected an integer >= 1, got 0"),
    (["CONFIG", "--sequences", "0"], "num_sequences: expected an integer >= 1, got 0"),
    (["CONFIG", "--tensor-parallel", "2"], "tensor_parallel: expected --memory"),
    (
        ["CONFIG", "--tensor-parallel", "3", "--memory", "24GiB"],
        "tensor_parallel: expected a divisor",
    ),
    (["CONFIG", "--target", "gpu", "--memory", "24GiB"], "target: expected one of"),
    (["CONFIG", "--reserve", "1", "--memory", "24GiB"], "reserve_fraction: expected"),
    (["CONFIG", "--plot", "x.unknown"], "unknown"),
    (
        ["--layers", "2", "--q-heads", "7", "--kv-heads", "2", "--head-dim", "8"],
        "num_kv_heads: expected",
    ),
    (["--layers", "2"], "num_q_heads, num_kv_heads, head_dim missing"),
]


@pytest.mark.parametrize(
    ("args", "message"), BAD_PLAN, ids=[" ".join(a) or "-" for a, _ in BAD_PLAN]
)
def test_plan_bad_input_is_one_line_and_exit_2(
    config_json: str, args: list[str], message: str
) -> None:
    check_refused(run("plan", *(config_json if arg == "CONFIG" else arg for arg in args)), message)


# profile, sizes, the program ------------------------------------------------------------------------


def test_profile_shows_the_fullest_moment_and_the_end(loaded: FakeLoaded) -> None:
    result = run(
        "profile", "once upon a", "-n", "12", "--block-size", "4", "--num-blocks", "20", "--json"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    fullest, after = answer["fullest"], answer["after"]
    assert fullest["kv_total_bytes"] == 20 * 2 * 2 * 4 * 16 * 4
    assert fullest["used_blocks"] == 2 + 4 * 3  # 19 tokens held at the second look, 2 blocks shared
    assert fullest["shared_saved_bytes"] == fullest["kv_total_bytes"] // 20 * 2 * 3
    assert (after["used_blocks"], after["fragmentation"]) == (0, 0.0)
    assert after["peak_blocks"] == 2 + 4 * 4
    assert after["weights_bytes"] == sum(
        getattr(loaded.model, name).nbytes
        for name in ("embed", "position", "wq", "wk", "wv", "wo", "up", "down", "head")
    )


@pytest.mark.parametrize("kv_format", ["float32", "int8"])
def test_profile_table_shows_open_blocks_where_there_are_some(kv_format: str) -> None:
    config = CacheConfig(2, 2, 8, 8, 6, 3, 2, format=kv_format)
    profile = memory_profile(init_cache(config))
    console = Console(record=True, file=io.StringIO(), width=80)
    console.print(cli_report.profile_table(profile, "now"))
    shown = [line for line in console.export_text().splitlines() if "of it open blocks" in line]
    open_bytes = 2 * 3 * 2 * 8 * 16 * 2  # layers, slots, heads, tokens, K and V, bfloat16
    assert profile.kv_open_bytes == (0 if kv_format == "float32" else open_bytes)
    assert len(shown) == bool(profile.kv_open_bytes)
    assert all(cli_terminal.format_bytes(open_bytes) in line for line in shown)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("123", 123),
        ("7B", 7),
        ("24GiB", 24 * 2**30),
        ("24 gb", 24 * 10**9),
        ("1.5KiB", 1536),
    ],
)
def test_parse_bytes_reads_units(text: str, count: int) -> None:
    assert cli_terminal.parse_bytes("memory", text) == count


@pytest.mark.parametrize("text", ["", "GiB", "24G", "-3", "1e9", "3 XiB", "1,5GiB"])
def test_parse_bytes_refuses_everything_else(text: str) -> None:
    with pytest.raises(ValueError, match="memory: expected a size such as"):
        cli_terminal.parse_bytes("memory", text)


def test_format_bytes_picks_the_unit() -> None:
    assert [cli_terminal.format_bytes(n) for n in (0, 1023, 1024, 100 * 24 * 2**20)] == [
        "0 B", "1,023 B", "1.00 KiB", "2.34 GiB",
    ]  # fmt: skip


def test_version_and_help_do_not_import_jax() -> None:
    code = "import sys; from jaxkv.cli import app; app(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'models')))"
    for args in (["--version"], ["--help"], ["generate", "--help"], ["plan", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), args
    assert "--tensor-parallel" in done.stdout


def test_program_without_arguments_shows_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "generate" in result.stdout


def _save_random_model(folder: Path) -> None:
    """Writes a random Qwen3 of three layers with a byte-level tokenizer, as a model folder."""
    import jax
    import tokenizers

    from models.qwen import QwenConfig, hf_weights, random_model

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [], tokenizers.trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    config = QwenConfig.from_hf(
        {
            "model_type": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 256, "tie_word_embeddings": True, "eos_token_id": 0,
        }
    )  # fmt: skip
    hf_weights.save(folder, random_model(config, jax.random.key(0)))
    backend.save(str(folder / "tokenizer.json"))


def test_program_on_a_model_folder_is_quiet_and_pipes(tmp_path: Path) -> None:
    _save_random_model(tmp_path)
    program = [sys.executable, "-c", "from jaxkv.cli import main; main()"]
    args = [
        "generate",
        "--model",
        str(tmp_path),
        "-n",
        "6",
        "--json",
        "--weights-format",
        "bfloat16",
        "--devices",
        "2",
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "JAXKV_DEBUG")}
    done = subprocess.run(
        [*program, *args], input="Hello\n", capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["completions"][0]["prompt"] == "Hello"
    assert 1 <= answer["stats"]["new_tokens"] <= 6
    assert answer["stats"]["prompt_tokens"] == 5
    assert answer["stats"]["devices"] == 2


def test_generate_on_devices_writes_the_same_and_says_so() -> None:
    """The model that ships, two K/V heads; tests run with four devices."""
    args = ["generate", "Once upon a time", "-n", "8", "--json"]
    one, four = (json.loads(run(*args, *more).stdout) for more in ([], ["--devices", "4"]))
    assert four["completions"] == one["completions"]
    assert (one["stats"]["devices"], four["stats"]["devices"]) == (1, 4)
    result = run("generate", "Once upon a time", "-n", "8", "--stats", "--devices", "2")
    assert result.stdout.strip() == one["completions"][0]["text"].strip()
    assert "2: K/V heads in 2, rows in 1" in result.stderr


@pytest.mark.parametrize(
    ("count", "message"),
    [
        ("0", "devices: expected at least 1, got 0"),
        ("3", "num_kv_heads * head_dim: expected a multiple of 3 for this mesh, got 128"),
        ("8", "devices: expected at least 2 * 4, got 4"),  # started already, with four
    ],
)
def test_devices_that_do_not_fit_are_refused(count: str, message: str) -> None:
    check_refused(run("generate", "once", "--devices", count), message)


def test_pool_that_several_devices_hold_counts_as_often() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    config = CacheConfig(
        num_layers=1, num_kv_heads=1, head_dim=64, block_size=16,
        num_blocks=memory * 3 // 4 // (16 * 2 * 64 * 4), max_seqs=1, max_blocks_per_seq=1,
    )  # fmt: skip
    cli_generate.check_memory(config)
    with pytest.raises(ValueError, match="num_blocks: expected a pool within"):
        cli_generate.check_memory(config, copies=2)
