"""Pictures of a pool: cells in the terminal, a PNG, a GIF over several moments.

Every block is one cell: its sequence's colour, its ref count where it is shared, grey where it is cached, empty where
it is free; in files a cell is filled as high as its block.

Invariants: a picture needs a `PoolSnapshot` and nothing else; matplotlib is imported only where a file is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.text import Text

from jaxkv.snapshot import PoolSnapshot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_TERMINAL_BLOCKS = 4_096
MAX_FILE_BLOCKS = 16_384
MAX_FRAMES = 600
_MAX_LABELLED = 600  # more ref counts than this nobody can read
# Okabe and Ito's colours, apart for most eyes; sequences take them in turn.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_SHARED, _CACHED, _FREE = "#333333", "#bbbbbb", "#f4f4f4"


def colour_of(slot: int) -> str:
    """Returns the colour of a slot's own blocks, as #rrggbb."""
    return _COLOURS[slot % len(_COLOURS)]


def letter_of(slot: int) -> str:
    """Returns the letter that stands for a slot in the terminal."""
    return chr(ord("A") + slot % 26)


def check_size(num_blocks: int, most: int, place: str) -> None:
    """Refuses a pool with more blocks than a picture can show.

    Raises:
      ValueError: says where a larger pool can be looked at.
    """
    if num_blocks > most:
        other = "--json" if most == MAX_FILE_BLOCKS else "--png or --json"
        raise ValueError(
            f"num_blocks: expected at most {most:,} for a picture in {place}, got {num_blocks:,}; use {other}"
        )


# The terminal ---------------------------------------------------------------------------------------


def terminal_picture(snapshot: PoolSnapshot, width: int) -> Group:
    """Returns the cells of a pool, its counts and its sequences, for a terminal of `width` columns.

    Raises:
      ValueError: more blocks than anybody wants to scroll through.
    """
    check_size(snapshot.num_blocks, MAX_TERMINAL_BLOCKS, "the terminal")
    columns = max(1, width // 2)
    owners = snapshot.owners
    cells = Text(no_wrap=True, overflow="crop")
    for block, refs in enumerate(snapshot.ref_counts.tolist()):
        if block and block % columns == 0:
            cells.append("\n")
        if refs > 1:
            cells.append(f"{refs if refs < 10 else '+'} ", style=f"bold white on {_SHARED}")
        elif refs == 1:
            slot = int(owners[block])
            cells.append(f"{letter_of(slot)} ", style=f"black on {colour_of(slot)}")
        elif snapshot.cached[block]:
            cells.append("c ", style=f"black on {_CACHED}")
        else:
            cells.append("· ", style="dim")
    head = Text(snapshot.title, style="bold")
    return Group(head, cells, Text(snapshot.caption()), _legend(snapshot))


def _legend(snapshot: PoolSnapshot) -> Text:
    """Returns one entry a sequence, and what the other cells mean."""
    legend = Text()
    for slot, table in snapshot.tables.items():
        shared = int(np.count_nonzero(snapshot.ref_counts[list(table)] > 1))
        legend.append(f" {letter_of(slot)} ", style=f"black on {colour_of(slot)}")
        legend.append(f" {snapshot.kv_lens[slot]} tokens, {len(table)} blocks ({shared} shared)  ")
    legend.append(" 2 ", style=f"bold white on {_SHARED}")
    legend.append(" shared, with its ref count  ")
    legend.append(" c ", style=f"black on {_CACHED}")
    legend.append(" cached  · free")
    return legend


# Files ----------------------------------------------------------------------------------------------


def check_file(name: str, path: Path, endings: Sequence[str]) -> None:
    """Refuses a path that could not be written, before the work whose result it is to hold.

    Raises:
      ValueError: matplotlib is not installed, or the file's ending is another.
      FileNotFoundError, IsADirectoryError: there is no such folder, or a folder stands there.
    """
    _figure_class()
    if path.suffix.lower() not in endings:
        raise ValueError(f"{name}: expected a file that ends in {' or '.join(endings)}, got {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{name}: expected a file, got the folder {path}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{name}: expected a folder that exists, got {path.parent}")


def save_png(snapshot: PoolSnapshot, path: Path) -> None:
    """Writes one moment as a picture.

    Raises:
      ValueError: matplotlib is not installed, or the pool has more blocks than a picture can show.
      OSError: the file cannot be written.
    """
    figure = _new_figure([snapshot])
    _draw(figure, snapshot)
    figure.savefig(path, dpi=100)


def save_gif(snapshots: Sequence[PoolSnapshot], path: Path, frames_per_s: int = 4) -> None:
    """Writes moments of one pool as an animation that repeats.

    Raises:
      ValueError: no moments, or too many; otherwise as `save_png`.
      OSError: the file cannot be written.
    """
    if not 1 <= len(snapshots) <= MAX_FRAMES:
        raise ValueError(
            f"animate: expected 1 to {MAX_FRAMES} moments, got {len(snapshots)}; generate fewer tokens"
        )
    figure = _new_figure(snapshots)
    from matplotlib.animation import PillowWriter

    writer = PillowWriter(fps=frames_per_s)
    with writer.saving(figure, str(path), dpi=80):
        for snapshot in snapshots:
            _draw(figure, snapshot)
            writer.grab_frame()


def _figure_class() -> type[Figure]:
    import logging

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plot: expected matplotlib, which is not installed; pip install 'jaxkv[plot]'"
        ) from error
    return Figure


