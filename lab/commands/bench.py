"""`tca-jax bench NAME`: the benchmarks; a module is imported when its command runs."""

from __future__ import annotations

import importlib
import os
from typing import Any

import typer
from typer.core import TyperGroup

NAMES = ("attention", "decode", "end-to-end", "serve")  # modules have underscores

#: Share of a GPU's memory that JAX takes: a million tokens need more than the default of 75%.
_MEMORY_FRACTIONS = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}


class _Benchmarks(TyperGroup):
    """The commands by their names."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in NAMES:
            return None
        if not _MEMORY_FRACTIONS & os.environ.keys():  # JAX reads it at its first look for a device
            os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.9"
        program = typer.Typer(add_completion=False, rich_markup_mode="rich")
        program.command(cmd_name)(importlib.import_module(f"tca_jax.lab.benchmarks.{cmd_name.replace('-', '_')}").main)
        return typer.main.get_command(program)


app = typer.Typer(
    cls=_Benchmarks,
    rich_markup_mode="rich",
    help="""Time the library on this machine, against full attention.

    Each benchmark writes its rows as JSON lines and a Markdown table into --out.

    Example: [bold]tca-jax bench attention --lengths 32768[/]
    """,
)
