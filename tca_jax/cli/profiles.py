"""`tca-jax profile`: what calibration gave each KV head, as a table, as JSON or as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
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

    folder = profile_folder(directory)
    print_profile(Profile.load(folder), folder, tokens, png, as_json)


def profile_folder(directory: str) -> Path:
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

        prefill = profile.prefill_kept_share(tokens)
        plot_kept_share(profile.kept_share(tokens), tokens, profile.model_name, png, prefill_share=prefill)
    if as_json:
        print_json(_record(profile, folder, tokens, png))
        return
    dense = profile.config.num_candidates
    print(f"{profile.model_name}: share of tokens / candidate of each KV head at {tokens:,} tokens")
    print(f"Candidates: 0 is the sparsest, {dense} is dense and keeps every token")
    kept, prefill = profile.kept_share(tokens), profile.prefill_kept_share(tokens)
    print("Kept in the cache, for the tokens behind a prompt:")
    _print_tables(profile.candidates, kept)
    if not np.array_equal(profile.candidates, profile.prefill_candidates):
        print("Attended to while a prompt is read:")
        _print_tables(profile.prefill_candidates, prefill)
    lengths = ", ".join(f"{source['tokens']:,}" for source in profile.sources)
    print(f"Mean kept share: {kept.mean():.1%} in the cache, {prefill.mean():.1%} while a prompt is read")
    print(f"Calibrated on texts of {lengths} tokens" if lengths else "Not calibrated on any text")
    print(_probes(profile))
    print(f"Settings: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(profile.config).items())}")
    print(f"Profile: {folder}")
    if png is not None:
        print(f"Heat map: {png}")


def _record(profile: Profile, folder: Path, tokens: int, png: Path | None) -> dict[str, Any]:
    """What the table shows, as JSON values."""
    shares, prefill = profile.kept_share(tokens), profile.prefill_kept_share(tokens)
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
        "prefill_candidates": profile.prefill_candidates.tolist(),
        "prefill_kept_share": prefill.tolist(),
        "mean_prefill_kept_share": float(prefill.mean()),
        "probes": profile.probes,
        "sources": [dict(source) for source in profile.sources],
        "png": None if png is None else str(png),
    }


def _probes(profile: Profile) -> str:
    """One line on how the cache rows were found."""
    if (probes := profile.probes) is None:
        return "Probes: none"
    kinds = {"copy": "copies of the texts", "text": "the texts' last quarters", "pairs": "questions and answers"}
    text = f"Probes: {kinds[probes['kind']]}, {probes['tokens']:,} tokens"
    each = f"{probes['need'] / max(1, probes['tokens']):.3f} nats a token"
    if probes["fallback"]:
        text += f" that hardly need the far context ({each}), so the worst 1% of the texts' queries took their place"
    else:
        text += f" that need {each} of the far context"
    return text if probes["kept"] is None else f"{text}; dense heads up to a kept share of {probes['kept']:.1%}"


def _print_tables(candidates: Any, shares: Any) -> None:
    console = Console()
    for first in range(0, shares.shape[1], _HEADS_IN_A_ROW):
        console.print(_table(candidates, shares, first))


def _table(candidates: Any, shares: Any, first: int) -> Table:
    """Layers down, up to 8 KV heads across, and the mean over all heads of a layer."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("layer", justify="right")
    heads = range(first, min(first + _HEADS_IN_A_ROW, shares.shape[1]))
    for head in heads:
        table.add_column(f"head {head}", justify="right")
    table.add_column("mean", justify="right", style="bold")
    for layer, row in enumerate(shares):
        cells = [f"{row[head]:.0%}/{candidates[layer, head]}" for head in heads]
        table.add_row(str(layer), *cells, f"{row.mean():.0%}")
    return table
