"""Bars of stages, from results of benchmarks or statistics of a call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from tca_jax.lab.plots import figures

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LABELLED = 0.05  # of the longest bar: shorter stages have no room for their figure


def plot_latency(bars: Mapping[str, Mapping[str, float]], title: str, path: str | os.PathLike[str]) -> Path:
    """Draws a bar for each run, made of its stages.

    Args:
        bars: Seconds of each stage by the run's name, as `results.latency_bars` reads them; all runs have the same
            stages or a part of them.
        title: Of the picture.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.
    """
    longest = max(sum(stages.values()) for stages in bars.values())
    factor, unit = next((each for each in _UNITS if longest >= each[0]), _UNITS[-1])
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(bars)), dpi=figures.DPI, layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(stage for stages in bars.values() for stage in stages))
    left = [0.0] * len(bars)
    for stage, color in zip(names, figures.palette(len(names)), strict=True):
        seconds = [stages.get(stage, 0.0) / factor for stages in bars.values()]
        drawn = axes.barh(range(len(bars)), seconds, left=left, height=0.7, label=stage, color=color)
        texts = [f"{each:.3g}" if each * factor >= _LABELLED * longest else "" for each in seconds]
        axes.bar_label(drawn, texts, label_type="center", fontsize=8)
        left = [before + own for before, own in zip(left, seconds, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f" {total:.3g} {unit}", (total, row), va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), list(bars), parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), fontsize=9)
    return figures.write(figure, path)
