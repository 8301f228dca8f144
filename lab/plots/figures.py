"""What all plots share: colors, resolution, text that the font can draw, and files that are written whole."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from tca_jax.errors import UserError
from tca_jax.files import replacing

KEPT_COLORS = "YlGnBu"  # light: little is kept, dark: all is
DPI = 150
_MARKER, _LABEL, _LETTER = 10.0, 7.0, 4.6  # points: size of a marker, of a label's letters, and width of one
_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))  # of a point, the best first
MAX_TOKEN_TEXT = 12
_VISIBLE = {"\n": "↵", "\r": "↵", "\t": "→", " ": "·"}


def visible(token: str) -> str:
    """`token` cut to a legible length, with visible white space, and a box for what the font cannot draw."""
    cut = token if len(token) <= MAX_TOKEN_TEXT else token[: MAX_TOKEN_TEXT - 1] + "…"
    shown = (_VISIBLE.get(char, char) for char in cut)
    return "".join(char if ord(char) in drawable() else "□" for char in shown)


@functools.cache
def drawable() -> frozenset[int]:
    """Code points that the monospace font has."""
    return frozenset(FT2Font(font_manager.findfont("monospace")).get_charmap())


def require_png(path: str | os.PathLike[str]) -> None:
    """Raises ValueError unless the name ends in .png or, as a pipe's may, has no ending."""
    if Path(path).suffix.lower() not in ("", ".png"):
        raise UserError(f"{os.fspath(path)}: pictures are PNG files; the name must end in .png")


def write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure as a PNG; no display and no pyplot state is involved.

    Raises:
        ValueError: the file's name ends in something else than .png.
    """
    require_png(path)
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return Path(path)


def palette(count: int) -> list[Any]:
    """Colors that all differ, the ten most different first."""
    colors = [colormaps["tab20"](number) for number in range(20)]
    if count > len(colors):
        return list(colormaps["turbo"](np.linspace(0.05, 0.95, count)))
    return [*colors[::2], *colors[1::2]][:count]


def label_lone_points(panels: Sequence[Axes], text: Callable[[float], str]) -> None:
    """Writes the height of each line of one point beside it, as `text` gives it, where that covers nothing else.

    The scales of the panels must be as they are drawn.
    """
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # places the panels
    for axes in panels:
        marked = [line for line in axes.get_lines() if line.get_marker() not in ("None", "", None)]
        drawn = {line: axes.transData.transform(_points(line)) for line in marked}
        taken = [_box(x, y, _MARKER, _MARKER, figure.dpi) for places in drawn.values() for x, y in places]
        for line, places in drawn.items():
            if len(places) == 1:
                label = text(float(_points(line)[0, 1]))
                taken += _label(axes, line, label, places[0], taken, figure.dpi)


def _points(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xydata())


def _label(axes: Axes, line: Line2D, label: str, place: np.ndarray, taken: Sequence[Bbox], dpi: float) -> list[Bbox]:
    """Writes a label beside a line's one point, which is at a place in pixels; its box, or none where all is taken."""
    width, away = _LETTER * len(label), _MARKER / 2 + 2
    for right, up in _SIDES:
        dx, dy = right * (away + width / 2), up * (away + _LABEL / 2)
        box = _box(place[0] + dx * dpi / 72, place[1] + dy * dpi / 72, width, _LABEL, dpi)
        inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
        if inside and not any(box.overlaps(other) for other in taken):
            _write(axes, line, label, (dx, dy))
            return [box]
    return []


def _write(axes: Axes, line: Line2D, label: str, offset: tuple[float, float]) -> None:
    """Writes a label so many points away from a line's one point."""
    x, y = _points(line)[0]
    axes.annotate(
        label,
        (float(x), float(y)),
        offset,
        textcoords="offset points",
        ha="center",
        va="center",
        in_layout=False,
        fontsize=_LABEL,
        color=line.get_color(),
        bbox={"facecolor": "white", "linewidth": 0, "pad": 0.5},
    )


def _box(x: float, y: float, width: float, height: float, dpi: float) -> Bbox:
    """A box around a place in pixels; its size is in points."""
    w, h = width * dpi / 72, height * dpi / 72
    return Bbox.from_bounds(x - w / 2, y - h / 2, w, h)


def titled(text: str, name: str) -> str:
    """A title with the name that it is about, on a line of its own and cut at its beginning where it is long."""
    shown = name if len(name) <= 70 else "…" + name[-69:]
    return text + ("\n" if len(shown) > 25 else " ") + f"({shown})"
