"""`tca-jax demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import print_json, require_writable
from tca_jax.cli.options import JsonOption, SeedOption
from tca_jax.progress import progress


def demo(
    model: Annotated[
        str | None, typer.Option(help="smollm2 or recall-tiny.", show_default="smollm2 where it is fetched")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of the document.")] = 4096,
    questions: Annotated[
        int | None,
        typer.Option(help="Questions asked about the document.", show_default="6 of smollm2, 3 of recall-tiny"),
    ] = None,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("out"),
    as_json: JsonOption = False,
) -> None:
    """Ask questions about a long document with full attention, with TCA, and with a window of the same bytes.

    The document is read once, without the questions. [bold]make models[/] fetches SmolLM2-135M-Instruct; without it,
    recall-tiny answers, which ships with the package.

    Example: [bold]tca-jax demo --tokens 4096 --seed 7[/]
    """
    from tca_jax.lab.demo import SMOLLM2, choose_model, model_line, open_model, printable, result_table, run_demo

    require_writable(out, "--out")
    with naming_options("model"):
        chosen = choose_model(model)
    if questions is None:
        questions = 6 if chosen == SMOLLM2 else 3
    with naming_options("tokens", "questions"):
        open_model(chosen, tokens, questions)
    if not as_json:
        print(model_line(chosen), flush=True)
    with progress(log=True) as report:
        result = run_demo(tokens, questions, seed, out, report, chosen)
    if as_json:
        print_json(result.to_json())
        return
    console = Console()
    console.print(result_table(result))
    for tca, window in result.lost()[:1]:
        print(f"Lost by the window: {printable(tca.question)}")
        print(f"  tca: {printable(tca.text)}\n  window: {printable(window.text)}\n")
    console.print(result.summary(), highlight=False)
    console.print(f"Picture: {result.picture}", markup=False, highlight=False, soft_wrap=True)
