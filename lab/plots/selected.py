"""Selected tokens over the text: kept shares by block, and a page of the prompt, shaded by the heads that keep it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import PercentFormatter
from matplotlib.transforms import Affine2D

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.figures import KEPT_COLORS, MARK_COLOR
from tca_jax.lab.plots.heads import draw_rows

_COLUMNS = 110  # characters of a line
_LINES = 24
_BEFORE = 8  # lines of a page above a marked span
_FONT = FontProperties(family="monospace", size=8)
_ADVANCE = 0.602 * 8 / 72  # inches of a character of that font, DejaVu Sans Mono's 1233 of 2048 units
_LINE_HEIGHT = 0.165  # inches
_MARGIN, _RIGHT = 0.75, 1.35  # inches: labels left of the page, a color bar right of it
_MOST_BLOCKS = 512  # columns of the overview: as many as it has pixels for
Line = list[tuple[str, int]]  # characters with the token of each


def plot_selected_tokens(
    kept: Bool[np.ndarray, "layers Hkv L"],
    tokens: Sequence[str],
    name: str,
    path: figures.PathLike,
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
        path: PNG file to write.
        start: First token of the page, which has 24 lines of 110 characters.
        span: Tokens to outline, first and past the last; the page then begins some lines before them.
        layer: Shade the page by the heads of this layer alone. Heads that keep all of the prompt do not count, unless
            they alone keep a token of the span.
        head: Shade it by this KV head alone.
        block_size: Tokens in a cell of the overview; more where there would be over 512 cells.
        window_start: First token of the local window, to be marked.

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
    of_layers, of_heads = (slice(None) if n is None else slice(n, n + 1) for n in (layer, head))
    counted = _sparse(kept[of_layers, of_heads], span)
    lines, shown = lay_out(tokens[start:])
    overview_height = float(np.clip(0.4 + 0.07 * layers * heads, 1.6, 4))
    figure, overview, page, bar = _panels(overview_height, len(lines) * _LINE_HEIGHT)
    figure.suptitle(figures.titled(f"Kept tokens of a prompt of {num_tokens:,}", name), parse_math=False)
    _draw_overview(overview, kept, max(block_size, -(-num_tokens // _MOST_BLOCKS)), window_start)
    overview.axvspan(start, start + shown, ymax=0.02, color="#404040")
    shades = _draw_page(page, lines, counted.mean(axis=0)[start:])
    if span is not None:
        overview.axvline(sum(span) / 2, color=MARK_COLOR, linewidth=1)
        for number, line in enumerate(lines):
            if marked := [i for i, (_, token) in enumerate(line) if span[0] <= start + token < span[1]]:
                corner, width = (marked[0], number), marked[-1] + 1 - marked[0]
                page.add_patch(Rectangle(corner, width, 1, fill=False, edgecolor=MARK_COLOR))
    whose = "".join(f"{part} {n}, " for part, n in (("layer", layer), ("KV head", head)) if n is not None)
    title = f"Tokens {start:,} to {start + shown - 1:,}, shaded by the heads that keep them"
    page.set_title(f"{title} ({whose}{len(counted)} of {layers * heads} heads)", fontsize=10)
    figure.colorbar(shades, cax=bar, format=PercentFormatter(1.0)).set_label("heads that keep the token")
    return figures.write(figure, path)


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


def lay_out(tokens: Sequence[str]) -> tuple[list[Line], int]:
    """Breaks text into the lines of a page; also how many tokens, all complete, are on the page."""
    lines: list[Line] = [[]]
    shown = len(tokens)
    for index, token in enumerate(tokens):
        for text in _cut(token):
            for first in range(0, len(text), _COLUMNS):
                part = text[first : first + _COLUMNS]
                if len(lines[-1]) + len(part) > _COLUMNS:
                    lines.append([])
                lines[-1] += [(char, index) for char in part]
            if text.endswith("↵"):
                lines.append([])
        if index and len(lines) - (not lines[-1]) > _LINES:
            lines = [[each for each in line if each[1] < index] for line in lines]
            shown = index
            break
    return [line for line in lines if line], shown


def _cut(token: str) -> list[str]:
    """The token as it is drawn, cut after each end of a line."""
    shown = token.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ").replace("\n", "↵")
    shown = "".join(char if ord(char) in _drawable() else "□" for char in shown) or "□"
    return re.findall("[^↵]*↵|[^↵]+", shown)


@functools.cache
def _drawable() -> frozenset[int]:
    """Code points that the monospace font has."""
    return frozenset(FT2Font(font_manager.findfont("monospace")).get_charmap())


def _panels(overview: float, page: float) -> tuple[Figure, Axes, Axes, Axes]:
    """A figure with an overview over a page, and a color bar beside this; sizes are in inches."""
    text = _COLUMNS * _ADVANCE
    width, height = _MARGIN + text + _RIGHT, overview + page + 2.1
    figure = Figure(figsize=(width, height), dpi=figures.DPI)
    places = (
        (_MARGIN, page + 1.25, text, overview),
        (_MARGIN, 0.25, text, page),
        (_MARGIN + text + 0.15, 0.25, 0.15, page),
    )
    above, below, bar = (figure.add_axes((x / width, y / height, w / width, h / height)) for x, y, w, h in places)
    return figure, above, below, bar


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


def _draw_page(axes: Axes, lines: list[Line], share: np.ndarray) -> QuadMesh:
    """The text, in letters that each fill one cell, and its shades."""
    grid = np.full((len(lines), _COLUMNS), np.nan)
    for number, line in enumerate(lines):
        grid[number, : len(line)] = share[[token for _, token in line]]
    colors = ListedColormap(colormaps[KEPT_COLORS](np.linspace(0, 0.6, 256)))  # black letters stand out from all
    edges = np.arange(_COLUMNS + 1), np.arange(len(lines) + 1)
    shades = axes.pcolormesh(*edges, grid, cmap=colors, vmin=0, vmax=max(np.nanmax(grid), 1e-9))
    axes.set(xlim=(0, _COLUMNS), ylim=(len(lines), 0))
    axes.set_axis_off()
    for number, line in enumerate(lines):
        if text := "".join(char for char, _ in line).rstrip():
            # Outlines: text drawn as such is not as wide as its letters, by rounding.
            cells = Affine2D().scale(1 / (72 * _ADVANCE), -1 / (72 * _LINE_HEIGHT)).translate(0, number + 0.75)
            letters = cells.transform_path(TextPath((0, 0), text, prop=_FONT))
            axes.add_patch(PathPatch(letters, facecolor="#101010", linewidth=0))
    return shades
