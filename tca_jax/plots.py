"""Plots as PNG files: how much of the KV cache each head keeps, and which tokens heads kept at a needle."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from tca_jax.files import replacing

_KEPT_COLORS = "YlGnBu"  # light: little is kept, dark: all is
_NEEDLE_COLOR = "#D55E00"  # vermillion stands out from the scale above, also for the color-blind
_DPI = 150
_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell
_SHOWN_HEADS = 5
_ZOOM_TOKENS = 110  # as many characters fit side by side
_MAX_TOKEN_TEXT = 12
_VISIBLE = {"\n": "↵", "\r": "↵", "\t": "→", " ": "·"}


def plot_kept_share(
    share: Float[np.ndarray, "layers Hkv"],
    num_tokens: int,
    name: str,
    path: str | os.PathLike[str],
    *,
    prefill_share: Float[np.ndarray, "layers Hkv"] | None = None,
) -> Path:
    """Draws a heat map of the kept share of the KV cache by layer and KV head, and one of what a prompt attends to.

    Args:
        share: Share of a prompt's tokens that each head keeps: `profile.kept_share(num_tokens)`, or of any method
            `kept_tokens(lm, prompt).mean(axis=-1)`; `[layers, H_kv]`.
        num_tokens: Length of the prompt that fills the cache.
        name: What the title calls it.
        path: PNG file to write; missing folders are created.
        prefill_share: `profile.prefill_kept_share(num_tokens)`, drawn beneath it; None for the cache alone.

    Returns:
        `path`.
    """
    shares = [share] if prefill_share is None else [share, prefill_share]
    figure = Figure(figsize=(_map_width(share), _map_height(share) * len(shares)), dpi=_DPI, layout="constrained")
    maps = figure.subplots(len(shares), squeeze=False)[:, 0]
    titles = [
        _kept_share_title(name, num_tokens, share),
        f"Attended to while such a prompt is read: {shares[-1].mean():.1%} on average",
    ]
    for axes, each, title, label in zip(maps, shares, titles, ("tokens kept", "tokens attended to"), strict=False):
        _draw_kept_share(axes, each, title, label)
    return _write(figure, path)


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
        raise ValueError(f"tokens has {len(tokens)} entries: must have one for each of the {num_tokens} in kept")
    start, stop = needle_span
    if not 0 <= start < stop <= num_tokens:
        raise ValueError(f"needle_span = {needle_span}: must be a range inside the {num_tokens} tokens")
    share = kept.mean(axis=-1)
    heads = _telling_heads(kept, needle_span)
    names = [f"layer {layer}, head {head}" for layer, head in heads]
    shown = np.stack([kept[head] for head in heads])
    rows = 0.35 * len(heads)
    text_height = 0.08 * min(_MAX_TOKEN_TEXT, max(map(len, tokens)))
    heights = [_map_height(share), 1.2 + rows, 1.0 + rows + text_height]
    layout = ConstrainedLayoutEngine(h_pad=0.1)
    figure = Figure(figsize=(13, sum(heights) + 0.5), dpi=_DPI, layout=layout)
    title = f"What is kept of a prompt with the needle {needle_name!r}"
    figure.suptitle(title, fontsize=14, fontweight="bold", parse_math=False)
    heat_map, strip, zoom = figure.subplots(3, height_ratios=heights)
    _draw_kept_share(heat_map, share, _kept_share_title(name, num_tokens, share))
    _draw_prompt(strip, shown, names, block_size, window_start, needle_span)
    _draw_zoom(zoom, shown, names, tokens, needle_span)
    return _write(figure, path)


def _telling_heads(kept: Bool[np.ndarray, "layers Hkv L"], needle_span: tuple[int, int]) -> list[tuple[int, int]]:
    """(layer, head) of those that keep most of the needle beyond their share of the prompt, and the last."""
    excess = kept[..., slice(*needle_span)].mean(axis=-1) - kept.mean(axis=-1)
    order = np.argsort(-excess, axis=None, kind="stable")
    chosen = order if len(order) <= _SHOWN_HEADS else [*order[: _SHOWN_HEADS - 1], order[-1]]
    layers, heads = np.unravel_index(chosen, excess.shape)
    return list(zip(layers.tolist(), heads.tolist(), strict=True))


def _draw_kept_share(
    axes: Axes, share: Float[np.ndarray, "layers Hkv"], title: str, label: str = "tokens kept"
) -> None:
    """Heat map with layers along x and KV heads along y, a number in each cell where it fits."""
    layers, heads = share.shape
    image = axes.imshow(share.T, cmap=_KEPT_COLORS, vmin=0, vmax=1, aspect="auto")
    axes.set_title(title, parse_math=False)
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=32, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    for edges, line in ((range(1, layers), axes.axvline), (range(1, heads), axes.axhline)):
        for edge in edges:
            line(edge - 0.5, color="white", linewidth=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), pad=0.01, aspect=max(12, heads))
    bar.set_label(label)
    bar.outline.set_visible(False)
    if layers <= _MAX_LABELLED_LAYERS:
        for layer, head in np.ndindex(layers, heads):
            value = share[layer, head]
            axes.text(
                layer,
                head,
                f"{100 * value:.0f}" + ("%" if layers <= 16 else ""),
                ha="center",
                va="center",
                fontsize=9 if layers <= 16 else 7,
                color="white" if value > 0.55 else "#202020",
            )


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
    axes.pcolormesh(edges, np.arange(len(names) + 1), share, cmap=_KEPT_COLORS, vmin=0, vmax=1)
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
    scale = colormaps[_KEPT_COLORS]
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
    texts = [_visible(token) for token in tokens[left:right]]
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


def _visible(token: str) -> str:
    """`token` cut to a legible length, with visible white space, and a box for what the font cannot draw."""
    cut = token if len(token) <= _MAX_TOKEN_TEXT else token[: _MAX_TOKEN_TEXT - 1] + "…"
    shown = (_VISIBLE.get(char, char) for char in cut)
    return "".join(char if ord(char) in _drawable() else "□" for char in shown)


@functools.cache
def _drawable() -> frozenset[int]:
    """Code points that the monospace font has."""
    return frozenset(FT2Font(font_manager.findfont("monospace")).get_charmap())


def _kept_share_title(name: str, num_tokens: int, share: np.ndarray) -> str:
    name = name if len(name) <= 70 else "…" + name[-69:]
    text = f"KV cache kept after {num_tokens:,} tokens: {share.mean():.1%} on average"
    return text + ("\n" if len(name) > 25 else " ") + f"({name})"


def _map_width(share: np.ndarray) -> float:
    """Inches: wide enough for the title, no wider than a screen."""
    return float(np.clip(1.5 + 0.4 * share.shape[0], 8, 16))


def _map_height(share: np.ndarray) -> float:
    """Inches."""
    return float(np.clip(1.2 + 0.35 * share.shape[1], 2.2, 10))


def _write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure as a PNG; no display and no pyplot state is involved."""
    with replacing(path) as file:
        figure.savefig(file, format="png")
    return Path(path)
