"""`tca-jax plot` of results: where the time goes, answers against bytes, loss against attended share, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tca_jax.cli.errors import naming_options
from tca_jax.cli.options import LARGEST, PictureOption
from tca_jax.cli.plots import written

TokensOption = Annotated[
    int | None, typer.Option(help="Prompt length.", show_default="the longest", min=1, max=LARGEST)
]


def latency(
    results: Annotated[list[Path], typer.Argument(help="JSON files of results.", show_default=False)],
    tokens: TokensOption = None,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens decoded behind a benchmark's prompt.", min=1, max=LARGEST)
    ] = 256,
    out: PictureOption = Path("out/latency.png"),
) -> None:
    """Draw where the time goes, from what bench or generate wrote.

    Takes results of [bold]bench attention[/] (one layer), of [bold]bench end-to-end[/] (whole models), of both (whole
    models in parts), and what [bold]generate --json[/] printed.

    Example: [bold]tca-jax plot latency attention.json end-to-end.json[/]
    """
    from tca_jax.lab.plots import plot_latency
    from tca_jax.lab.plots.results import latency_bars
    from tca_jax.models.json_object import read_json_object

    records = {str(path): read_json_object(path) for path in results}
    bars = latency_bars(records, tokens=tokens, new_tokens=new_tokens)
    devices = {record["environment"]["device"] for record in records.values() if "environment" in record}
    written(plot_latency(bars, ", ".join(["Where the time goes", *sorted(devices)]), out))


def accuracy(
    results: Annotated[Path, typer.Argument(help="JSON file or folder of results.", show_default=False)],
    out: PictureOption = Path("out/accuracy.png"),
) -> None:
    """Draw right answers against the bytes of the KV cache, a panel a protocol.

    Example: [bold]tca-jax plot accuracy evaluation.json[/]
    """
    from tca_jax.lab.plots import plot_accuracy
    from tca_jax.lab.plots.results import accuracy_panels

    written(plot_accuracy(accuracy_panels(results), "Right answers by the KV cache that is held", out))


def reading(
    results: Annotated[Path, typer.Argument(help="JSON of examples/evaluate_zoo.py.", show_default=False)],
    out: PictureOption = Path("out/reading.png"),
) -> None:
    """Draw loss inside the text against the attended share: a panel a model, a curve a method.

    Example: [bold]tca-jax plot reading curves.json[/]
    """
    from tca_jax.lab.plots import plot_reading
    from tca_jax.lab.plots.results import model_points

    written(plot_reading(model_points(results), out))


def keeping(
    results: Annotated[Path, typer.Argument(help="JSON of examples/evaluate_zoo.py.", show_default=False)],
    protocol: Annotated[str, typer.Option(help="late, preamble or prefix.")] = "late",
    out: PictureOption = Path("out/keeping.png"),
) -> None:
    """Draw right answers against the bytes of the KV cache: a panel a model, a curve a method.

    Example: [bold]tca-jax plot keeping curves.json[/]
    """
    from tca_jax.lab.plots import plot_keeping
    from tca_jax.lab.plots.results import model_points

    with naming_options("protocol"):
        written(plot_keeping(model_points(results), out, protocol=protocol))
