"""Where the time goes: bars of stages, from results of benchmarks or statistics of a call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LABELLED = 0.05  # of the longest bar: shorter parts have no room for their figure, which stands behind the bar


def plot_latency(bars: Mapping[str, Mapping[str, float]], title: str, path: str | os.PathLike[str]) -> Path:
    """Draws a bar for each run, made of its stages.

    Args:
        bars: Stages of each run by its name, in their order, in seconds; `results.latency_bars` reads them from files.
            Stages of the same name have the same color; a run may lack some.
        title: What stands above.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.

    Raises:
        ValueError: there is no bar, or one has no stage, or a time is negative or not finite.
    """
    for name, stages in bars.items():
        if not stages or not all(np.isfinite(seconds) and seconds >= 0 for seconds in stages.values()):
            raise UserError(f"bars[{name!r}] = {dict(stages)}: must be stages with seconds of at least 0")
    if not bars:
        raise UserError("bars is empty: must hold a run or more")
    totals = [sum(stages.values()) for stages in bars.values()]
    factor, unit = next((each for each in _UNITS if max(totals) >= each[0]), _UNITS[-1])
    names = _in_order(bars.values())
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(bars)), dpi=figures.DPI, layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(bars))
    room = _LABELLED * max(totals)
    for stage, color in zip(names, figures.palette(len(names)), strict=True):
        seconds = np.array([stages.get(stage, 0.0) for stages in bars.values()])
        drawn = axes.barh(range(len(bars)), seconds / factor, left=left / factor, height=0.7, label=stage, color=color)
        drawn_in = [f"{each / factor:.3g}" if each >= room else "" for each in seconds]
        axes.bar_label(drawn, drawn_in, label_type="center", fontsize=8)
        left += seconds
    for row, (stages, total) in enumerate(zip(bars.values(), totals, strict=True)):
        narrow = ", ".join(f"{stage} {each / factor:.2g}" for stage, each in stages.items() if 0 < each < room)
        text = f" {total / factor:.3g} {unit}" + (f" ({narrow})" if narrow else "")
        axes.annotate(text, (total / factor, row), va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), list(bars), parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * max(totals) / factor)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), fontsize=9)
    return figures.write(figure, path)


def _in_order(runs: Iterable[Mapping[str, float]]) -> list[str]:
    """All stages, each behind those that come before it in the runs; where runs disagree, the earlier one counts."""
    names: list[str] = []
    for stages in runs:
        place = 0
        for stage in stages:
            if stage in names:
                place = names.index(stage) + 1
            else:
                names.insert(place, stage)
                place += 1
    return names
