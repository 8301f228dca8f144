"""Accuracy against bytes: what each method answers right, by the share of the KV cache that it holds."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import PercentFormatter

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.curves import BASELINE, Curves, draw_curves

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
        raise UserError("panels is empty or holds an empty panel: each must hold a point or more")
    for point in points:
        if not all(math.isfinite(value) and value >= 0 for value in point[1:]) or point[2] > 1:
            raise UserError(f"panels holds {point}: must be (method, share of bytes, accuracy in [0, 1])")
    curves = {heading: _by_bytes(panel) for heading, panel in panels.items()}
    figure, drawn = draw_curves(curves, title, "KV cache bytes, of full attention's", "right answers")
    drawn[0].set_xlim(0, 1.05 * max(1.0, *(share for _, share, _ in points)))
    drawn[0].set_ylim(0, 1.05)
    for axes, methods in zip(drawn, curves.values(), strict=True):
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if BASELINE in methods:
            best = max(right for _, right in methods[BASELINE])
            axes.axhline(best, color="#A0A0A0", linewidth=0.8, linestyle="--", zorder=1)
    figures.label_lone_points(drawn, "{:.0%}".format)
    return figures.write(figure, path)


def _by_bytes(panel: Sequence[Point]) -> Curves:
    """The points of each method in the order of their bytes."""
    methods = dict.fromkeys(method for method, *_ in panel)
    return {method: sorted((share, right) for name, share, right in panel if name == method) for method in methods}
