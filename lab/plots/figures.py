"""Shared by all pictures: colors, resolution, labels, text that the font can draw, and complete files."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font

from tca_jax.errors import UserError
from tca_jax.files import replacing

KEPT_COLORS = "YlGnBu"  # light: little is kept, dark: all is
MARK_COLOR = "#D55E00"  # vermillion stands out from it, also for the color-blind
DPI = 150

#: One color a method in all pictures, the methods that are drawn first in front.
METHOD_COLORS = {
    "full": "#000000",
    "TCA": "#D55E00",
    "TCA, pairs": "#D55E00",
    "tca": "#D55E00",
    "TCA, default probes": "#E69F00",
    "duoattention": "#0072B2",
    "kvzip": "#009E73",
    "minference": "#56B4E9",
    "xattention": "#8C564B",
    "keydiff": "#CC79A7",
    "snapkv": "#7B3FA0",
    "streaming": "#7F7F7F",
    "flexprefill": "#B5A000",
    "paper()": "#4D4D9F",
}


def method_color(method: str) -> Any:
    """The color of a method, the same in each picture."""
    return METHOD_COLORS.get(method) or colormaps["tab20"](sum(map(ord, method)) % 20)


@functools.cache
def drawable() -> frozenset[int]:
    """Code points that the monospace font has."""
    return frozenset(FT2Font(font_manager.findfont("monospace")).get_charmap())


def require_png(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless the name ends in .png or, as a pipe's may, has no ending."""
    if Path(path).suffix.lower() not in ("", ".png"):
        raise UserError(f"{os.fspath(path)}: pictures are PNG files; the name must end in .png")


def write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure as a PNG; needs no display and leaves pyplot alone."""
    require_png(path)
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return Path(path)


def palette(count: int) -> list[Any]:
    """Distinct colors, the ten most different first."""
    colors = [colormaps["tab20"](number) for number in range(20)]
    return [*colors[::2], *colors[1::2]][:count]


def label_ends(axes: Axes, height: float) -> None:
    """Writes the name of each line at its right end, apart by `height` of the axes at least, inside of them."""
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [axes.transLimits.transform(axes.transScale.transform(np.asarray(line.get_xydata())[-1])) for line in named]
    order = sorted(range(len(named)), key=lambda i: ends[i][1])
    places = [float(ends[i][1]) for i in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + height)
    highest = 0.98
    for i in reversed(range(len(places))):
        places[i] = min(places[i], highest)
        highest = places[i] - height
    for i, y in zip(order, places, strict=True):
        label = axes.text(ends[i][0] + 0.03, y, str(named[i].get_label()), transform=axes.transAxes)
        label.set(fontsize=8, color=named[i].get_color(), verticalalignment="center")


def titled(text: str, name: str) -> str:
    """A title with a name, on its own line and cut at its beginning where it is long."""
    shown = name if len(name) <= 70 else "…" + name[-69:]
    return text + ("\n" if len(shown) > 25 else " ") + f"({shown})"
