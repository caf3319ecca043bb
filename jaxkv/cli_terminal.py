"""What the commands share with the terminal: quiet start of JAX, progress, sizes in and out.

Invariants: standard output belongs to the result; progress, statistics and errors go to standard error.
`JAXKV_DEBUG=1` holds nothing back: libraries may write to standard error, and errors keep their traceback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for binary, base in (("", 1000), ("i", 1024))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def debugging() -> bool:
    """Returns whether JAXKV_DEBUG asks for everything that is otherwise held back."""
    return os.environ.get("JAXKV_DEBUG", "") not in ("", "0")


def parse_bytes(name: str, text: str) -> int:
    """Returns the bytes that "24GiB", "24 GB" or "25769803776" say.

    Raises:
      ValueError: naming `name`, for anything else.
    """
    match = _SIZE.fullmatch(text)
    unit = next((u for u in _UNITS if match and u.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ValueError(
            f"{name}: expected a size such as 24GiB, 24GB or 25769803776, got {text!r}"
        )
    return (
        round(float(match[1]) * _UNITS[unit]) if "." in match[1] else int(match[1]) * _UNITS[unit]
    )


def format_bytes(count: int) -> str:
    """Returns a byte count in the largest binary unit that leaves at least 1, e.g. "2.34 GiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} B" if unit == "B" else f"{value:,.2f} {unit}"


def format_percent(share: float) -> str:
    """Returns a share in [0, 1] as a percentage."""
    return f"{100 * share:.1f} %"


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """Returns a table of names and right-aligned values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    return table


def one_line(error: BaseException) -> str:
    """Returns what an error says, on one line."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(message.split()) or type(error).__name__


def stderr() -> Console:
    """Returns a console on the standard error of this moment."""
    return Console(stderr=True, highlight=False)


def start_jax(num_devices: int = 1) -> str:
    """Imports JAX and brings its backend up, without the noise of plugins that find no device.

    Args:
      num_devices: so many the CPU is to count as, if it is what computes and nothing has started it yet.

    Returns:
      The platform: "cpu", "gpu" or "tpu".

    Raises:
      ValueError: no device asked for, or the backend that JAX_PLATFORMS names does not start.
    """
    if num_devices < 1:
        raise ValueError(f"devices: expected at least 1, got {num_devices}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet_stderr():
        import jax

        if not debugging():
            logging.getLogger("jax").setLevel(logging.CRITICAL)
        if num_devices > 1:
            with contextlib.suppress(RuntimeError):  # started already, with the devices it has
                jax.config.update("jax_num_cpu_devices", num_devices)
        try:
            return jax.default_backend()
        except RuntimeError as error:
            asked = os.environ.get("JAX_PLATFORMS", "")
            raise ValueError(
                f"JAX_PLATFORMS: expected platforms that start here, got {asked!r}; {one_line(error)}"
            ) from error


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Drops what is written to file descriptor 2 in the body; libraries in C++ know no other way."""
    if debugging():
        yield
        return
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # closed by whoever started us: nothing to keep quiet
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


@contextlib.contextmanager
def spinner(text: str, *, show: bool = True) -> Iterator[None]:
    """Shows a spinner on standard error while the body runs; nothing where that is no terminal."""
    console = stderr()
    if show and console.is_terminal:
        with console.status(text):
            yield
    else:
        yield
