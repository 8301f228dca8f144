"""Methods as curves: right answers against cache bytes, loss against the attended share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, PercentFormatter

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures
from tca_jax.lab.recall.protocols import require_protocol

BASELINE = "full"  # drawn as a dashed line
MOST_CURVES = 6
Point = tuple[str, float, float]  # method, x, y
Models = Mapping[str, Mapping[str, Any]]  # name to {"tokens": 8192, "points": [{"method": "tca", ...}, ...]}

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # ticks of the logarithmic axis
_RISES = (-0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 10.0)
_LINEAR = 0.01  # loss over full attention's; smaller ones are on a linear scale, larger ones on a logarithmic one


def plot_accuracy(panels: Mapping[str, Sequence[Point]], title: str, path: str | os.PathLike[str]) -> Path:
    """Draws right answers against the bytes of the KV cache.

    Args:
        panels: By heading, points (method, share of full attention's bytes, share of right answers).
        title: Of the picture.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.
    """
    return figures.write(_answers(panels, title), path)


def plot_keeping(models: Models, path: str | os.PathLike[str], *, protocol: str = "late") -> Path:
    """Draws right answers against the bytes of the KV cache: a panel a model, at most six methods.

    Args:
        models: By name, "points" with a "method", a "kv_share" and the share of right answers under `protocol`; points
            that lack one are left out.
        path: PNG file to write; missing folders are created.
        protocol: "late", "preamble" or "prefix".

    Returns:
        `path`.

    Raises:
        ValueError: there is no such protocol, or a model has no such point.
    """
    require_protocol(protocol)
    panels = _panels(models, lambda point: (point["kv_share"], point[protocol]))
    return figures.write(_answers(panels, f"Right answers by the KV cache, {protocol} questions"), path)


def plot_reading(models: Models, path: str | os.PathLike[str]) -> Path:
    """Draws loss inside the text, over full attention's, against the attended share, both on marked scales.

    Args:
        models: By name, "points" with a "method", an "attended_share", and the losses "inside" and "inside_full" in
            nats per token; points that lack one are left out.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.

    Raises:
        ValueError: a model has no such point.
    """
    panels = _panels(models, lambda point: (point["attended_share"], point["inside"] / point["inside_full"] - 1))
    figure, drawn = _draw(panels, "Loss inside the text by the attended share")
    points = [point for panel in panels.values() for point in panel]
    least, highest = min(x for _, x, _ in points), max(_LINEAR, *(1.5 * y for *_, y in points))
    for axes in drawn:
        axes.set(xscale="log", xlim=(min(0.8 * least, 0.5), 1.15), ylim=(-_LINEAR / 2, highest))
        axes.set_yscale("symlog", linthresh=_LINEAR)
        axes.set_xticks([share for share in _SHARES if share >= 0.8 * least])
        axes.set_yticks([rise for rise in _RISES if -_LINEAR / 2 <= rise <= highest])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g}%" if value else "0%"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.axhspan(-_LINEAR / 2, _LINEAR, color="#F0F0F0", zorder=0)
        axes.set_xlabel("attended share of causal pairs (logarithmic)")
    drawn[0].set_ylabel("loss over full attention's\n(grey: linear; above: logarithmic)")
    return figures.write(_finished(figure, drawn), path)


def shown_methods(methods: Sequence[str]) -> list[str]:
    """At most six methods: those with a color of their own first, in its table's order."""
    ranks = {name: rank for rank, name in enumerate(figures.METHOD_COLORS)}
    return sorted(dict.fromkeys(methods), key=lambda name: ranks.get(name, len(ranks)))[:MOST_CURVES]


def _answers(panels: Mapping[str, Sequence[Point]], title: str) -> Figure:
    figure, drawn = _draw(panels, title)
    widest = max(1.0, *(x for panel in panels.values() for _, x, _ in panel))
    for axes in drawn:
        axes.set(xlim=(0, 1.05 * widest), ylim=(0, 1.05), xlabel="KV cache bytes, of full attention's")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    drawn[0].set_ylabel("right answers")
    return _finished(figure, drawn)


def _panels(models: Models, place: Any) -> dict[str, list[Point]]:
    """Points of each model, by its name and length, that have all numbers."""
    panels: dict[str, list[Point]] = {}
    for name, model in models.items():
        points: list[Point] = []
        for point in model["points"]:
            try:
                x, y = map(float, place(point))
            except (KeyError, TypeError):  # a number is missing or None
                continue
            points.append((point["method"], x, y))
        if not points:
            raise UserError(f"models[{name!r}] has no point with the numbers of this picture")
        panels[f"{name}, {model['tokens']:,} tokens" if "tokens" in model else name] = points
    return panels


def _draw(panels: Mapping[str, Sequence[Point]], title: str) -> tuple[Figure, list[Axes]]:
    """Panels side by side, a curve a method; the baseline is a dashed line."""
    figure = Figure(figsize=(1 + 4.6 * len(panels), 4.4), dpi=figures.DPI, layout="constrained")
    drawn = list(figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0])
    methods = {method for points in panels.values() for method, *_ in points}
    shown = shown_methods([method for points in panels.values() for method, *_ in points])
    left_out = len(methods) - len(shown)
    figure.suptitle(title + (f" ({left_out} more methods in the file)" if left_out else ""), parse_math=False)
    for axes, (heading, points) in zip(drawn, panels.items(), strict=True):
        for method in shown:
            if line := sorted((x, y) for name, x, y in points if name == method):
                x, y = zip(*line, strict=True)
                axes.plot(x, y, "o-", label=method, color=figures.method_color(method), markersize=4, clip_on=False)
                if method == BASELINE:
                    axes.axhline(max(y), color="#A0A0A0", linewidth=0.8, linestyle="--", zorder=1)
        axes.set_title(heading, fontsize=10, parse_math=False)
        axes.grid(alpha=0.25)
    return figure, drawn


def _finished(figure: Figure, drawn: Sequence[Axes]) -> Figure:
    """Names at the ends of the curves, beside each panel."""
    for axes in drawn:
        figures.label_ends(axes, 0.05)
    return figure
