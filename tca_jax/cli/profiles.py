"""`tca-jax profile`: what calibration gave each KV head, as a table or as JSON."""

from __future__ import annotations

import dataclasses
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

if TYPE_CHECKING:
    from tca_jax.calibration.profile import Profile

_TABLE_HEADS = 8  # fit into 80 columns
_NAMED_HEADS = 5  # of the highest worth
_LOSSES = {"inside": "inside the texts", "answers": "of the probes' answers", "following": "of what follows a text"}

app = typer.Typer(help="Look at calibrated profiles.")


@app.command()
def show(
    directory: SavedProfileArgument,
    tokens: ShareTokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what each KV head keeps, how it reads, what it is worth, and the losses.

    Candidates count from 0, the sparsest, in the table as in JSON; the last one is dense and keeps every token.

    Example: [bold]tca-jax profile show my-profile --tokens 32768[/]
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


def print_profile(profile: Profile, folder: Path, tokens: int | None, as_json: bool) -> None:
    """Prints tables or JSON of a profile; shares are for the longest calibration text where `tokens` is None."""
    lengths = [source["tokens"] for source in profile.sources]
    tokens = tokens or max(lengths, default=131072)
    kept, prefill = profile.kept_share(tokens), profile.prefill_kept_share(tokens)
    if as_json:
        print_json(_record(profile, folder, tokens, kept, prefill))
        return
    print(f"{profile.model_name}: share of tokens / candidate of each KV head at {tokens:,} tokens")
    print(f"Candidates: 0 is the sparsest, {profile.config.num_candidates} is dense and keeps every token")
    print("Kept in the cache, for the tokens that follow a prompt:")
    _print_tables(profile.candidates.astype(str), kept)
    if not np.array_equal(kept, prefill):
        print("Attended to in prefill (b: reads blocks, d: reads dense):")
        candidates, initials = profile.prefill_candidates.astype(str), profile.readings.astype("U1")
        _print_tables(np.where(profile.readings == "sparse", candidates, initials), prefill)
    print(f"Mean kept share: {kept.mean():.1%} in the cache, {prefill.mean():.1%} in prefill")
    print(f"Calibrated on {of_texts(lengths)}" if lengths else "Not calibrated on any text")
    for line in (*_readings(profile), *_losses(profile), *_worths(profile), *_probes(profile)):
        print(line)
    print(f"Settings: {', '.join(f'{k}={v}' for k, v in dataclasses.asdict(profile.config).items())}")
    print(f"Profile: {folder}")


def of_texts(lengths: list[int]) -> str:
    """Number and lengths of texts."""
    least, most = min(lengths), max(lengths)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{len(lengths)} text{'s'[: len(lengths) > 1]} of {tokens} tokens"


def _record(profile: Profile, folder: Path, tokens: int, kept: np.ndarray, prefill: np.ndarray) -> dict[str, Any]:
    """The tables as JSON values."""
    return {
        "directory": str(folder),
        "model": profile.model_name,
        "library_version": profile.library_version,
        "config": dataclasses.asdict(profile.config),
        "tokens": tokens,
        "candidates": profile.candidates.tolist(),
        "dense_candidate": profile.config.num_candidates,
        "kept_share": kept.tolist(),
        "mean_kept_share": float(kept.mean()),
        "prefill_candidates": profile.prefill_candidates.tolist(),
        "prefill_kept_share": prefill.tolist(),
        "mean_prefill_kept_share": float(prefill.mean()),
        "readings": profile.readings.tolist(),
        "reading_worth": _numbers(profile.reading_worth),
        "keeping_worth": _numbers(profile.keeping_worth),
        "losses": {name: {**losses, "won_back": _won_back(losses)} for name, losses in profile.losses.items()},
        "probes": profile.probes,
        "sources": [dict(source) for source in profile.sources],
    }


def _numbers(worth: np.ndarray) -> list[list[float | None]]:
    """Nats, or None where not measured: JSON has no NaN."""
    return [[None if np.isnan(each) else float(each) for each in of_layer] for of_layer in worth]


def _readings(profile: Profile) -> list[str]:
    """Heads of each reading other than sparse."""
    lines = []
    for reading in ("blocks", "dense"):
        heads = list(map(tuple, np.argwhere(profile.readings == reading).tolist()))
        if heads:
            lines.append(f"Heads that read {reading}: {len(heads)} of {profile.readings.size} ({_named(heads)})")
    return lines


def _named(heads: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"layer {layer} head {head}" for layer, head in heads)


def _losses(profile: Profile) -> list[str]:
    """Losses of both searches, a line for each."""
    lines = []
    for name, words in _LOSSES.items():
        if (losses := profile.losses.get(name)) is not None:
            full, row0, chosen = (f"{losses[end]:.4f}" for end in ("full", "row0", "chosen"))
            back = "" if (share := _won_back(losses)) is None else f", {share:.0%} of the gap won back"
            lines.append(f"Loss {words}: {full} full attention, {row0} candidate 0, {chosen} chosen{back}")
    return lines


def _won_back(losses: Mapping[str, float]) -> float | None:
    """Share of candidate 0's excess loss that the choice avoids; None if there is no excess."""
    gap = losses["row0"] - losses["full"]
    return (losses["row0"] - losses["chosen"]) / gap if gap > 0 else None


def _worths(profile: Profile) -> list[str]:
    """The heads of the highest worth in each search."""
    lines = []
    for worth, words in ((profile.reading_worth, "reading blocks"), (profile.keeping_worth, "keeping everything")):
        best = np.argsort(-worth, axis=None, kind="stable")[:_NAMED_HEADS]
        heads = map(tuple, np.transpose(np.unravel_index(best, worth.shape)).tolist())
        if named := ", ".join(f"{nats(float(worth[head]))} ({_named([head])})" for head in heads if worth[head] > 0):
            lines.append(f"Highest worth of {words}, in nats: {named}")
    return lines


def nats(value: float) -> str:
    """A worth in two digits, without an exponent where it is 100 or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _probes(profile: Profile) -> list[str]:
    """Counted answers by kind of probe, and the bounds."""
    if (probes := profile.probes) is None or not probes["counted"]:
        return ["Probes: none"]
    lines = [f"Probes, {kind}: {_informative(count)}" for kind, count in probes["counted"].items()]
    bounds = [f"{name} at most {probes[name]:.1%}" for name in ("kept", "attended") if probes[name] is not None]
    return lines + ([f"Bounds: {', '.join(bounds)}"] if bounds else [])


def _informative(count: int) -> str:
    if not count:
        return "not informative: the smallest budget loses fewer than 5 of the answers that full attention knows"
    return f"the smallest budget loses {count:,} answer{'s'[: count > 1]} that full attention knows"


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
