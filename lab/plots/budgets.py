"""Heat maps by layer and KV head: kept and attended shares, and the worth of heads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tca_jax.lab.plots import figures
from tca_jax.lab.plots.figures import KEPT_COLORS, MARK_COLOR

_DECADES = 4  # of worth below the largest that have colors of their own
_DARK = 0.55  # of the color scale: numbers on darker cells are white
_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell


class WorthMap(NamedTuple):
    """Worth of heads in one search of calibration."""

    title: str
    nats: Float[np.ndarray, "layers Hkv"]  # loss that each head gives back; NaN where not measured
    chosen: Bool[np.ndarray, "layers Hkv"]  # heads to outline


def plot_kept_share(
    share: Float[np.ndarray, "layers Hkv"],
    num_tokens: int,
    name: str,
    path: str | os.PathLike[str],
    *,
    prefill_share: Float[np.ndarray, "layers Hkv"] | None = None,
    worth: Sequence[WorthMap] = (),
) -> Path:
    """Draws heat maps by layer and KV head: the kept share of the cache, the attended share, the worth of heads.

    Args:
        share: Share of a prompt's tokens that each head keeps: `profile.kept_share(num_tokens)`, or of any method
            `kept_tokens(lm, prompt).mean(axis=-1)`; `[layers, H_kv]`.
        num_tokens: Length of the prompt that fills the cache.
        name: Name of the model in the title.
        path: PNG file to write; missing folders are created.
        prefill_share: `profile.prefill_kept_share(num_tokens)`; None for the cache alone.
        worth: Maps of worth; those without a finite number are left out.

    Returns:
        `path`.
    """
    worth = [each for each in worth if np.isfinite(each.nats).any()]
    count = 1 + (prefill_share is not None) + len(worth)
    size = float(np.clip(1.5 + 0.4 * share.shape[0], 8, 16)), float(np.clip(1.2 + 0.35 * share.shape[1], 2.2, 10))
    figure = Figure(figsize=(size[0], size[1] * count), dpi=figures.DPI, layout="constrained")
    maps = iter(figure.subplots(count, squeeze=False)[:, 0])
    title = f"KV cache kept after {num_tokens:,} tokens: {share.mean():.1%} on average"
    _draw_share(next(maps), share, figures.titled(title, name), "tokens kept")
    if prefill_share is not None:
        title = f"Prefill of such a prompt attends to {prefill_share.mean():.1%} on average"
        _draw_share(next(maps), prefill_share, title, "tokens attended to")
    for each in worth:
        _draw_worth(next(maps), *each)
    return figures.write(figure, path)


def _draw_share(axes: Axes, share: Float[np.ndarray, "layers Hkv"], title: str, label: str) -> None:
    percent = "%" if len(share) <= 16 else ""
    _draw_map(axes, share, Normalize(0, 1), title, label, lambda value: f"{100 * value:.0f}{percent}")


def _draw_worth(
    axes: Axes, title: str, nats: Float[np.ndarray, "layers Hkv"], chosen: Bool[np.ndarray, "layers Hkv"]
) -> None:
    """Logarithmic colors, as worth spans orders of magnitude, with the chosen heads outlined."""
    highest = float(np.nanmax(nats))
    highest = highest if highest > 0 else 1.0  # any scale does where no head is worth anything
    lowest = highest / 10**_DECADES
    _draw_map(
        axes, nats, LogNorm(lowest, highest), title, "nats", lambda value: _short(value) if value > lowest else ""
    )
    axes.set_facecolor("#D8D8D8")  # shows through where a number is NaN
    for layer, head in np.argwhere(chosen):
        outline = (layer - 0.44, head - 0.42), 0.88, 0.84
        axes.add_patch(Rectangle(*outline, fill=False, edgecolor=MARK_COLOR, linewidth=1.8))


def _short(value: float) -> str:
    """A number in at most six characters, two digits where they fit."""
    if value < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _draw_map(axes: Axes, values: np.ndarray, scale: Any, title: str, label: str, text: Callable[[float], str]) -> None:
    """Layers along x and KV heads along y, a number in each cell where it fits."""
    layers, heads = values.shape
    image = axes.imshow(np.maximum(values.T, scale.vmin), cmap=KEPT_COLORS, norm=scale, aspect="auto")
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="layer", ylabel="KV head")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=32, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    for edges, line in ((range(1, layers), axes.axvline), (range(1, heads), axes.axhline)):
        for edge in edges:
            line(edge - 0.5, color="white", linewidth=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    extra = {"extend": "min"} if isinstance(scale, LogNorm) else {"format": PercentFormatter(1.0)}
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=max(12, heads), **extra)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if layers <= _MAX_LABELLED_LAYERS:
        for layer, head in np.argwhere(np.isfinite(values)):
            value = float(values[layer, head])
            color = "white" if scale(max(value, scale.vmin)) > _DARK else "#202020"
            size = 9 if layers <= 16 else 7
            axes.text(layer, head, text(value), ha="center", va="center", fontsize=size, color=color)
