"""`tca-jax bench NAME`: the benchmarks as commands; one is imported when it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

_NAMES = (
    "attention",
    "decode",
    "end-to-end",
    "calibration",
    "context",
    "serve",
    "tune",
    "soak",
    "serve-soak",
    "many-shapes",
)  # of modules too, with underscores
_JSON = "--json"

#: What JAX takes of a GPU's memory, and its old name. A million tokens need more than the default of 75%; some must be
#: left for the processes that time compilation.
_MEMORY_FRACTION = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}


class _Recorded(TyperCommand):
    """A command whose options are written into its results, but for those that say where these go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from tca_jax.lab.benchmarks.common import COMMAND

        COMMAND.set(shlex.join(["tca-jax", "bench", str(ctx.info_name), *_without_destination(args)]))
        return super().parse_args(ctx, args)


def _with_json(main: Callable[..., None]) -> Callable[..., None]:
    """The benchmark with one more option, which it need not know of: what it prints goes to standard error then."""

    def command(*, as_json: bool, **options: Any) -> None:
        from tca_jax.lab.benchmarks.common import RECORDS, free_name

        records: list[dict[str, Any]] | None = [] if as_json else None
        RECORDS.set(records)
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            main(**{**options, "name": free_name(options["out"], options["name"])})
        for record in records or ():
            print(json.dumps(record, indent=2))

    text = "Print one JSON object, rows and environment, and all else on standard error."
    option = inspect.Parameter(
        "as_json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option(_JSON, help=text)],
    )
    parameters = [*inspect.signature(main, eval_str=True).parameters.values(), option]
    command.__doc__ = main.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


class _Benchmarks(TyperGroup):
    """The commands by their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _NAMES:
            return None
        if not _MEMORY_FRACTION & os.environ.keys():  # read when JAX first looks for a device, which is later than this
            os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
        program = typer.Typer(add_completion=False, rich_markup_mode="rich")
        module = importlib.import_module(f"tca_jax.lab.benchmarks.{cmd_name.replace('-', '_')}")
        program.command(cmd_name, cls=_Recorded)(_with_json(module.main))
        return typer.main.get_command(program)


def _without_destination(args: list[str]) -> list[str]:
    """The arguments without `--out FOLDER`, `--out=FOLDER` and `--json`."""
    kept, skipped = [], False
    for arg in args:
        if not skipped and arg not in ("--out", _JSON) and not arg.startswith("--out="):
            kept.append(arg)
        skipped = not skipped and arg == "--out"
    return kept


app = typer.Typer(
    cls=_Benchmarks,
    rich_markup_mode="rich",
    help="""Time the library against full attention, on this machine.

    Each benchmark writes JSON, a Markdown table and a plot into --out; earlier results there keep their names.

    Example: [bold]tca-jax bench attention --lengths 32768[/]
    """,
)
