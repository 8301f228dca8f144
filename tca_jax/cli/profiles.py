"""`tca-jax profile`: results of calibration, as tables or JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from tca_jax.cli.files import print_json
from tca_jax.cli.options import JsonOption, SavedProfileArgument, ShareTokensOption
from tca_jax.errors import require

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile
    from tca_jax.calibration.worth_profile import WorthProfile

_TABLE_HEADS = 8  # fit into 80 columns

app = typer.Typer(help="Look at calibrated profiles.")


@app.command()
def show(directory: SavedProfileArgument, tokens: ShareTokensOption = None, as_json: JsonOption = False) -> None:
    """Print measurements at each kept share and the chosen settings, or the budgets of the paper's rule.

    Budgets: candidates count from 0, the sparsest, in table and JSON; the last one is dense and keeps every token.

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
    """Prints tables or JSON; shares of budgets are at `tokens`, or at the longest calibration text's."""
    from tca_jax.calibration.worth_profile import WorthProfile

    lengths = [source["tokens"] for source in profile.sources]
    goes = "--tokens goes with budgets of the paper's rule, not with predicted worth"
    require(tokens is None or not isinstance(profile, WorthProfile), goes)
    tokens = tokens or max(lengths, default=131072)
    if as_json:
        own = _worth_record(profile) if isinstance(profile, WorthProfile) else _budgets_record(profile, tokens)
        common = {"model": profile.model_name, "library_version": profile.library_version}
        print_json({"directory": str(folder), **common, **own, "sources": [dict(source) for source in profile.sources]})
        return
    if isinstance(profile, WorthProfile):
        _print_worth(profile)
    else:
        _print_budgets(profile, tokens)
    if lengths:
        ends = " to ".join(f"{each:,}" for each in sorted({min(lengths), max(lengths)}))
        print(f"Calibrated on {len(lengths)} text{'s'[: len(lengths) > 1]} of {ends} tokens")
    else:
        print("Not calibrated on any text")
    print(f"Profile: {folder}")


def _budgets_record(profile: Profile, tokens: int) -> dict[str, Any]:
    kept = profile.kept_share(tokens)
    return {
        "rule": "paper",
        "config": dataclasses.asdict(profile.config),
        "tokens": tokens,
        "candidates": profile.candidates.tolist(),
        "dense_candidate": profile.config.num_candidates,
        "kept_share": kept.tolist(),
        "mean_kept_share": float(kept.mean()),
    }


def _print_budgets(profile: Profile, tokens: int) -> None:
    """Shares and candidates: layers down, up to 8 KV heads across, and the mean of a layer."""
    print(f"{profile.model_name}: share of tokens / candidate of each KV head at {tokens:,} tokens")
    print(f"Candidates: 0 is the sparsest, {profile.config.num_candidates} is dense and keeps every token")
    shares = profile.kept_share(tokens)
    for first in range(0, shares.shape[1], _TABLE_HEADS):
        heads = range(first, min(first + _TABLE_HEADS, shares.shape[1]))
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        for name in ("layer", *(f"head {head}" for head in heads), "mean"):
            table.add_column(name, justify="right", style="bold" if name == "mean" else None)
        for layer, row in enumerate(shares):
            cells = [f"{row[head]:.0%}/{profile.candidates[layer, head]}" for head in heads]
            table.add_row(str(layer), *cells, f"{row.mean():.0%}")
        Console().print(table)
    print(f"Mean kept share: {shares.mean():.1%}")
    print(f"Settings: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(profile.config).items())}")


def _worth_record(profile: WorthProfile) -> dict[str, Any]:
    record = {"rule": "worth", "kept": profile.kept, "selected": profile.selected, "reasons": _reasons(profile)}
    for name in ("kept_table", "reading_table"):  # JSON has no NaN: None where nothing was measured
        record[name] = [{key: None if math.isnan(x) else x for key, x in row.items()} for row in getattr(profile, name)]
    return record


def _print_worth(profile: WorthProfile) -> None:
    layers, heads = profile.maps.maps.shape[:2]
    print(f"{profile.model_name}: predicted worth, {layers} layers of {heads} KV heads")
    if profile.kept_table:
        known = profile.kept_table[0].get("known", "not stored")
        print(f"After texts, shares of full attention's right answers (known facts: {known}), and loss over its loss:")
        print_table([{k: x for k, x in row.items() if k != "known"} for row in profile.kept_table], profile.kept)
    if profile.reading_table:
        print("Inside texts, loss over full attention's: plain in percent, copies and facts in nats:")
        print_table(profile.reading_table, profile.selected)
    for name, reason in _reasons(profile).items():
        print(f"{name} = {getattr(profile, name):g}: {reason}")


def _reasons(profile: WorthProfile) -> dict[str, str]:
    """Why the profile has its two shares."""
    from tca_jax.calibration import worth_profile as of

    kept = selected = "as it was asked for"
    largest, smallest = "the largest measured share", "the smallest measured share from which on all"
    if (table := profile.kept_table) and profile.kept == of.chosen_kept(table):
        rule = f"{of.LEAST_KNOWN:.0%} of the facts with at most {of.MOST_FOLLOWING:.0%} more loss of the following text"
        known = table[-1].get("known")
        doubt = f"{largest}; none is shown to hold {rule} (known facts: {known}, needed: {of.FEWEST})"
        kept = f"{smallest} hold {rule}" if of.holds(table[-1]) else doubt
        kept = "chosen at calibration, which did not store how many facts were known" if known is None else kept
    if (table := profile.reading_table) and profile.selected == of.chosen_selected(table):
        row = next(row for row in table if row["selected"] == profile.selected)
        near = f"{of.MOST_NATS} nats of full attention's loss of copies and facts inside a text"
        far = any(row[kind] > of.MOST_NATS for kind in ("copy", "fact"))
        selected = f"{largest}, which is not within {near}" if far else f"{smallest} are within {near}"
        if row["attended"] >= 0.999:
            selected = "the largest share; nothing was measured, for texts of up to 4,096 tokens are read in full"
    return {"kept": kept, "selected": selected}


def print_table(rows: Sequence[Mapping[str, float]], chosen: float) -> None:
    """Rows of a table of measurements; the chosen one in bold."""
    table = Table(*(Column(name, justify="right") for name in rows[0]), box=box.SIMPLE)
    formats = {"copy": "+.2f", "fact": "+.2f", "following": "+.1%", "plain": "+.1%"}
    for row in rows:
        cells = ["-" if math.isnan(x) else format(x, formats.get(name, ".1%")) for name, x in row.items()]
        table.add_row(*cells, style="bold" if next(iter(row.values())) == chosen else None)
    Console().print(table)
