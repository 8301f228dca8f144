"""Budgets by layer and KV head: heat maps of the share that the cache keeps and that a prompt attends to."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tca_jax.plots import figures
from tca_jax.plots.figures import KEPT_COLORS

_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell


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
    figure = Figure(figsize=(_map_width(share), map_height(share) * len(shares)), dpi=figures.DPI, layout="constrained")
    maps = figure.subplots(len(shares), squeeze=False)[:, 0]
    titles = [
        kept_share_title(name, num_tokens, share),
        f"Attended to while such a prompt is read: {shares[-1].mean():.1%} on average",
    ]
    for axes, each, title, label in zip(maps, shares, titles, ("tokens kept", "tokens attended to"), strict=False):
        draw_kept_share(axes, each, title, label)
    return figures.write(figure, path)


def draw_kept_share(axes: Axes, share: Float[np.ndarray, "layers Hkv"], title: str, label: str = "tokens kept") -> None:
    """Heat map with layers along x and KV heads along y, a number in each cell where it fits."""
    layers, heads = share.shape
    image = axes.imshow(share.T, cmap=KEPT_COLORS, vmin=0, vmax=1, aspect="auto")
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


def kept_share_title(name: str, num_tokens: int, share: np.ndarray) -> str:
    return figures.titled(f"KV cache kept after {num_tokens:,} tokens: {share.mean():.1%} on average", name)


def _map_width(share: np.ndarray) -> float:
    """Inches: wide enough for the title, no wider than a screen."""
    return float(np.clip(1.5 + 0.4 * share.shape[0], 8, 16))


def map_height(share: np.ndarray) -> float:
    """Inches."""
    return float(np.clip(1.2 + 0.35 * share.shape[1], 2.2, 10))
