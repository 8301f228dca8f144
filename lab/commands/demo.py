"""`tca-jax demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tca_jax.cli.errors import naming_options
from tca_jax.cli.files import require_writable
from tca_jax.cli.options import SeedOption
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
) -> None:
    """Ask questions about a long document under full attention, predicted worth, and a window of its bytes.

    The document is read once, without the questions. [bold]make models[/] fetches SmolLM2-135M-Instruct; without it,
    recall-tiny answers, which ships with the package.

    Example: [bold]tca-jax demo --tokens 4096 --seed 7[/]
    """
    from tca_jax.lab import demo as lab

    require_writable(out, "--out")
    with naming_options("model"):
        chosen = lab.choose_model(model)
    questions = lab.DEFAULT_QUESTIONS[chosen] if questions is None else questions
    with naming_options("tokens", "questions"):
        checkpoint = lab.open_model(chosen, tokens, questions)
    print(lab.model_line(chosen), flush=True)
    with progress(log=True) as report:
        result = lab.run_demo(checkpoint, tokens, questions, seed, out, report)
    console = Console()
    console.print(lab.result_table(result))
    for question, worth, window in result.lost()[:1]:
        print(f"Lost by the window: {question}\n  worth: {worth}\n  window: {window}\n")
    console.print(result.summary(), highlight=False)
    console.print(f"Picture: {result.picture}", markup=False, highlight=False, soft_wrap=True)
