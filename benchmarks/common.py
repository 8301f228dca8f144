"""What the benchmarks share: shapes of real models, timing against a baseline, and result files."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tca_jax
from tca_jax.calibrate.candidates import eviction_budgets

RESULTS = Path(__file__).parent / "results"
_SAMPLE_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attention shape of one layer of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int


LAYERS = {
    "llama3.1-8b": Layer("llama3.1-8b", 32, 8, 128),
    "qwen2.5-7b": Layer("qwen2.5-7b", 28, 4, 128),
}


def candidates_that_keep(config: tca_jax.TCAConfig, kv_heads: int, share: float) -> tuple[int, ...]:
    """Budget rows for each KV head whose mean share of a ranked block is as near to `share` as two rows allow.

    Heads alternate between the two neighbouring rows, so budgets are unequal, as they are after calibration.
    """
    shares = eviction_budgets(config) / config.block_size
    below = int(np.clip(np.searchsorted(shares, share, side="right") - 1, 0, len(shares) - 2))
    above = below + 1
    denser = round(kv_heads * float(np.clip((share - shares[below]) / (shares[above] - shares[below]), 0, 1)))
    rows = [above] * denser + [below] * (kv_heads - denser)
    return tuple(rows[i] for i in np.random.default_rng(0).permutation(kv_heads))


def time_alternating(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns after a warm-up, so that clocks and heat are shared.

    A sample queues as many calls as take about 20 ms and waits for the last: the host's own time stays out of it.
    """
    queued = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        queued[name] = max(1, min(50, int(_SAMPLE_SECONDS / (time.perf_counter() - start))))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(queued[name]):
                result = call()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / queued[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """||out - expected|| / ||expected|| in float64 on the host; NaN stays NaN."""
    a, b = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def environment() -> dict[str, str]:
    """Card, versions and the command, for the result files."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": getattr(device.client, "platform_version", device.platform).splitlines()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
        "tca_jax": tca_jax.__version__,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_options_that_count()]),
        "date": time.strftime("%Y-%m-%d"),
    }


def _options_that_count() -> list[str]:
    """The command line without the folder that results were written to."""
    options = sys.argv[1:]
    if "--out" in options:
        at = options.index("--out")
        del options[at : at + 2]
    return options


def write_results(name: str, title: str, rows: Sequence[Mapping[str, Any]], out: Path, note: str = "") -> None:
    """Writes `name`.json and `name`.md, and prints the table."""
    out.mkdir(parents=True, exist_ok=True)
    record = {"title": title, "environment": environment(), "rows": [dict(row) for row in rows]}
    (out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    table = markdown_table(rows)
    lines = [f"{key}: {value}" for key, value in environment().items()]
    text = f"# {title}\n\n{note}\n\n{table}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    (out / f"{name}.md").write_text(text)
    print(table, flush=True)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table; floats with three significant digits or more."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    body = ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
