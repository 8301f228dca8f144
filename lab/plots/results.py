"""Reads the points of pictures from files of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.errors import UserError, require
from tca_jax.lab.benchmarks.models import CONFIGS
from tca_jax.lab.plots.curves import Point
from tca_jax.lab.plots.figures import PathLike
from tca_jax.models.json_object import read_json_object

#: Stages of a call.
SELECTION, ATTENTION, REST = "selection", "attention", "matrix products and the rest"
READING = "reading the prompt"
_STORED = {
    "nothing": "",
    "weights": ", weights in fp8",
    "kv": ", cache in fp8",
    "both": ", weights and cache in fp8",
    "attention": ", attention in fp8",
    "all": ", all in fp8",
}
_SAME_SHARE = 0.01  # kept shares of two benchmarks that differ by less are one setting

Row = Mapping[str, Any]
Panels = dict[str, list[Point]]


def latency_bars(records: Mapping[str, Row], *, new_tokens: int = 256) -> dict[str, dict[str, float]]:
    """Stages in seconds of the longest prompts in each record; `new_tokens` are decoded after a benchmark's prompt.

    A record is of bench end-to-end, generate, or bench attention; layers of each model split its reading into parts.
    """
    layers, models = list[Row](), list[Row]()
    bars: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        if "stats" in record:
            stats = record["stats"]
            decoding = stats["seconds_per_token"] * max(stats["new_tokens"])
            bars[name] = {READING: stats["prefill_seconds"], "decoding": decoding}
        elif timed := _longest(record, "total ms", "full ms"):
            layers += timed
        elif timed := _longest(record, "TTFT s", "ms/token"):
            models += timed
        else:
            known = "`tca-jax bench attention`, `tca-jax bench end-to-end` or `tca-jax generate --json`"
            raise UserError(f"{name}: must be a result of {known}")
    parts = [_parts(row, layers) for row in models]
    for row, of_row in zip(models, parts, strict=True):
        reading = of_row if all(parts) else {READING: row["TTFT s"]}
        further = {f"decoding {new_tokens:,} tokens": row["ms/token"] * new_tokens / 1e3}
        name = f"{row['model']}, {row['tokens']:,} tokens, {row['attention']}{_STORED[row.get('fp8', 'nothing')]}"
        runs = sum(each.partition(", run ")[0] == name for each in bars)  # of the same, in other files or sections
        bars[f"{name}, run {runs + 1}" if runs else name] = reading | further
    require(bars, f"{', '.join(records)}: no times of models or calls")
    return bars


def accuracy_panels(path: PathLike, protocol: str | None = None) -> Panels:
    """Accuracy against bytes by protocol (None: all), as `plot_accuracy` takes it, from a JSON file with "methods"."""
    panels: Panels = {}
    for row in read_json_object(Path(path)).get("methods", ()):
        for asked, tasks in row["right"].items():
            if protocol in (None, asked):
                point = (row["method"], row["kv_cache_share"], float(np.mean(list(tasks.values()))))
                panels.setdefault(asked, []).append(point)
    require(panels, f"{path}: holds no accuracy of methods" + (f" under protocol {protocol!r}" if protocol else ""))
    return panels


def _parts(row: Row, layers: Sequence[Row]) -> dict[str, float]:
    """Selection, attention and the rest of reading, from a layer of the same model, length and share; or none."""
    same = [layer for layer in layers if (layer["model"], layer["tokens"]) == (row["model"], row["tokens"])]
    if row["attention"] == "full":
        timed = [{ATTENTION: layer["full ms"] / 1e3} for layer in same]
    else:
        same = [layer for layer in same if abs(layer["kept"] - row["kept"]) < _SAME_SHARE]
        timed = [  # `total ms`: both in one program
            {SELECTION: each["selection ms"] / 1e3, ATTENTION: (each["total ms"] - each["selection ms"]) / 1e3}
            for each in same
        ]
    if not timed:
        return {}
    fastest = min(timed, key=lambda each: sum(each.values()))
    parts = {stage: CONFIGS[row["model"]].num_layers * seconds for stage, seconds in fastest.items()}
    return {**parts, REST: max(0.0, row["TTFT s"] - sum(parts.values()))}


def _longest(record: Row, *columns: str) -> list[Row]:
    """Rows of the longest prompts that have all of these columns."""
    rows = [row for row in record.get("rows", ()) if set(columns) <= row.keys()]
    return [row for row in rows if row["tokens"] == max(each["tokens"] for each in rows)]