def _new_figure(snapshots: Sequence[PoolSnapshot]) -> Figure:
    """Returns a figure whose height fits the pool."""
    num_blocks = snapshots[0].num_blocks
    check_size(num_blocks, MAX_FILE_BLOCKS, "a file")
    columns, rows = _grid(num_blocks)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _figure_class()(figsize=(8, 8 * rows / columns + 1.3))
    FigureCanvasAgg(figure)
    return figure


def _grid(num_blocks: int) -> tuple[int, int]:
    """Returns columns and rows of the cells: about three times as wide as high."""
    columns = min(num_blocks, max(8, math.ceil(math.sqrt(3 * num_blocks))))
    return columns, -(-num_blocks // columns)


def _draw(figure: Figure, snapshot: PoolSnapshot) -> None:
    """Draws one moment over whatever the figure showed."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    figure.clear()
    columns, rows = _grid(snapshot.num_blocks)
    height = figure.get_figheight()
    axes = figure.add_axes((0.01, 0.75 / height, 0.98, 1 - 1.3 / height))
    frames, fills, colours = [], [], []
    filled = snapshot.num_tokens / snapshot.block_size
    for block, colour in enumerate(_cell_colours(snapshot)):
        x, y = block % columns, rows - 1 - block // columns
        frames.append(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88))
        fills.append(Rectangle((x + 0.06, y + 0.06), 0.88, 0.88 * float(filled[block])))
        colours.append(colour)
        refs = int(snapshot.ref_counts[block])
        if refs > 1 and snapshot.num_blocks <= _MAX_LABELLED:
            axes.text(x + 0.5, y + 0.46, str(refs), color="white", ha="center", va="center")
    axes.add_collection(
        PatchCollection(frames, facecolor=_FREE, edgecolor="#999999", linewidth=0.5)
    )
    axes.add_collection(PatchCollection(fills, facecolor=colours))
    axes.set_xlim(0, columns)
    axes.set_ylim(0, rows)
    axes.axis("off")
    figure.text(0.5, 1 - 0.3 / height, snapshot.title, ha="center", fontsize=12)
    figure.text(0.5, 0.52 / height, snapshot.caption(), ha="center", fontsize=9)
    handles: list[Any] = [
        Patch(color=colour_of(slot), label=f"{letter_of(slot)}: {n} tokens")
        for slot, n in list(snapshot.kv_lens.items())[:6]
    ]
    handles += [
        Patch(color=_SHARED, label="shared"),
        Patch(color=_CACHED, label="cached"),
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=len(handles), fontsize=7, frameon=False
    )


def _cell_colours(snapshot: PoolSnapshot) -> list[str]:
    """Returns the colour of each block."""
    owners = snapshot.owners
    colours = [_CACHED if is_cached else _FREE for is_cached in snapshot.cached.tolist()]
    for block in np.flatnonzero(snapshot.ref_counts).tolist():
        shared = snapshot.ref_counts[block] > 1
        colours[block] = _SHARED if shared else colour_of(int(owners[block]))
    return colours
