"""The tokens that heads keep of a prompt: shares by block, and a page of the text, shaded by the heads that keep it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
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
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from matplotlib.transforms import Affine2D

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import Prompt, decode_continuation, encode_prompt
from tca_jax.errors import require
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.figures import KEPT_COLORS, MARK_COLOR
from tca_jax.lab.plots.masks import masks_of

_COLUMNS = 110  # characters of a line
_LINES = 24
_BEFORE = 440  # characters of a page above a marked span, about
_FONT = FontProperties(family="monospace", size=8)
_ADVANCE = 0.602 * 8 / 72  # inches of a character of that font, DejaVu Sans Mono's 1233 of 2048 units
_LINE_HEIGHT = 0.165  # inches
_MOST_BLOCKS = 512  # columns of the overview: as many as it has pixels for
Line = list[tuple[str, int]]  # characters with the token of each
Span = tuple[int, int]  # a first token, and the one past the last


def plot_selected_tokens(
    lm: LM, prompt: Prompt | Sequence[int], path: figures.PathLike, *, start: int = 0, around: str | None = None
) -> Path:
    """Draws the share that every head keeps of each block of a prompt, and a page of the text, shaded by kept tokens.

    Heads that keep all of the prompt do not count in the shades, unless they alone keep a token of the outlined line.

    Args:
        lm: A model with a tokenizer, under any method.
        prompt: A string, a chat or token ids.
        path: PNG file to write.
        start: First token of the page, which has 24 lines of 110 characters.
        around: Words whose first line is outlined; the page then begins some lines before it.

    Raises:
        ValueError: the model has no tokenizer, the prompt is too long or not allowed, it has no token `start`, or
            these words are not in it.
    """
    require(lm.tokenizer is not None, f"{lm.name} has no tokenizer: its tokens have no text")
    ids, policy = encode_prompt(lm, prompt), lm.method.cache
    texts = [decode_continuation(lm, [token], special=True) for token in ids]
    require(0 <= start < len(ids), f"start = {start}: must lie in [0, {len(ids) - 1}]")
    span = None if around is None else find_line(around, texts)
    window_start = policy.num_ranked_blocks(len(ids)) * policy.block_size
    figure = draw(kept_tokens(lm, ids), texts, start, span, policy.block_size, window_start)
    title = f"Kept tokens of a prompt of {len(ids):,}"
    figure.suptitle(figures.titled(title, f"{lm.name}, {lm.method.name}"), parse_math=False)
    return figures.write(figure, path)


def kept_tokens(lm: LM, prompt: Prompt | Sequence[int]) -> Bool[np.ndarray, "layers Hkv L"]:
    """The tokens of a prompt that each KV head holds when decoding starts: its selected ones and the local window.

    Args:
        lm: A model under any method.
        prompt: A string, a chat or token ids, L tokens.

    Returns:
        bool `[layers, H_kv, L]`.

    Raises:
        ValueError: the prompt is longer than the model's context, or not allowed; or the model is on a mesh.
    """
    ids, policy = encode_prompt(lm, prompt), lm.method.cache
    most = lm.config.max_context
    require(len(ids) <= most, f"prompt has {len(ids)} tokens: {lm.name} has {most} positions")
    require(lm.mesh is None, f"{lm.name} is on a mesh: load it on one device to draw kept tokens")
    if not policy.num_ranked_blocks(len(ids)):
        return np.ones((lm.config.num_layers, lm.config.num_kv_heads, len(ids)), bool)
    return on_host(jnp.concatenate(masks_of(lm, ids)))[..., : len(ids)]


def draw(
    kept: Bool[np.ndarray, "layers Hkv L"],
    texts: Sequence[str],
    start: int = 0,
    span: Span | None = None,
    block_size: int = 128,
    window_start: int = 0,
) -> Figure:
    """The overview of all heads over a page of the text."""
    layers, heads, num_tokens = kept.shape
    start = start if span is None else _page_start(texts, span[0])
    counted, lines = _sparse(kept, span), lay_out(texts[start:])
    shown = lines[-1][-1][1] + 1
    heights = [float(np.clip(0.4 + 0.07 * layers * heads, 1.6, 4)), _LINES * _LINE_HEIGHT]
    figure = Figure(figsize=(_COLUMNS * _ADVANCE + 2.1, sum(heights) + 1.8), dpi=figures.DPI, layout="constrained")
    overview, page = figure.subplots(2, height_ratios=heights)
    _draw_overview(overview, kept, max(block_size, -(-num_tokens // _MOST_BLOCKS)), window_start)
    overview.axvspan(start, start + shown, ymax=0.02, color="#404040")
    shades = _draw_page(page, lines, counted.mean(axis=0)[start:])
    if span is not None:
        overview.axvline(sum(span) / 2, color=MARK_COLOR, linewidth=1)
        for number, line in enumerate(lines):
            if marked := [i for i, (_, token) in enumerate(line) if span[0] <= start + token < span[1]]:
                corner, width = (marked[0], number), marked[-1] + 1 - marked[0]
                page.add_patch(Rectangle(corner, width, 1, fill=False, edgecolor=MARK_COLOR))
    title = f"Tokens {start:,} to {start + shown - 1:,}, shaded by the heads that keep them"
    page.set_title(f"{title} ({len(counted)} of {layers * heads} heads)", fontsize=10)
    figure.colorbar(shades, ax=page, pad=0.01, format=PercentFormatter(1.0), label="heads that keep the token")
    return figure


def find_line(words: str, texts: Sequence[str]) -> Span:
    """The tokens of the first line with these words."""
    text = "".join(texts)
    found = text.find(words)
    require(found >= 0, f"around = {words!r}: these words are not in the text")
    start, end = text.rfind("\n", 0, found) + 1, text.find("\n", found)
    places = np.cumsum([0, *map(len, texts)])
    first = np.searchsorted(places, start, side="right") - 1
    return int(first), int(np.searchsorted(places, len(text) if end < 0 else end))


def _sparse(kept: Bool[np.ndarray, "layers Hkv L"], span: Span | None) -> Bool[np.ndarray, "heads L"]:
    """The heads that drop a token, which alone distinguish tokens; all where none of these keeps the span."""
    rows = kept.reshape(-1, kept.shape[-1])
    drops = rows[~rows.all(axis=-1)]
    return drops if len(drops) and (span is None or drops[:, slice(*span)].any()) else rows


def _page_start(texts: Sequence[str], marked: int) -> int:
    """A token some lines before a marked one, at the beginning of a line where there is one."""
    before = np.cumsum([len(text) for text in reversed(texts[:marked])])
    start = marked - int((before < _BEFORE).sum())
    return next((i + 1 for i in range(start, marked) if start and "\n" in texts[i]), start)


def lay_out(texts: Sequence[str]) -> list[Line]:
    """The lines of a page of text."""
    lines: list[Line] = [[]]
    for index, text in enumerate(texts):
        shown = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ").replace("\n", "↵")
        for char in shown or "□":
            if len(lines[-1]) == _COLUMNS or (lines[-1] and lines[-1][-1][0] == "↵"):
                if len(lines) == _LINES:
                    return lines
                lines.append([])
            lines[-1].append((char if ord(char) in _drawable() else "□", index))
    return lines


@functools.cache
def _drawable() -> frozenset[int]:
    """Code points that the monospace font has."""
    return frozenset(FT2Font(font_manager.findfont("monospace")).get_charmap())


def _draw_overview(axes: Axes, kept: Bool[np.ndarray, "layers Hkv L"], block_size: int, window_start: int) -> None:
    """A row a head, those of a layer side by side, colored by the share of every block that the head keeps."""
    layers, heads, num_tokens = kept.shape
    edges = np.append(np.arange(0, num_tokens, block_size), num_tokens)
    share = np.add.reduceat(kept.reshape(-1, num_tokens), edges[:-1], axis=1, dtype=np.float64) / np.diff(edges)
    axes.pcolormesh(edges, np.arange(len(share) + 1), share, cmap=KEPT_COLORS, vmin=0, vmax=1)
    axes.set_ylim(len(share), 0)
    axes.hlines(np.arange(1, layers) * heads, 0, num_tokens, color="white", linewidth=1)
    step = -(-layers // 16)
    axes.set_yticks((np.arange(0, layers, step) + 0.5) * heads, [str(i) for i in range(0, layers, step)])
    axes.set_ylabel("layer, a row a KV head" if heads > 1 else "layer")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
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
    axes.set(xlim=(0, _COLUMNS), ylim=(_LINES, 0))
    axes.set_axis_off()
    for number, line in enumerate(lines):
        if text := "".join(char for char, _ in line).rstrip():
            # Outlines: text drawn as such is not as wide as its letters, by rounding.
            cells = Affine2D().scale(1 / (72 * _ADVANCE), -1 / (72 * _LINE_HEIGHT)).translate(0, number + 0.75)
            letters = cells.transform_path(TextPath((0, 0), text, prop=_FONT))
            axes.add_patch(PathPatch(letters, facecolor="#101010", linewidth=0))
    return shades
