"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[str, typer.Argument(help="Alias, Hugging Face Hub id or local folder.", show_default=False)]
ProfileOption = Annotated[
    str | None,
    typer.Option(help='Profile folder, or "shipped" for a shipped model.', show_default="full attention"),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on a CPU, else bfloat16"),
]
SeedOption = Annotated[int, typer.Option(help="Other seeds, other draws.", min=0, max=2**32 - 1)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
