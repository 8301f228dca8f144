"""Accuracy against bytes: what each method answers right, by the share of the KV cache that it holds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from tca_jax.plots import figures

_MARKERS = "osD^vP*X<>"
_COLUMNS = 3
_BASELINE = "full"  # drawn as a line that all others are measured by

#: Method, share of full attention's KV cache bytes, accuracy.
Point = tuple[str, float, float]


def plot_accuracy(panels: Mapping[str, Sequence[Point]], title: str, path: str | os.PathLike[str]) -> Path:
    """Draws accuracy against the bytes of the KV cache, a panel for each protocol, length or task.

    Args:
        panels: Points by the heading of their panel. Points of one method are joined by a line.
        title: What stands above.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.

    Raises:
        ValueError: there is no point, or one is negative, not finite, or of an accuracy above 1.
    """
    points = [point for panel in panels.values() for point in panel]
    if not points or not all(panels.values()):
        raise ValueError("panels is empty or holds an empty panel: each must hold a point or more")
    for point in points:
        if not all(math.isfinite(value) and value >= 0 for value in point[1:]) or point[2] > 1:
            raise ValueError(f"panels holds {point}: must be (method, share of bytes, accuracy in [0, 1])")
    methods = list(dict.fromkeys(method for method, *_ in points))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 1.2 + 3.6 * rows), dpi=figures.DPI, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    legend: dict[str, Any] = {}
    for axes, (heading, panel) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, panel, methods)
        axes.set_title(heading, fontsize=10, parse_math=False)
        legend |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_xlim(0, 1.05 * max(1.0, *(share for _, share, _ in points)))
    grid[0, 0].set_ylim(0, 1.05)
    for axes in grid[-1]:
        axes.set_xlabel("KV cache bytes, of full attention's")
    for axes in grid[:, 0]:
        axes.set_ylabel("right answers")
    figure.suptitle(title, parse_math=False)
    figure.legend(
        legend.values(), legend, loc="outside lower center", ncols=min(2 * columns, 5, len(legend)), fontsize=9
    )
    return figures.write(figure, path)


def _draw_panel(axes: Axes, panel: Sequence[Point], methods: Sequence[str]) -> None:
    """The points of each method, joined in the order of their bytes; full attention's accuracy as a line across."""
    for number, method in enumerate(methods):
        line = np.array(sorted((share, right) for name, share, right in panel if name == method))
        if not line.size:
            continue
        color = "black" if method == _BASELINE else f"C{number % 10}"
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(*line.T, linewidth=1, markersize=7, color=color, marker=marker, label=method)
        if method == _BASELINE:
            axes.axhline(line[:, 1].max(), color="#A0A0A0", linewidth=0.8, linestyle="--")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.25)
