"""`tca-jax profile`: what calibration gave each KV head, as a table, as JSON or as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tca_jax.cli.files import print_json
from tca_jax.cli.options import JsonOption

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile

_HEADS_IN_A_ROW = 8  # as many fit into 80 columns

app = typer.Typer(help="Look at calibrated profiles.")


@app.command()
def show(
    directory: Annotated[
        str,
        typer.Argument(
            help='Folder that a profile was saved to; "shipped", or a shipped model\'s name.', show_default=False
        ),
    ],
    tokens: Annotated[
        int | None,
        typer.Option(help="Prompt length of the shares.", show_default="that of calibration", min=1, max=2**31 - 1),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Heat map to write.", show_default="none")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what each layer and KV head keeps, and draw it as a heat map if asked to.

    Candidates count from 0, the sparsest, in the table as in JSON; the last one is dense and keeps every token.

    Example: [bold]tca-jax profile show my-profile --tokens 32768 --png kept.png[/]
    """
    from tca_jax.calibration.profile import Profile

    folder = _folder(directory)
    print_profile(Profile.load(folder), folder, tokens, png, as_json)


def _folder(directory: str) -> Path:
    """The folder of that name, which nothing of ours hides, or the profile beside a shipped model."""
    from tca_jax.loading import SHIPPED, shipped_profile

    name = directory.lower()
    if Path(directory).exists() or name not in ("shipped", *SHIPPED):
        return Path(directory)
    return shipped_profile() if name == "shipped" else shipped_profile(name)


def print_profile(profile: Profile, folder: Path, tokens: int | None, png: Path | None, as_json: bool) -> None:
    """Table or JSON of a profile; shares are for the longest calibration text where `tokens` is None."""
    tokens = tokens or max((source["tokens"] for source in profile.sources), default=131072)
    if png is not None:
        from tca_jax.plots import plot_kept_share

        plot_kept_share(profile.kept_share(tokens), tokens, profile.model_name, png)
    if as_json:
        print_json(_record(profile, folder, tokens, png))
        return
    shares, dense = profile.kept_share(tokens), profile.config.num_candidates
    console = Console()
    print(f"{profile.model_name}: kept share / candidate of each KV head at {tokens:,} tokens")
    print(f"Candidates: 0 is the sparsest, {dense} is dense and keeps every token")
    for first in range(0, profile.num_kv_heads, _HEADS_IN_A_ROW):
        console.print(_table(profile, shares, first))
    lengths = ", ".join(f"{source['tokens']:,}" for source in profile.sources)
    print(f"Mean kept share: {shares.mean():.1%}")
    print(f"Calibrated on texts of {lengths} tokens" if lengths else "Not calibrated on any text")
    print(f"Settings: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(profile.config).items())}")
    print(f"Profile: {folder}")
    if png is not None:
        print(f"Heat map: {png}")


def _record(profile: Profile, folder: Path, tokens: int, png: Path | None) -> dict[str, Any]:
    """What the table shows, as JSON values."""
    shares = profile.kept_share(tokens)
    return {
        "directory": str(folder),
        "model": profile.model_name,
        "library_version": profile.library_version,
        "config": dataclasses.asdict(profile.config),
        "tokens": tokens,
        "candidates": profile.candidates.tolist(),
        "dense_candidate": profile.config.num_candidates,
        "kept_share": shares.tolist(),
        "mean_kept_share": float(shares.mean()),
        "sources": [dict(source) for source in profile.sources],
        "png": None if png is None else str(png),
    }


def _table(profile: Profile, shares: Any, first: int) -> Table:
    """Layers down, up to 8 KV heads across, and the mean over all heads of a layer."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", justify="right")
    heads = range(first, min(first + _HEADS_IN_A_ROW, profile.num_kv_heads))
    for head in heads:
        table.add_column(f"head {head}", justify="right")
    table.add_column("mean", justify="right", style="bold")
    for layer, row in enumerate(shares):
        cells = [f"{row[head]:.0%}/{profile.candidates[layer, head]}" for head in heads]
        table.add_row(str(layer), *cells, f"{row.mean():.0%}")
    return table
