"""Budgets by layer and KV head: heat maps of what is kept and attended to, and of what heads are worth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tca_jax.lab.plots import figures
from tca_jax.lab.plots.figures import KEPT_COLORS

_DECADES = 4  # of worth below the largest that have colors of their own
_DARK = 0.55  # of the color scale: numbers on darker cells are white
_MARK_COLOR = "#D55E00"
_UNKNOWN_COLOR = "#D8D8D8"
_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell


class WorthMap(NamedTuple):
    """What heads are worth in one search of calibration.

    Attributes:
        title: What stands above the map.
        nats: Loss that each head gives back, `[layers, H_kv]`, such as `profile.reading_worth`; NaN where not measured.
        chosen: Heads to outline, `[layers, H_kv]`.
    """

    title: str
    nats: Float[np.ndarray, "layers Hkv"]
    chosen: Bool[np.ndarray, "layers Hkv"]


def plot_kept_share(
    share: Float[np.ndarray, "layers Hkv"],
    num_tokens: int,
    name: str,
    path: str | os.PathLike[str],
    *,
    prefill_share: Float[np.ndarray, "layers Hkv"] | None = None,
    worth: Sequence[WorthMap] = (),
) -> Path:
    """Draws heat maps by layer and KV head: the kept share of the cache, what a prompt attends to, the worth of heads.

    Args:
        share: Share of a prompt's tokens that each head keeps: `profile.kept_share(num_tokens)`, or of any method
            `kept_tokens(lm, prompt).mean(axis=-1)`; `[layers, H_kv]`.
        num_tokens: Length of the prompt that fills the cache.
        name: What the title calls it.
        path: PNG file to write; missing folders are created.
        prefill_share: `profile.prefill_kept_share(num_tokens)`, drawn beneath it; None for the cache alone.
        worth: Maps of worth, drawn beneath; those without a finite number are left out.

    Returns:
        `path`.
    """
    shares = [share] if prefill_share is None else [share, prefill_share]
    worth = [each for each in worth if np.isfinite(each.nats).any()]
    count = len(shares) + len(worth)
    figure = Figure(figsize=(_map_width(share), map_height(share) * count), dpi=figures.DPI, layout="constrained")
    maps = figure.subplots(count, squeeze=False)[:, 0]
    titles = [
        kept_share_title(name, num_tokens, share),
        f"Attended to while such a prompt is read: {shares[-1].mean():.1%} on average",
    ]
    for axes, each, title, label in zip(maps, shares, titles, ("tokens kept", "tokens attended to"), strict=False):
        draw_kept_share(axes, each, title, label)
    for axes, of_search in zip(maps[len(shares) :], worth, strict=True):
        _draw_worth(axes, *of_search)
    return figures.write(figure, path)


def _draw_worth(
    axes: Axes, title: str, nats: Float[np.ndarray, "layers Hkv"], chosen: Bool[np.ndarray, "layers Hkv"]
) -> None:
    """Heat map in logarithmic colors, as worth spans orders of magnitude, with the chosen heads outlined."""
    layers, heads = nats.shape
    highest = float(np.nanmax(nats))
    highest = highest if highest > 0 else 1.0  # any scale does where no head is worth anything
    lowest: float = highest / 10**_DECADES
    scale = LogNorm(lowest, highest)
    image = axes.imshow(np.maximum(nats.T, lowest), cmap=KEPT_COLORS, norm=scale, aspect="auto")
    axes.set_facecolor(_UNKNOWN_COLOR)  # shows through where a number is NaN
    _frame(axes, layers, heads, title)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=max(12, heads), extend="min")
    bar.set_label("nats")
    bar.outline.set_visible(False)
    for layer, head in np.argwhere(chosen):
        outline = (layer - 0.44, head - 0.42), 0.88, 0.84
        axes.add_patch(Rectangle(*outline, fill=False, edgecolor=_MARK_COLOR, linewidth=1.8))
    if layers <= _MAX_LABELLED_LAYERS:
        for layer, head in np.argwhere(nats > lowest):
            value = float(nats[layer, head])
            color = "white" if scale(value) > _DARK else "#202020"
            axes.text(layer, head, _short(value), ha="center", va="center", fontsize=7, color=color)


def _short(value: float) -> str:
    """A number in at most six characters, two digits where they fit."""
    if value < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _frame(axes: Axes, layers: int, heads: int, title: str) -> None:
    """Title, axes and the lines between cells of a map with layers along x and KV heads along y."""
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


def draw_kept_share(axes: Axes, share: Float[np.ndarray, "layers Hkv"], title: str, label: str = "tokens kept") -> None:
    """Heat map with layers along x and KV heads along y, a number in each cell where it fits."""
    layers, heads = share.shape
    image = axes.imshow(share.T, cmap=KEPT_COLORS, vmin=0, vmax=1, aspect="auto")
    _frame(axes, layers, heads, title)
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
                color="white" if value > _DARK else "#202020",
            )


def kept_share_title(name: str, num_tokens: int, share: np.ndarray) -> str:
    return figures.titled(f"KV cache kept after {num_tokens:,} tokens: {share.mean():.1%} on average", name)


def _map_width(share: np.ndarray) -> float:
    """Inches: wide enough for the title, no wider than a screen."""
    return float(np.clip(1.5 + 0.4 * share.shape[0], 8, 16))


def map_height(share: np.ndarray) -> float:
    """Inches."""
    return float(np.clip(1.2 + 0.35 * share.shape[1], 2.2, 10))
