"""What plots of results show, read from files of results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.errors import UserError
from tca_jax.lab.plots.accuracy import Point
from tca_jax.lab.recall.protocols import EVALUATION_PROTOCOLS
from tca_jax.models.json_object import read_json_object

#: Stages of a whole call; a benchmark of one layer has the first two.
SELECTION, ATTENTION, REST = "selection", "attention", "matrix products and the rest"
READING = "reading the prompt"
_SAME_SHARE = 0.01  # kept shares of two benchmarks that differ by less are one setting


def latency_bars(
    records: Mapping[str, Mapping[str, Any]], *, tokens: int | None = None, new_tokens: int = 256
) -> dict[str, dict[str, float]]:
    """Stages in seconds, as `plot_latency` takes them.

    Args:
        records: By file, what `tca-jax bench attention`, `tca-jax bench end-to-end` or `tca-jax generate --json` wrote.
            The first gives one layer's selection and attention; the second reading and decoding of whole models; both
            together the parts of reading: layers times selection and attention, and what is left; the third the
            call's own reading and decoding.
        tokens: Prompt length of the benchmarks that is shown; None for the longest of each.
        new_tokens: Tokens that are decoded after a benchmark's prompt.

    Raises:
        ValueError: a record is of none of these, or none has that prompt length.
    """
    layers: list[Mapping[str, Any]] = []
    models: list[Mapping[str, Any]] = []
    bars: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        rows: Any = record.get("rows")
        if "stats" in record:
            bars[name] = call_stages(record["stats"])
        elif timed := _with(rows, "total ms", "full ms"):
            layers += _of_length(timed, tokens)
        elif timed := _with(rows, "TTFT s", "ms/token"):
            models += _of_length(timed, tokens)
        else:
            raise UserError(
                f"{name}: must be a result of `tca-jax bench attention`, `tca-jax bench end-to-end` or "
                f"`tca-jax generate --json`"
            )
    for row in models:
        name = f"{row['model']}, {row['tokens']:,} tokens, {row['attention']}"
        bars[name] = _model_stages(row, layers, new_tokens)
    for row in [] if models else layers:
        where = f"{row['model']}, {row['tokens']:,} tokens"
        bars[f"{where}, full"] = {ATTENTION: row["full ms"] / 1e3}
        bars[f"{where}, {row['attention']}, {row['backend']}"] = _layer_stages(row)
    if not bars:
        raise UserError(f"tokens = {tokens}: none of these results is of that prompt length")
    return bars


def call_stages(stats: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of one call: `dataclasses.asdict(out.stats)`, or "stats" of `tca-jax generate --json`."""
    new = max(stats["new_tokens"])
    return {READING: stats["prefill_seconds"], "decoding": stats["seconds_per_token"] * new}


def accuracy_panels(path: str | os.PathLike[str]) -> dict[str, list[Point]]:
    """Accuracy against bytes by protocol and prompt length, the mean over tasks, as `plot_accuracy` takes it.

    Args:
        path: A folder of `tca-jax eval`, or a JSON file with "methods" such as `evaluation.json` beside the model that
            ships.

    Returns:
        Points by heading. Of a folder only tasks count that all its methods have at a length.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else; names the file.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("results/*/*.json"))
        # What a run that was killed has left unfinished begins with a dot.
        panels = _panels_of_records(read_json_object(file) for file in files if not file.name.startswith("."))
    else:
        panels = _panels_of_methods(read_json_object(path).get("methods", ()))
    if not panels:
        raise UserError(f"{path}: holds no accuracy of methods")
    return panels


def _panels_of_methods(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Of rows each with its "method", its "kv_cache_share" and what was "right" by protocol and task."""
    panels: dict[str, list[Point]] = {}
    for row in rows:
        for protocol, tasks in row["right"].items():
            point = (row["method"], row["kv_cache_share"], _mean(tasks.values()))
            panels.setdefault(protocol, []).append(point)
    return panels


def _panels_of_records(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """What `accuracy_panels` gives of a folder, from what its files hold.

    Args:
        records: One for each method, task, length and protocol, with its "score" in percent and its bytes. Those of
            tasks that ask nothing are left out.
    """
    asked = [record for record in records if record.get("protocol") in EVALUATION_PROTOCOLS]
    asked.sort(
        key=lambda record: (
            record["length"],
            EVALUATION_PROTOCOLS.index(record["protocol"]),
            record["method"] != "full",
        )
    )
    lengths = {record["length"] for record in asked}
    found: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for record in asked:
        heading = record["protocol"] + (f", {record['length']:,} tokens" if len(lengths) > 1 else "")
        found.setdefault(heading, {}).setdefault(record["method"], {})[record["task"]] = record
    panels: dict[str, list[Point]] = {}
    for heading, methods in found.items():
        common = set.intersection(*map(set, methods.values()))
        for method, tasks in methods.items() if common else ():
            same = [tasks[task] for task in common]
            share = _mean(record["kv_cache_bytes"] / record["full_kv_cache_bytes"] for record in same)
            point = (method, share, _mean(record["score"] for record in same) / 100)
            panels.setdefault(heading, []).append(point)
    return panels


def model_points(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Models and their points, as `plot_reading` and `plot_keeping` take them, from a JSON file with "models".

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no models, or one without points of methods; names the file.
    """
    models = read_json_object(Path(path)).get("models")
    if not isinstance(models, dict) or not models:
        raise UserError(f"{os.fspath(path)}: holds no models, by name under 'models'")
    for name, model in models.items():
        points = model.get("points") if isinstance(model, dict) else None
        if not isinstance(points, list) or not all(
            isinstance(p, dict) and isinstance(p.get("method"), str) for p in points
        ):
            raise UserError(f"{os.fspath(path)}: models[{name!r}] must hold 'points', objects with a 'method' each")
    return models


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _model_stages(row: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], new_tokens: int) -> dict[str, float]:
    """Reading, in parts if a layer of the same shape was timed too, and decoding."""
    reading = row["TTFT s"]
    decoding = {f"decoding {new_tokens:,} tokens": row["ms/token"] * new_tokens / 1e3}
    same = [layer for layer in layers if (layer["model"], layer["tokens"]) == (row["model"], row["tokens"])]
    if row["attention"] == "full":
        parts = [{ATTENTION: layer["full ms"] / 1e3} for layer in same]
    else:
        parts = [_layer_stages(layer) for layer in same if abs(layer["kept"] - row["kept"]) < _SAME_SHARE]
    if not parts:
        return {READING: reading, **decoding}
    from tca_jax.lab.benchmarks.models import CONFIGS

    count = CONFIGS[row["model"]].num_layers
    timed = {stage: count * seconds for stage, seconds in min(parts, key=lambda each: sum(each.values())).items()}
    return {**timed, REST: max(0.0, reading - sum(timed.values())), **decoding}


def _layer_stages(row: Mapping[str, Any]) -> dict[str, float]:
    """Selection and attention of one layer: together the time of both in one program."""
    selection = row["selection ms"] / 1e3
    return {SELECTION: selection, ATTENTION: row["total ms"] / 1e3 - selection}


def _with(rows: Any, *columns: str) -> list[Mapping[str, Any]]:
    """Rows that have all of these columns."""
    return [row for row in rows if all(column in row for column in columns)] if isinstance(rows, list) else []


def _of_length(rows: Sequence[Mapping[str, Any]], tokens: int | None) -> list[Mapping[str, Any]]:
    wanted = max(row["tokens"] for row in rows) if tokens is None else tokens
    return [row for row in rows if row["tokens"] == wanted]
