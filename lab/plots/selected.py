"""Selected tokens over the text: kept shares by block, and a page of the prompt, shaded by the heads that keep it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import Affine2D

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.attention import draw_rows
from tca_jax.lab.plots.figures import KEPT_COLORS, MARK_COLOR, drawable

_COLUMNS = 110  # characters of a line
_LINES = 24
_BEFORE = 8  # lines of a page above a marked span
_FONT = FontProperties(family="monospace", size=8)
_ADVANCE = 0.602 * 8 / 72  # inches of a character of that font, DejaVu Sans Mono's 1233 of 2048 units
_LINE_HEIGHT = 0.165  # inches
_MARGIN, _RIGHT = 0.75, 1.35  # inches: labels left of the page, a color bar right of it
_MOST_BLOCKS = 512  # columns of the overview: as many as it has pixels for


def plot_selected_tokens(
    kept: Bool[np.ndarray, "layers Hkv L"],
    tokens: Sequence[str],
    name: str,
    path: str | os.PathLike[str],
    *,
    start: int = 0,
    span: tuple[int, int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    block_size: int = 128,
    window_start: int | None = None,
) -> Path:
    """Draws the share that every head keeps of each block of a prompt, and a page of the text, shaded by kept tokens.

    Args:
        kept: The tokens of a prompt that each head keeps, from `kept_tokens`.
        tokens: Text of each of the L tokens, from `token_texts`.
        name: Name of the model and its method in the title.
        path: PNG file to write; missing folders are created.
        start: First token of the page, which has 24 lines of 110 characters.
        span: Tokens to outline, first and past the last; the page then begins some lines before them.
        layer: Shade the page by the heads of this layer alone. Heads that keep all of the prompt do not count, unless
            they alone keep a token of the span.
        head: Shade it by this KV head alone.
        block_size: Tokens in a cell of the overview; more where there would be over 512 cells.
        window_start: First token of the local window, to be marked.

    Returns:
        `path`.

    Raises:
        ValueError: `tokens` does not have the prompt's length, or `start`, `span`, `layer` or `head` does not exist.
    """
    layers, heads, num_tokens = kept.shape
    if len(tokens) != num_tokens:
        raise UserError(f"tokens has {len(tokens)} entries: must have one for each of the {num_tokens} in kept")
    bounds = (("start", start, num_tokens), ("layer", layer, layers), ("head", head, heads))
    for option, value, most in (*bounds, ("span", span and span[1] - 1, num_tokens)):
        if value is not None and not 0 <= value < most:
            raise UserError(f"{option} = {value}: must lie in [0, {most - 1}]")
    if span is not None:
        start = _page_start(tokens, span[0])
    counted = _sparse(kept[_one(layer)][:, _one(head)], span)
    pieces, shown = lay_out(tokens[start:])
    lines = 1 + pieces[-1].line
    overview_height = float(np.clip(0.4 + 0.07 * layers * heads, 1.6, 4))
    figure, overview, page, bar = _panels(overview_height, lines * _LINE_HEIGHT)
    figure.suptitle(figures.titled(f"Kept tokens of a prompt of {num_tokens:,}", name), parse_math=False)
    _draw_overview(overview, kept, max(block_size, -(-num_tokens // _MOST_BLOCKS)), window_start)
    overview.axvspan(start, start + shown, ymax=0.02, color="#404040")
    shades = _draw_page(page, pieces, counted.mean(axis=0)[start:], lines)
    if span is not None:
        overview.axvline(sum(span) / 2, color=MARK_COLOR, linewidth=1)
        marked = [piece for piece in pieces if span[0] <= start + piece.token < span[1]]
        for line in dict.fromkeys(piece.line for piece in marked):
            own = [piece for piece in marked if piece.line == line]
            width = own[-1].column + len(own[-1].text) - own[0].column
            page.add_patch(Rectangle((own[0].column, line), width, 1, fill=False, edgecolor=MARK_COLOR))
    whose = "".join(f"{part} {n}, " for part, n in (("layer", layer), ("KV head", head)) if n is not None)
    title = f"Tokens {start:,} to {start + shown - 1:,}, shaded by the heads that keep them"
    page.set_title(f"{title} ({whose}{len(counted)} of {layers * heads} heads)", fontsize=10)
    figure.colorbar(shades, cax=bar, format=PercentFormatter(1.0)).set_label("heads that keep the token")
    return figures.write(figure, path)


def _one(number: int | None) -> slice:
    """The index of one layer or head, or of all."""
    return slice(None) if number is None else slice(number, number + 1)


def _sparse(kept: Bool[np.ndarray, "layers Hkv L"], span: tuple[int, int] | None) -> Bool[np.ndarray, "heads L"]:
    """The heads that drop a token, which alone distinguish tokens; all where none of these keeps the span."""
    rows = kept.reshape(-1, kept.shape[-1])
    drops = rows[~rows.all(axis=-1)]
    return drops if len(drops) and (span is None or drops[:, slice(*span)].any()) else rows


def _page_start(tokens: Sequence[str], marked: int) -> int:
    """A token some lines before a marked one, at the beginning of a line where there is one."""
    start, characters = marked, 0
    while start > 0 and characters < _BEFORE * _COLUMNS // 2:
        start -= 1
        characters += len(tokens[start])
    ends = [i + 1 for i in range(start, marked) if "\n" in tokens[i]]
    return ends[0] if ends and start else start


class Piece(NamedTuple):
    """Text of one token on one line of a page."""

    line: int
    column: int
    text: str
    token: int


def lay_out(tokens: Sequence[str]) -> tuple[list[Piece], int]:
    """Breaks text into the lines of a page.

    Returns:
        The pieces, none of which crosses the end of a line, and how many complete tokens are on the page.
    """
    pieces: list[Piece] = []
    line, column = 0, 0
    for index, token in enumerate(tokens):
        placed = len(pieces)
        for text in _lines(token):
            for first in range(0, len(text), _COLUMNS):
                rest = text[first : first + _COLUMNS]
                if column + len(rest) > _COLUMNS:
                    line, column = line + 1, 0
                pieces.append(Piece(line, column, rest, index))
                column += len(rest)
            if text.endswith("↵"):
                line, column = line + 1, 0
        if pieces[-1].line >= _LINES and placed:
            return pieces[:placed], index
    return pieces, len(tokens)


def _lines(token: str) -> list[str]:
    """The token as it is drawn, cut after each end of a line."""
    shown = token.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ").replace("\n", "↵")
    shown = "".join(char if ord(char) in drawable() else "□" for char in shown) or "□"
    return re.findall("[^↵]*↵|[^↵]+", shown)


def _panels(overview: float, page: float) -> tuple[Figure, Axes, Axes, Axes]:
    """A figure with an overview over a page, and a color bar beside this; sizes are in inches."""
    text = _COLUMNS * _ADVANCE
    width, height = _MARGIN + text + _RIGHT, overview + page + 2.1
    figure = Figure(figsize=(width, height), dpi=figures.DPI)

    def add(left: float, bottom: float, wide: float, high: float) -> Axes:
        return figure.add_axes((left / width, bottom / height, wide / width, high / height))

    above = add(_MARGIN, page + 1.25, text, overview)
    return figure, above, add(_MARGIN, 0.25, text, page), add(_MARGIN + text + 0.15, 0.25, 0.15, page)


def _draw_overview(
    axes: Axes, kept: Bool[np.ndarray, "layers Hkv L"], block_size: int, window_start: int | None
) -> None:
    """Colored by the share of every block that the head keeps."""
    layers, _, num_tokens = kept.shape
    edges = np.append(np.arange(0, num_tokens, block_size), num_tokens)
    share = np.add.reduceat(kept.reshape(-1, num_tokens), edges[:-1], axis=1, dtype=np.float64) / np.diff(edges)
    draw_rows(axes, edges, share, layers, cmap=KEPT_COLORS, vmin=0, vmax=1)
    axes.set_xlabel("token position (the bar beneath: the page below)")
    window = f"; the local window begins at {window_start:,}" if window_start else ""
    axes.set_title(f"Share kept of each block of {block_size} tokens{window}", fontsize=10)
    if window_start:
        axes.axvline(window_start, color="#404040", linewidth=1, linestyle="--")


def _draw_page(axes: Axes, pieces: list[Piece], share: np.ndarray, lines: int) -> QuadMesh:
    """The text, in letters that each fill one cell, and its shades."""
    grid = np.full((lines, _COLUMNS), np.nan)
    rows = [[" "] * _COLUMNS for _ in range(lines)]
    for line, column, text, token in pieces:
        grid[line, column : column + len(text)] = share[token]
        rows[line][column : column + len(text)] = text
    colors = ListedColormap(colormaps[KEPT_COLORS](np.linspace(0, 0.6, 256)))  # black letters stand out from all
    most = max(np.nanmax(grid), 1e-9)
    shades = axes.pcolormesh(np.arange(_COLUMNS + 1), np.arange(lines + 1), grid, cmap=colors, vmin=0, vmax=most)
    axes.set(xlim=(0, _COLUMNS), ylim=(lines, 0))
    axes.set_axis_off()
    for line, row in enumerate(rows):
        if text := "".join(row).rstrip():
            # Outlines: text drawn as such is not as wide as its letters, by rounding.
            cells = Affine2D().scale(1 / (72 * _ADVANCE), -1 / (72 * _LINE_HEIGHT)).translate(0, line + 0.75)
            letters = cells.transform_path(TextPath((0, 0), text, prop=_FONT))
            axes.add_patch(PathPatch(letters, facecolor="#101010", linewidth=0))
    return shades
