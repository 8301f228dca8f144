"""Reads the points of pictures from files of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.errors import UserError
from tca_jax.lab.benchmarks.models import CONFIGS
from tca_jax.lab.plots.curves import Point
from tca_jax.lab.plots.figures import PathLike
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS
from tca_jax.models.json_object import read_json_object

#: Stages of a call; a benchmark of one layer has the first two.
SELECTION, ATTENTION, REST = "selection", "attention", "matrix products and the rest"
READING = "reading the prompt"
_SAME_SHARE = 0.01  # kept shares of two benchmarks that differ by less are one setting


def latency_bars(
    records: Mapping[str, Mapping[str, Any]], *, tokens: int | None = None, new_tokens: int = 256
) -> dict[str, dict[str, float]]:
    """Stages in seconds, as `plot_latency` takes them: all bars of one prompt length in the same parts.

    Args:
        records: By file, results of `tca-jax bench attention` (one layer), `tca-jax bench end-to-end` (models), or
            `tca-jax generate --json` (calls). Models are drawn in parts if a layer of each was timed, too.
        tokens: Prompt length of the benchmarks; None for the longest of each.
        new_tokens: Tokens that are decoded after a benchmark's prompt.

    Raises:
        ValueError: a record is of none of these, or none has that prompt length.
    """
    layers: list[Mapping[str, Any]] = []
    models: list[Mapping[str, Any]] = []
    bars: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        if "stats" in record:
            bars[name] = call_stages(record["stats"])
        elif timed := _rows(record, "total ms", "full ms"):
            layers += _of_length(timed, tokens)
        elif timed := _rows(record, "TTFT s", "ms/token"):
            models += _of_length(timed, tokens)
        else:
            known = "`tca-jax bench attention`, `tca-jax bench end-to-end` or `tca-jax generate --json`"
            raise UserError(f"{name}: must be a result of {known}")
    parts = [_parts(row, layers) for row in models]
    for row, of_row in zip(models, parts, strict=True):
        reading = of_row if all(parts) else {READING: row["TTFT s"]}
        decoding = {f"decoding {new_tokens:,} tokens": row["ms/token"] * new_tokens / 1e3}
        bars[f"{row['model']}, {row['tokens']:,} tokens, {row['attention']}"] = reading | decoding
    for row in [] if models else layers:
        where = f"{row['model']}, {row['tokens']:,} tokens"
        bars[f"{where}, full"] = {ATTENTION: row["full ms"] / 1e3}
        bars[f"{where}, {row['attention']}, {row['backend']}"] = _layer_stages(row)
    if not bars:
        raise UserError(f"tokens = {tokens}: none of these results is of that prompt length")
    return bars


def call_stages(stats: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of one call: `dataclasses.asdict(out.stats)`, or "stats" of `tca-jax generate --json`."""
    return {READING: stats["prefill_seconds"], "decoding": stats["seconds_per_token"] * max(stats["new_tokens"])}


def accuracy_panels(path: PathLike) -> dict[str, list[Point]]:
    """Accuracy against bytes by protocol and prompt length, the mean over tasks, as `plot_accuracy` takes it.

    Args:
        path: A folder of `tca-jax eval`, of which only tasks count that all its methods have at a length, or a JSON
            file with "methods" such as `evaluation.json` of the shipped model.

    Raises:
        ValueError: there is no accuracy in it; names the file.
    """
    path = Path(path)
    panels: dict[str, list[Point]] = {}
    if path.is_dir():
        files = sorted(path.glob("results/*/*.json"))  # unfinished ones begin with a dot
        panels = _panels_of_records([read_json_object(file) for file in files if not file.name.startswith(".")])
    else:
        for row in read_json_object(path).get("methods", ()):
            for protocol, tasks in row["right"].items():
                point = (row["method"], row["kv_cache_share"], float(np.mean(list(tasks.values()))))
                panels.setdefault(protocol, []).append(point)
    if not panels:
        raise UserError(f"{path}: holds no accuracy of methods")
    return panels


def model_points(path: PathLike) -> dict[str, dict[str, Any]]:
    """Models and their points, as `plot_reading` and `plot_keeping` take them, from a JSON file with "models".

    Raises:
        ValueError: there are no models, or one without points of methods; names the file.
    """
    models = read_json_object(Path(path)).get("models")
    if not isinstance(models, dict) or not models:
        raise UserError(f"{path}: holds no models, by name under 'models'")
    for name, model in models.items():
        points = model.get("points") if isinstance(model, dict) else None
        if not isinstance(points, list) or not all(isinstance(p, dict) and "method" in p for p in points):
            raise UserError(f"{path}: models[{name!r}] must hold 'points', objects with a 'method' each")
    return models


def _panels_of_records(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Points of an evaluation's records, one for each method, task, length and protocol."""
    found: dict[tuple[int, int], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for record in records:
        if record.get("protocol") in EVALUATION_PROTOCOLS:
            place = record["length"], EVALUATION_PROTOCOLS.index(record["protocol"])
            found.setdefault(place, {}).setdefault(record["method"], {})[record["task"]] = record
    several = len({length for length, _ in found}) > 1
    panels: dict[str, list[Point]] = {}
    for (length, protocol), methods in sorted(found.items()):
        heading = EVALUATION_PROTOCOLS[protocol] + (f", {length:,} tokens" if several else "")
        common = sorted(set.intersection(*map(set, methods.values())))
        for method, tasks in methods.items() if common else ():
            share = np.mean([tasks[task]["kv_cache_bytes"] / tasks[task]["full_kv_cache_bytes"] for task in common])
            score = np.mean([tasks[task]["score"] for task in common])
            panels.setdefault(heading, []).append((method, float(share), float(score) / 100))
    return panels


def _parts(row: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Selection, attention and the rest of reading, from a layer of the same model, length and share; or none."""
    same = [layer for layer in layers if (layer["model"], layer["tokens"]) == (row["model"], row["tokens"])]
    if row["attention"] == "full":
        timed = [{ATTENTION: layer["full ms"] / 1e3} for layer in same]
    else:
        timed = [_layer_stages(layer) for layer in same if abs(layer["kept"] - row["kept"]) < _SAME_SHARE]
    if not timed:
        return {}
    fastest = min(timed, key=lambda each: sum(each.values()))
    parts = {stage: CONFIGS[row["model"]].num_layers * seconds for stage, seconds in fastest.items()}
    return {**parts, REST: max(0.0, row["TTFT s"] - sum(parts.values()))}


def _layer_stages(row: Mapping[str, Any]) -> dict[str, float]:
    """Selection and attention of one layer: together the time of both in one program."""
    selection = row["selection ms"] / 1e3
    return {SELECTION: selection, ATTENTION: row["total ms"] / 1e3 - selection}


def _rows(record: Mapping[str, Any], *columns: str) -> list[Mapping[str, Any]]:
    """Rows that have all of these columns."""
    rows = record.get("rows")
    return [row for row in rows if set(columns) <= row.keys()] if isinstance(rows, list) else []


def _of_length(rows: Sequence[Mapping[str, Any]], tokens: int | None) -> list[Mapping[str, Any]]:
    wanted = max(row["tokens"] for row in rows) if tokens is None else tokens
    return [row for row in rows if row["tokens"] == wanted]
