"""What all plots share: colors, resolution, text that the font can draw, and files that are written whole."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font

from tca_jax.errors import UserError
from tca_jax.files import replacing

KEPT_COLORS = "YlGnBu"  # light: little is kept, dark: all is
DPI = 150
_SUFFIXES = ("", ".png")  # what is no regular file, such as a pipe, may have none
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


def write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure as a PNG; no display and no pyplot state is involved.

    Raises:
        ValueError: the file's name ends in something else than .png.
    """
    if Path(path).suffix.lower() not in _SUFFIXES:
        raise UserError(f"{os.fspath(path)}: pictures are PNG files; the name must end in .png")
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return Path(path)


def titled(text: str, name: str) -> str:
    """A title with the name that it is about, on a line of its own and cut at its beginning where it is long."""
    shown = name if len(name) <= 70 else "…" + name[-69:]
    return text + ("\n" if len(shown) > 25 else " ") + f"({shown})"
