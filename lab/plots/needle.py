"""What heads keep of a prompt that holds a needle: overall, and token by token around the needle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures
from tca_jax.lab.plots.budgets import draw_kept_share, kept_share_title, map_height
from tca_jax.lab.plots.figures import KEPT_COLORS, MAX_TOKEN_TEXT, visible

_NEEDLE_COLOR = "#D55E00"  # vermillion stands out from the scale of kept shares, also for the color-blind
_SHOWN_HEADS = 5
_ZOOM_TOKENS = 110  # as many characters fit side by side


def plot_kept_tokens(
    kept: Bool[np.ndarray, "layers Hkv L"],
    tokens: Sequence[str],
    needle_span: tuple[int, int],
    needle_name: str,
    name: str,
    path: str | os.PathLike[str],
    *,
    block_size: int = 128,
    window_start: int | None = None,
) -> Path:
    """Draws a heat map of kept shares, and beneath it which tokens some heads kept: overall, at a needle.

    Shown are the heads that prefer the needle most over the rest of the prompt, and the one that does least.

    Args:
        kept: The tokens of a prompt that each head holds, as `inspection.kept_tokens` returns them.
        tokens: Text of each of the L tokens; a string where a token is a character.
        needle_span: First position of the needle, and the one past its last.
        needle_name: Name of the needle, for the title.
        name: What the title calls the model and its method.
        path: PNG file to write; missing folders are created.
        block_size: Tokens that share a cell of the strip of the whole prompt.
        window_start: First token of the local window, to be pointed at; None points at none.

    Returns:
        `path`.

    Raises:
        ValueError: `tokens` does not have the prompt's length, or the needle does not lie in the prompt.
    """
    num_tokens = kept.shape[2]
    if len(tokens) != num_tokens:
        raise UserError(f"tokens has {len(tokens)} entries: must have one for each of the {num_tokens} in kept")
    start, stop = needle_span
    if not 0 <= start < stop <= num_tokens:
        raise UserError(f"needle_span = {needle_span}: must be a range inside the {num_tokens} tokens")
    share = kept.mean(axis=-1)
    heads = _telling_heads(kept, needle_span)
    names = [f"layer {layer}, head {head}" for layer, head in heads]
    shown = np.stack([kept[head] for head in heads])
    rows = 0.35 * len(heads)
    text_height = 0.08 * min(MAX_TOKEN_TEXT, max(map(len, tokens)))
    heights = [map_height(share), 1.2 + rows, 1.0 + rows + text_height]
    layout = ConstrainedLayoutEngine(h_pad=0.1)
    figure = Figure(figsize=(13, sum(heights) + 0.5), dpi=figures.DPI, layout=layout)
    title = f"What is kept of a prompt with the needle {needle_name!r}"
    figure.suptitle(title, fontsize=14, fontweight="bold", parse_math=False)
    heat_map, strip, zoom = figure.subplots(3, height_ratios=heights)
    draw_kept_share(heat_map, share, kept_share_title(name, num_tokens, share))
    _draw_prompt(strip, shown, names, block_size, window_start, needle_span)
    _draw_zoom(zoom, shown, names, tokens, needle_span)
    return figures.write(figure, path)


def _telling_heads(kept: Bool[np.ndarray, "layers Hkv L"], needle_span: tuple[int, int]) -> list[tuple[int, int]]:
    """(layer, head) of those that keep most of the needle beyond their share of the prompt, and the last."""
    excess = kept[..., slice(*needle_span)].mean(axis=-1) - kept.mean(axis=-1)
    order = np.argsort(-excess, axis=None, kind="stable")
    chosen = order if len(order) <= _SHOWN_HEADS else [*order[: _SHOWN_HEADS - 1], order[-1]]
    layers, heads = np.unravel_index(chosen, excess.shape)
    return list(zip(layers.tolist(), heads.tolist(), strict=True))


def _draw_prompt(
    axes: Axes,
    kept: np.ndarray,
    names: list[str],
    block_size: int,
    window_start: int | None,
    needle_span: tuple[int, int],
) -> None:
    """The whole prompt as a strip for each head, colored by the share of every block that the head kept."""
    num_tokens = kept.shape[1]
    edges = np.append(np.arange(0, num_tokens, block_size), num_tokens)
    share = np.add.reduceat(kept, edges[:-1], axis=1, dtype=np.float64) / np.diff(edges)
    axes.pcolormesh(edges, np.arange(len(names) + 1), share, cmap=KEPT_COLORS, vmin=0, vmax=1)
    rows = "by the heads that favor the needle most, last the one that does least"
    axes.set_title(f"Tokens kept in each block of {block_size}, {rows}", fontsize=11, pad=26)
    axes.set_xlabel("token position")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _finish_rows(axes, names)
    middle = sum(needle_span) / 2
    axes.axvline(middle, color=_NEEDLE_COLOR, linewidth=1)
    _point_at(axes, middle, "needle", _NEEDLE_COLOR)
    if not window_start:
        return
    window_middle = (window_start + num_tokens) / 2
    if window_middle - middle > 0.12 * num_tokens:  # else the labels would overlap
        _point_at(axes, window_middle, "local window", "#404040")


def _point_at(axes: Axes, x: float, text: str, color: str) -> None:
    """An arrow with a label onto the upper edge of a strip."""
    axes.annotate(
        text,
        (x, 0),
        (0, 14),
        textcoords="offset points",
        ha="center",
        color=color,
        fontweight="bold",
        arrowprops={"arrowstyle": "-|>", "color": color},
    )


def _draw_zoom(
    axes: Axes,
    kept: np.ndarray,
    names: list[str],
    tokens: Sequence[str],
    needle_span: tuple[int, int],
) -> None:
    """Single tokens around the needle, kept or dropped by each head, with their text where it is legible."""
    start, stop = needle_span
    margin = max(10, (_ZOOM_TOKENS - (stop - start)) // 2)
    left, right = max(0, start - margin), min(kept.shape[1], stop + margin)
    scale = colormaps[KEPT_COLORS]
    colors = ListedColormap([scale(0.08), scale(0.8)])
    grid = kept[:, left:right]
    x, y = np.arange(left, right + 1) - 0.5, np.arange(len(names) + 1)
    legible = right - left <= _ZOOM_TOKENS + 20
    mesh = axes.pcolormesh(x, y, grid, cmap=colors, vmin=0, vmax=1)
    if legible:
        mesh.set(edgecolor="white", linewidth=0.8)
    axes.add_patch(
        Rectangle(
            (start - 0.5, 0),
            stop - start,
            len(names),
            fill=False,
            edgecolor=_NEEDLE_COLOR,
            linewidth=2,
            clip_on=False,
            zorder=3,  # above the lines between the rows
        )
    )
    axes.set_title("Tokens kept at the needle (dark: kept, light: dropped, outlined: the needle)", fontsize=11)
    _finish_rows(axes, names)
    if not legible:
        axes.set_xlabel("token position")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        return
    texts = [visible(token) for token in tokens[left:right]]
    axes.set_xticks(range(left, right), texts, fontfamily="monospace", fontsize=7, parse_math=False)
    axes.tick_params(axis="x", length=0, rotation=90 if max(map(len, texts)) > 1 else 0, pad=2)
    for position, label in zip(range(left, right), axes.get_xticklabels(), strict=True):
        if start <= position < stop:
            label.set(color=_NEEDLE_COLOR, fontweight="bold")
    axes.set_xlabel(f"text at positions {left:,} to {right - 1:,}")


def _finish_rows(axes: Axes, names: list[str]) -> None:
    """One labelled row a head, first on top."""
    axes.set_ylim(len(names), 0)
    axes.set_yticks(np.arange(len(names)) + 0.5, names, parse_math=False)
    axes.hlines(range(1, len(names)), *axes.get_xlim(), color="white", linewidth=2)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0)
    axes.spines[:].set_visible(False)
