"""Options that several benchmarks share; importing them loads no JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: Not lab/results, whose tables are written with `--out` alone.
RESULTS = Path("out") / "bench"


LengthsOption = Annotated[list[int] | None, typer.Option(help="Tokens of context.")]
ModelsOption = Annotated[
    list[str] | None, typer.Option(help="llama3.1-8b, qwen2.5-7b, llama3.1-70b, llama-d256 (a layer) or tiny.")
]
WindowOption = Annotated[int, typer.Option(help="Local tokens that every query keeps.")]
RepeatsOption = Annotated[int, typer.Option(help="Timed runs of each call.", min=1)]
CopyBytesOption = Annotated[int, typer.Option(help="Bytes of the array that the device copies.", min=2**20)]
NameOption = Annotated[str, typer.Option(help="Name of the result files.")]
OutOption = Annotated[Path, typer.Option(help="Folder of the results.")]
