"""`jaxkv inspect`: what a picture shows, where it goes, and how bad input is refused."""

from __future__ import annotations

import builtins
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from test_cli import FakeLoaded, check_refused, run

from jaxkv import cli, picture
from jaxkv.snapshot import PoolSnapshot

# Two sequences share block 4; block 0 is cached, 3 and 5 are free; block 2 holds 1 token of 4.
SMALL = PoolSnapshot(
    block_size=4,
    ref_counts=np.array([0, 1, 1, 0, 2, 0], np.int32),
    cached=np.array([True, False, False, False, False, False]),
    tables={0: (4, 1), 1: (4, 2)},
    kv_lens={0: 8, 1: 5},
    title="now",
)


@pytest.fixture(scope="module")
def loaded() -> FakeLoaded:
    return FakeLoaded()


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, loaded: FakeLoaded) -> None:
    """Puts the fake model in the loader's place."""
    monkeypatch.setattr(cli, "_load", lambda *_: loaded)


def shown(snapshot: PoolSnapshot, width: int) -> list[str]:
    """Returns the lines of the terminal picture without colours."""
    console = Console(record=True, file=io.StringIO(), width=width)
    console.print(picture.terminal_picture(snapshot, width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_snapshot_counts_every_block_once() -> None:
    assert (SMALL.num_live, SMALL.num_shared, SMALL.num_cached, SMALL.num_free) == (3, 1, 1, 2)
    assert SMALL.owners.tolist() == [-1, 0, 1, -1, 0, -1]
    assert SMALL.num_tokens.tolist() == [4, 4, 1, 0, 4, 0]
    assert SMALL.fragmentation == 0.25
    answer = json.loads(json.dumps(SMALL.to_dict()))
    assert [b["state"] for b in answer["blocks"]] == [
        "cached",
        "live",
        "live",
        "free",
        "live",
        "free",
    ]
    assert answer["blocks"][4] == {"state": "live", "ref_count": 2, "num_tokens": 4, "slot": 0}
    assert answer["sequences"] == [
        {"slot": 0, "num_tokens": 8, "blocks": [4, 1]}, {"slot": 1, "num_tokens": 5, "blocks": [4, 2]},
    ]  # fmt: skip


def test_terminal_picture_fits_the_width_and_tells_blocks_apart_without_colours() -> None:
    lines = shown(SMALL, 8)
    assert lines[:3] == ["now", "c A B ·", "2 ·"]
    text = " ".join(" ".join(shown(SMALL, 80)).split())
    assert "6 blocks of 4 tokens: 3 live (1 shared), 1 cached, 2 free; fragmentation 25.0 %" in text
    assert "B 5 tokens, 2 blocks (1 shared)" in text


def test_files_show_every_block_in_its_colour(tmp_path: Path) -> None:
    """The picture of one moment, and an animation in which a block changes from A's to shared."""
    picture.save_png(SMALL, tmp_path / "one.png")
    with Image.open(tmp_path / "one.png") as image:
        counts = {tuple(rgb) for _, rgb in image.convert("RGB").getcolors(1 << 20)}
    wanted = {picture.colour_of(0), picture.colour_of(1), "#333333", "#bbbbbb", "#f4f4f4"}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in wanted} <= counts
    before = PoolSnapshot(
        4, np.minimum(SMALL.ref_counts, 1), SMALL.cached, {0: (4, 1)}, {0: 8}, "before"
    )
    picture.save_gif([before, SMALL, before], tmp_path / "run.gif")
    with Image.open(tmp_path / "run.gif") as image:
        assert image.n_frames == 3
        frames = []
        for at in range(3):
            image.seek(at)
            frames.append(np.asarray(image.convert("RGB")))
    assert np.any(frames[0] != frames[1])
    np.testing.assert_array_equal(frames[0], frames[2])


@pytest.fixture
def _fast() -> Iterator[None]:
    """Most of the time of a run is LLVM optimising programs that run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_fast")
def test_inspect_run_shares_caches_and_evicts(tmp_path: Path, loaded: FakeLoaded) -> None:
    """Real requests through the fake model; the last two find what the first left behind."""
    prompts = ["once upon a time", "once upon a day", "red green blue now", "once upon a tree"]
    args = ["inspect", *prompts, "-n", "6", "--block-size", "4", "--num-slots", "2"]
    gif = tmp_path / "run.gif"
    result = run(*args, "--json", "--animate", str(gif), "--num-blocks", "14")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["busiest"]["num_shared"] >= 2
    assert [len(s["blocks"]) >= 4 for s in answer["busiest"]["sequences"]] == [True, True]
    after = answer["after"]
    assert (after["num_live"], after["sequences"]) == (0, [])
    assert 0 < after["num_cached"] == 14 - after["num_free"]
    with Image.open(gif) as image:
        assert image.n_frames > 10


BAD: list[tuple[list[str], str]] = [
    (["--png", "nowhere/x.png"], "png: expected a folder that exists, got nowhere"),
    (["--png", "x.jpg"], "png: expected a file that ends in .png, got x.jpg"),
    (["--animate", "x.png"], "animate: expected a file that ends in .gif, got x.png"),
    (["--num-blocks", "5000"], "num_blocks: expected at most 4,096 for a picture in the terminal"),
    (["--num-blocks", "20000", "--png", "x.png"], "num_blocks: expected at most 16,384"),
    (["--num-blocks", "1"], "num_blocks: expected at least 8, which 2 requests of up to"),
    (["-n", "0"], "max_new_tokens: expected"),
    (["-n", "500"], "max_new_tokens: expected prompt and new tokens within the model's 128"),
    (["--num-slots", "0"], "num_slots: expected"),
    (["--kv-format", "int3"], "int3"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_inspect_bad_input_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(run("inspect", "once", "upon", "--block-size", "8", *args), message)
    assert not list(tmp_path.iterdir())


def test_inspect_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    check_refused(
        run("inspect", "once", "--png", str(tmp_path / "x.png")), "pip install 'jaxkv[plot]'"
    )
