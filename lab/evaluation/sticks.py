"""Common parts of the measuring sticks: methods by name, files of records, tables, intervals."""

from __future__ import annotations

import collections
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

from tca_jax.calibration.profile import Profile
from tca_jax.calibration.worth_profile import WorthProfile
from tca_jax.engine.lm import LM
from tca_jax.errors import require
from tca_jax.lab.benchmarks.common import append, markdown
from tca_jax.lab.evaluation.method_specs import Builder, MethodSpec, parse_methods

_RESAMPLES = 2_000
_IN_FULL = {"duoattention": {"dense_prefill": True}}
Record = dict[str, Any]
Methods = Mapping[tuple[str, float | None], list[Record]]  # records by method and share
ModelArgument = Annotated[str, typer.Argument(help="As for tca_jax.load.")]
OutOption = Annotated[Path, typer.Option(help="File that records are appended to.")]
MethodsOption = Annotated[str, typer.Option(help="Names of methods, by commas.")]
ProfileOption = Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of a profile; repeatable.")]
TokensOption = Annotated[int, typer.Option(min=1)]
TextsOption = Annotated[Path | None, typer.Option(help="Folder of `lab.evaluation.texts`.")]


class Named(NamedTuple):
    """A model under a method, with its name in tables."""

    method: str
    share: float | None  # requested share of full attention's bytes
    lm: LM

    def record(self, **figures: Any) -> Record:
        """Figures of the method."""
        return {"method": self.method, "share": self.share, **figures}


def named_methods(
    lm: LM, methods: str, shares: Sequence[float | None], profiles: Mapping[str, Path], tokens: int
) -> Iterator[Named]:
    """Full attention, each method at each share of full attention's bytes (None: its defaults), and the profiles."""
    read = {name: Profile.load(path) for name, path in profiles.items()}
    # `worth`, and the gates of `duoattention`, are of the first profile of predicted worth.
    by_worth = next((each for each in read.values() if isinstance(each, WorthProfile)), None)
    builder = Builder(lm, by_worth, None, list)
    for label, parts in parse_methods(methods):
        parts = tuple((name, {**_IN_FULL.get(name, {}), **given}) for name, given in parts)
        for share in [None] if label == "full" else shares:
            spec = MethodSpec(label, parts)
            built = builder.build(spec) if share is None else builder.build_within(spec, share, tokens)
            if built.own_budget:
                print(f"{label} at {share:.0%} is left out: {built.budget}", flush=True)
            else:
                yield Named(label, share, built.lm)
    for name, profile in read.items():
        rule = "worth" if isinstance(profile, WorthProfile) else "tca"
        yield Named(f"{rule}, {name}", None, lm.with_profile(profile))


def parse_profiles(given: Sequence[str] | None) -> dict[str, Path]:
    """Folders by name, from NAME=FOLDER."""
    profiles = {}
    for each in given or ():
        name, _, folder = each.partition("=")
        require(name and folder, f"--profile {each!r}: must be NAME=FOLDER")
        profiles[name] = Path(folder)
    return profiles


def run(
    stick: str,
    lm: LM,
    out: Path,
    tokens: int,
    seeds: Iterable[int],
    measure: Callable[[int], Iterable[Record]],
    table: Callable[[Sequence[Record]], str],
) -> None:
    """Appends the records of each document, by its seed; prints the table of all records."""
    device = jax.devices()[0].device_kind
    for seed in seeds:
        common = {"stick": stick, "model": lm.name, "tokens": tokens, "seed": seed, "device": device}
        for record in measure(seed):
            append(out, common | record)
        print(f"document {seed} is done", flush=True)
    print(table(records_by_stick([out])[stick]))


def records_by_stick(paths: Iterable[Path]) -> dict[str, list[Record]]:
    """Records of files that may be packed (.xz); of two of a document and method the later one."""
    found: dict[str, dict[tuple[Any, ...], Record]] = {}
    for path in paths:
        packed = path.read_bytes()
        for line in (lzma.decompress(packed) if path.suffix == ".xz" else packed).decode().splitlines():
            record = json.loads(line)
            key = tuple(map(record.get, ("model", "device", "tokens", "half", "method", "share", "seed")))
            found.setdefault(record["stick"], {})[key] = record
    return {stick: list(of_stick.values()) for stick, of_stick in found.items()}


def interval(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """A ratio of sums over documents, and its 95% interval by resampling documents; NaN without a denominator."""
    parts = np.asarray([numerators, denominators], float)
    drawn = np.random.default_rng(0).integers(parts.shape[1], size=(_RESAMPLES, parts.shape[1]))
    sums = np.concatenate([parts.sum(axis=1)[:, None], parts[:, drawn].sum(axis=-1)], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(sums[1] > 0, sums[0] / sums[1], np.nan)
    low, high = np.nanquantile(ratios[1:], (0.025, 0.975)) if np.isfinite(ratios[0]) else (np.nan, np.nan)
    return float(ratios[0]), float(low), float(high)


def titled_tables(
    records: Iterable[Record],
    header: Sequence[str],
    cells: Callable[[list[Record], Methods], list[str]],
    note: Callable[[Methods], str] = lambda methods: "",
) -> str:
    """Markdown tables by model, device and length, a row for each method that has `cells`, which join its shares."""
    tables, groups = [], collections.defaultdict[Any, Any](lambda: collections.defaultdict(list))
    for record in sorted(records, key=lambda r: (r["model"], r["device"], r["tokens"], r["method"], r["share"] or 0)):
        groups[record["model"], record["device"], record["tokens"]][record["method"], record["share"]].append(record)
    for (model, device, tokens), methods in groups.items():
        rows: dict[str, list[tuple[float | None, list[str]]]] = collections.defaultdict(list)
        for (method, share), of_method in methods.items():
            if found := cells(of_method, methods):
                rows[method].append((share, found))
        lines = []
        for method, of_shares in rows.items():
            shares = ", ".join(f"{100 * share:.3g}" for share, _ in of_shares if share is not None)
            columns = zip(*(found for _, found in of_shares), strict=True)
            joined = [column[0] if len(set(column)) == 1 else "; ".join(column) for column in columns]
            lines.append([f"{method} at {shares}%" if shares else method, *joined])
        tables.append(f"{model}, {tokens:,} tokens, {device}{note(methods)}.\n\n{markdown(header, lines)}")
    return "\n\n".join(tables)
