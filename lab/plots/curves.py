"""Panels in which each method is a line of points: what plots of accuracy and pictures of an evaluation share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tca_jax.lab.plots import figures

BASELINE = "full"  # what all others are measured by

#: Points (x, y) of each method, joined in this order.
Curves = Mapping[str, Sequence[tuple[float, float]]]

_MARKERS = "osD^vP*X<>hp"
_COLUMNS = 3


def draw_curves(
    panels: Mapping[str, Curves], title: str, xlabel: str, ylabel: str, *, same_x: bool = True
) -> tuple[Figure, list[Axes]]:
    """Draws panels side by side, three to a row; a method looks the same in all of them, and one legend names it.

    Args:
        panels: At least one, by what stands above it.
        title: What stands above all.
        xlabel: Of every column.
        ylabel: Of every row.
        same_x: Whether the panels share their horizontal scale; they always share the vertical one.

    Returns:
        The figure, and the axes of the panels in their order.
    """
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 4.2 * columns, 1.2 + 3.6 * rows), dpi=figures.DPI, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=same_x, sharey=True, squeeze=False)
    used = list(grid.flat[: len(panels)])
    styles = _styles([method for curves in panels.values() for method in curves])
    legend: dict[str, Any] = {}
    for number, (axes, (heading, curves)) in enumerate(zip(used, panels.items(), strict=True)):
        for method, points in curves.items():
            # Markers at an end of a scale are drawn whole, over the frame.
            (legend[method],) = axes.plot(*zip(*points, strict=True), label=method, clip_on=False, **styles[method])
        axes.set_title(heading, fontsize=10, parse_math=False)
        axes.grid(alpha=0.25)
        if number + columns >= len(used):  # the lowest of its column
            axes.set_xlabel(xlabel)
            axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    figure.suptitle(title, parse_math=False)
    named = [method for method in styles if method in legend]
    handles = [legend[method] for method in named]
    figure.legend(handles, named, loc="outside lower center", ncols=min(2 * columns, 5, len(named)), fontsize=9)
    return figure, used


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each method is drawn, the baseline first: it is seen where points of another method cover it.

    The others look alike whether or not it is drawn.
    """
    others = [name for name in dict.fromkeys(methods) if name != BASELINE]
    names, colors = [BASELINE, *others], figures.palette(1 + len(others))
    styles: dict[str, dict[str, Any]] = {}
    for number, (name, color) in enumerate(zip(names, colors, strict=True)):
        marker = _MARKERS[number % len(_MARKERS)]
        styles[name] = {"linewidth": 1, "markersize": 7, "color": color, "marker": marker}
    hollow = {"markersize": 10, "markerfacecolor": "none", "markeredgewidth": 1.5, "linestyle": "--"}
    styles[BASELINE] |= {"color": "black", **hollow}
    return styles
