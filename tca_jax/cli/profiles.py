"""`tca-jax profile`: results of calibration, as tables or JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tca_jax.cli.files import print_json
from tca_jax.cli.options import JsonOption, SavedProfileArgument, ShareTokensOption
from tca_jax.errors import require

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile
    from tca_jax.calibration.worth_profile import WorthProfile

_TABLE_HEADS = 8  # fit into 80 columns

app = typer.Typer(help="Look at calibrated profiles.")


@app.command()
def show(
    directory: SavedProfileArgument,
    tokens: ShareTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print measurements at each kept share and the chosen settings, or the budgets of the paper's rule.

    Budgets: candidates count from 0, the sparsest, in the table as in JSON; the last one is dense and keeps every
    token.

    Example: [bold]tca-jax profile show my-profile[/]
    """
    from tca_jax.calibration.profile import Profile

    folder = profile_folder(directory)
    print_profile(Profile.load(folder), folder, tokens, as_json)


def profile_folder(directory: str) -> Path:
    """The folder of that name if it exists, or the profile of a shipped model."""
    from tca_jax.loading import SHIPPED, shipped_profile

    name = directory.lower()
    if Path(directory).exists() or name not in ("shipped", *SHIPPED):
        return Path(directory)
    return shipped_profile() if name == "shipped" else shipped_profile(name)


def print_profile(profile: Profile | WorthProfile, folder: Path, tokens: int | None, as_json: bool) -> None:
    """Prints tables or JSON of a profile.

    Shares of budgets are for the longest calibration text where `tokens` is None; predicted worth takes no `tokens`.
    """
    from tca_jax.calibration.worth_profile import WorthProfile

    if isinstance(profile, WorthProfile):
        require(tokens is None, "--tokens goes with budgets of the paper's rule, not with predicted worth")
        _print_worth(profile, folder, as_json)
        return
    lengths = [source["tokens"] for source in profile.sources]
    tokens = tokens or max(lengths, default=131072)
    kept = profile.kept_share(tokens)
    if as_json:
        print_json(_record(profile, folder, tokens, kept))
        return
    print(f"{profile.model_name}: share of tokens / candidate of each KV head at {tokens:,} tokens")
    print(f"Candidates: 0 is the sparsest, {profile.config.num_candidates} is dense and keeps every token")
    _print_tables(profile.candidates.astype(str), kept)
    print(f"Mean kept share: {kept.mean():.1%}")
    print(f"Calibrated on {of_texts(lengths)}" if lengths else "Not calibrated on any text")
    print(f"Settings: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(profile.config).items())}")
    print(f"Profile: {folder}")


def _print_worth(profile: WorthProfile, folder: Path, as_json: bool) -> None:
    """Prints measurements and the settings chosen by them."""
    tables: dict[str, Any] = {"kept_table": profile.kept_table, "reading_table": profile.reading_table}
    reasons = {"kept": _why_kept(profile), "selected": _why_selected(profile)}
    if as_json:
        names = {"model": "model_name", **{name: name for name in ("library_version", "kept", "selected", "sources")}}
        record = {"directory": str(folder), "rule": "worth"}
        record |= {name: getattr(profile, field) for name, field in names.items()}
        print_json(record | {"reasons": reasons} | {name: _numbers(table) for name, table in tables.items()})
        return
    layers, heads = profile.maps.maps.shape[:2]
    print(f"{profile.model_name}: predicted worth, {layers} layers of {heads} KV heads")
    titles = {
        "kept_table": "Behind texts, of what full attention knows, and loss over full attention's",
        "reading_table": "Inside texts, loss over full attention's: plain in percent, copies and facts in nats",
    }
    for name, title in titles.items():
        if tables[name]:
            print(f"{title}:")
            print_table(tables[name], profile.kept if name == "kept_table" else profile.selected)
    for name, reason in reasons.items():
        print(f"{name} = {getattr(profile, name):g}: {reason}")
    lengths = [source["tokens"] for source in profile.sources]
    if lengths:
        print(f"Calibrated on {of_texts(lengths)}")
    print(f"Profile: {folder}")


def _why_kept(profile: WorthProfile) -> str:
    from tca_jax.calibration.worth_profile import LEAST_KNOWN, MOST_FOLLOWING, chosen_kept, holds

    if not profile.kept_table or profile.kept != chosen_kept(profile.kept_table):
        return "as it was asked for"
    rule = f"hold {LEAST_KNOWN:.0%} of the facts, and the following text's loss within {MOST_FOLLOWING:.0%}"
    if holds(profile.kept_table[-1]):
        return f"the smallest measured share from which on all {rule}"
    return f"the largest measured share, which does not {rule}"


def _why_selected(profile: WorthProfile) -> str:
    from tca_jax.calibration.worth_profile import MOST_NATS, chosen_selected

    if not profile.reading_table or profile.selected != chosen_selected(profile.reading_table):
        return "as it was asked for"
    return f"copies and facts inside a text within {MOST_NATS} nats of full attention, or the largest measured share"


def print_table(rows: Sequence[Mapping[str, float]], chosen: float) -> None:
    """Rows of a table of measurements; the chosen one in bold."""
    table = Table(box=box.SIMPLE)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [_cell(name, value) for name, value in row.items()]
        table.add_row(*cells, style="bold" if next(iter(row.values())) == chosen else None)
    Console().print(table)


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if name in ("copy", "fact"):
        return f"{value:+.2f}"
    return f"{value:+.1%}" if name in ("following", "plain") else f"{value:.1%}"


def _numbers(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float | None]]:
    """Rows with None where nothing was measured: JSON has no NaN."""
    return [{name: None if math.isnan(value) else value for name, value in row.items()} for row in rows]


def of_texts(lengths: list[int]) -> str:
    """Number and lengths of texts."""
    least, most = min(lengths), max(lengths)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{len(lengths)} text{'s'[: len(lengths) > 1]} of {tokens} tokens"


def _record(profile: Profile, folder: Path, tokens: int, kept: np.ndarray) -> dict[str, Any]:
    """The budgets as JSON values."""
    return {
        "directory": str(folder),
        "rule": "paper",
        "model": profile.model_name,
        "library_version": profile.library_version,
        "config": dataclasses.asdict(profile.config),
        "tokens": tokens,
        "candidates": profile.candidates.tolist(),
        "dense_candidate": profile.config.num_candidates,
        "kept_share": kept.tolist(),
        "mean_kept_share": float(kept.mean()),
        "sources": [dict(source) for source in profile.sources],
    }


def _print_tables(candidates: np.ndarray, shares: np.ndarray) -> None:
    """Prints shares and candidates or readings: layers down, up to 8 KV heads across, and the mean of a layer."""
    console = Console()
    for first in range(0, shares.shape[1], _TABLE_HEADS):
        heads = range(first, min(first + _TABLE_HEADS, shares.shape[1]))
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        for name in ("layer", *(f"head {head}" for head in heads)):
            table.add_column(name, justify="right")
        table.add_column("mean", justify="right", style="bold")
        for layer, row in enumerate(shares):
            cells = [f"{row[head]:.0%}/{candidates[layer, head]}" for head in heads]
            table.add_row(str(layer), *cells, f"{row.mean():.0%}")
        console.print(table)
