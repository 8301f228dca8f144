"""Shared by all pictures: colors, resolution, titles, and complete files."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.figure import Figure

from tca_jax.errors import require
from tca_jax.files import replacing

PathLike = str | os.PathLike[str]

KEPT_COLORS = "YlGnBu"  # light: little is kept, dark: all is
MARK_COLOR = "#D55E00"  # vermillion stands out from it, also for the color-blind
DPI = 150

#: One color a method in all pictures, the methods that are drawn first in front.
METHOD_COLORS = {
    "full": "#000000",
    "predicted worth": "#D55E00",
    "TCA": "#D55E00",
    "tca": "#D55E00",
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


def titled(text: str, name: str) -> str:
    """A title with a name, on its own line and cut at its beginning where it is long."""
    shown = name if len(name) <= 70 else "…" + name[-69:]
    return text + ("\n" if len(shown) > 25 else " ") + f"({shown})"


def require_png(path: PathLike, option: str = "") -> None:
    """Raises ValueError unless the name ends in .png or, as a pipe's may, has no ending."""
    allowed = Path(path).suffix.lower() in ("", ".png")
    require(allowed, f"{option}{os.fspath(path)}: pictures are PNG files; the name must end in .png")


def write(figure: Figure, path: PathLike) -> Path:
    """Writes the figure as a PNG; needs no display and leaves pyplot alone."""
    require_png(path)
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return Path(path)
