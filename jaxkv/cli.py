"""The command line: `jaxkv generate`, `serve`, `bench`, `plan`, `profile` and `inspect`.

The composition root: the only file of the package that imports `models`.

Invariants: heavy modules are imported inside the commands, after `start_jax` has made them quiet, so that
`--help` is quick; bad input ends with one line on standard error and exit code 2.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from jaxkv import cli_commands, cli_serving_commands, cli_terminal

if TYPE_CHECKING:
    from jaxkv.cli_generate import Loaded

BAD_INPUT = 2


class _Program(typer.core.TyperGroup):
    """The group of commands; turns errors of the user's making into one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            result = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except Exception as error:
            if cli_terminal.debugging() or not _is_expected(error):
                raise
            given = _given_value(error, sys.argv[1:] if args is None else args)
            print(f"jaxkv: {cli_terminal.one_line(error)}{given}", file=sys.stderr)
            result = BAD_INPUT
        code = result if isinstance(result, int) else 0
        if standalone_mode:
            sys.exit(code)
        return code


def _given_value(error: Exception, args: Sequence[str]) -> str:
    """Returns ", got ..." for an option that could not be parsed: its own message leaves the value out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        name, _, value = arg.partition("=")
        if name in names:
            return f", got {value or following!r}"
    return ""


def _is_expected(error: Exception) -> bool:
    """Whether an error says what is wrong with the input (usage, values, files, capacity)."""
    status = sys.modules.get("jaxkv.status")  # what can raise its errors has imported it
    capacity = (status.CapacityError,) if status else ()
    known = (ValueError, NotImplementedError, ImportError, OSError, FloatingPointError, *capacity)
    return isinstance(error, known) or hasattr(error, "format_message")


app = typer.Typer(cls=_Program, add_completion=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A paged KV cache for JAX: generate text with it, plan its memory, look at its memory."""
    context.obj = _load
    if version:
        print(f"jaxkv {importlib.metadata.version('jaxkv')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


for _command in (
    cli_commands.generate,
    cli_serving_commands.serve,
    cli_serving_commands.bench,
    cli_commands.profile,
    cli_commands.inspect,
    cli_commands.plan,
):
    app.command()(_command)


def _load(model: str | None, weights_format: str, num_devices: int = 1) -> Loaded:
    """Loads a model, divided over so many devices; the one that ships where none is named.

    Raises:
      FileNotFoundError, ValueError, NotImplementedError, ImportError: see `models.qwen.load` and `models.qwen.shard`.
    """
    from jaxkv.mesh import make_mesh, mesh_shape
    from pallas_kernels.layout import kv_format

    dtype = kv_format(weights_format).dtype
    here = model is None or Path(model).exists()
    with cli_terminal.spinner("loading the model", show=here):  # a download shows its own progress
        import jax

        import models.qwen
        import models.tiny

        loaded = models.qwen.load(models.tiny.path() if model is None else model, dtype=dtype)
        if jax.default_backend() == "cpu":
            loaded = dataclasses.replace(loaded, model=loaded.model.spread())
        if num_devices > 1:
            mesh = make_mesh(*mesh_shape(loaded.config.num_kv_heads, num_devices))
            loaded = dataclasses.replace(loaded, model=models.qwen.shard(loaded.model, mesh))
        return loaded


def main() -> None:
    """Entry point of the console script `jaxkv`."""
    if not cli_terminal.debugging():
        warnings.simplefilter("ignore")
    app(prog_name="jaxkv")
