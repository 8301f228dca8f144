"""`tca-jax demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tca_jax.cli.files import print_json, require_writable
from tca_jax.cli.options import JsonOption, SeedOption
from tca_jax.cli.progress import progress


def demo(
    tokens: Annotated[int, typer.Option(help="Length of the document with its question.")] = 8192,
    questions: Annotated[int, typer.Option(help="Questions asked about the document.")] = 4,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Answer questions over a long document with full attention and with TCA, side by side.

    Uses the model and the profile that ship with the package.

    Example: [bold]tca-jax demo --tokens 4096 --seed 7[/]
    """
    from tca_jax.demo import demo_table, run_demo

    require_writable(out, "--out")
    with progress() as report:
        result = run_demo(tokens, questions, seed, out, report)
    if as_json:
        print_json(result.to_json())
        return
    console = Console()
    console.print(demo_table(result))
    console.print(result.summary(), highlight=False)
    console.print(f"Picture: {result.picture}", markup=False, highlight=False, soft_wrap=True)
