"""What methods cost and lose: loss inside the text against the attended share, late answers against cache bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, PercentFormatter

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.curves import Curves, draw_curves
from tca_jax.lab.recall.protocols import PROTOCOLS, require_protocol

#: By name: `{"tokens": 8192, "points": [{"method": "tca", ...}, ...]}`.
Models = Mapping[str, Mapping[str, Any]]

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # ticks of a logarithmic axis
_RISES = (-0.1, -0.01, 0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 10.0)
_LINEAR = 0.01  # losses nearer to full attention's than this are on a linear scale, larger ones on a logarithmic one


def plot_reading(models: Models, path: str | os.PathLike[str]) -> Path:
    """Draws loss inside the text, over full attention's, against the attended share: a panel a model, a curve a method.

    Args:
        models: By name, "points" with a "method", an "attended_share", and the losses "inside" and "inside_full" in
            nats per token; with "tokens", the title names the length. Points of one method are joined in the order of
            their shares. A point that lacks one of these, or has None, is left out.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.

    Raises:
        ValueError: there is no model, a model has no such point, or a number is not finite and positive.
    """
    panels = _panels(
        models,
        ("attended_share", "inside", "inside_full"),
        lambda point: (point["attended_share"], point["inside"] / point["inside_full"] - 1),
    )
    title = "Loss inside the text by the share of its pairs attended to"
    figure, drawn = draw_curves(panels, title, "attended share of query-key pairs", "loss over full attention's")
    shares, rises = zip(*_points(panels), strict=True)
    least, lowest, highest = min(shares), min(1.5 * min(rises), -_LINEAR / 5), max(1.5 * max(rises), _LINEAR)
    drawn[0].set_xscale("log")
    drawn[0].set_xlim(min(0.8 * least, 0.5), 1.15)
    drawn[0].set_yscale("symlog", linthresh=_LINEAR)
    drawn[0].set_ylim(lowest, highest)
    for axes in drawn:
        axes.axhline(0, color="#A0A0A0", linewidth=0.8, linestyle="--", zorder=1)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([share for share in _SHARES if share >= 0.8 * least])
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_yticks([rise for rise in _RISES if lowest <= rise <= highest])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g}%" if value else "0%"))
        axes.yaxis.set_minor_locator(NullLocator())
    figures.label_lone_points(drawn, lambda rise: f"{100 * rise:+.2g}%" if rise else "0%")
    return figures.write(figure, path)


def plot_keeping(models: Models, path: str | os.PathLike[str], *, protocol: str = "late") -> Path:
    """Draws right answers against the bytes of the KV cache: a panel a model, a curve a method.

    Args:
        models: As for `plot_reading`; points have a "method", a "kv_share" of full attention's bytes and the share of
            right answers under the protocol's name.
        path: PNG file to write; missing folders are created.
        protocol: "late", "preamble" or "prefix".

    Returns:
        `path`.

    Raises:
        ValueError: there is no such protocol, there is no model, a model has no such point, a share is not finite and
            positive, or answers are not in [0, 1].
    """
    require_protocol(protocol)
    panels = _panels(models, ("kv_share", protocol), lambda point: (point["kv_share"], point[protocol]))
    title = f"Right answers by the KV cache, {protocol} questions"
    figure, drawn = draw_curves(panels, title, "KV cache bytes, of full attention's", f"right answers, {protocol}")
    drawn[0].set_xlim(0, 1.05 * max(1.0, *(share for share, _ in _points(panels))))
    drawn[0].set_ylim(0, 1.05)
    for axes in drawn:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figures.label_lone_points(drawn, "{:.0%}".format)
    return figures.write(figure, path)


def _panels(
    models: Models, needed: tuple[str, ...], place: Callable[[Mapping[str, float]], tuple[float, float]]
) -> dict[str, Curves]:
    """Curves of every model, by its name and length, from the points that have all numbers."""
    if not models:
        raise UserError("models is empty: at least one is needed")
    panels: dict[str, Curves] = {}
    for name, model in models.items():
        curves: dict[str, list[tuple[float, float]]] = {}
        for point in model["points"]:
            if any(point.get(number) is None for number in needed):
                continue
            for number in needed:
                if not _is_allowed(number, point[number]):
                    allowed = "lie in [0, 1]" if number in PROTOCOLS else "be a positive number"
                    raise UserError(f"models[{name!r}]: {number} = {point[number]!r}: must {allowed}")
            curves.setdefault(point["method"], []).append(place(point))
        if not curves:
            raise UserError(f"models[{name!r}] has no point with {' and '.join(needed)}")
        heading = f"{name}, {model['tokens']:,} tokens" if "tokens" in model else name
        panels[heading] = {method: sorted(points) for method, points in curves.items()}
    return panels


def _points(panels: Mapping[str, Curves]) -> list[tuple[float, float]]:
    """Of all methods in all panels."""
    return [point for curves in panels.values() for points in curves.values() for point in points]


def _is_allowed(name: str, value: Any) -> bool:
    """Whether it is a share of right answers for a protocol, a finite number above 0 for others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return 0 <= value <= 1 if name in PROTOCOLS else value > 0
