"""Attention by key position: which tokens get it, and how few of them get nearly all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Float64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from tca_jax.errors import UserError
from tca_jax.lab.plots import figures

_MOST_COLUMNS = 512  # of the heat map: as many as it has pixels for
_LEAST = 1e-9  # probability, for the logarithm of nothing
_SHARES = (0.5, 0.9)  # of the attention mass, whose tokens are counted


def plot_attention(
    received: Float32[np.ndarray, "layers Hkv L"], name: str, path: str | os.PathLike[str], *, window: int | None = None
) -> Path:
    """Draws the mean attention that each key gets, by head, and the share of tokens that holds a share of it.

    Args:
        received: Attention mass that every token of a prompt gets, `inspection.attention_received`.
        name: What the title calls the model.
        path: PNG file to write; missing folders are created.
        window: Tokens at the prompt's end that are left out of the heat map: few queries see them. None is a
            sixteenth of the prompt.

    Returns:
        `path`.

    Raises:
        ValueError: the prompt has fewer than 16 tokens, or `window` leaves none of it.
    """
    layers, heads, num_tokens = received.shape
    if num_tokens < 16:
        raise UserError(f"received has {num_tokens} tokens: must have at least 16")
    window = num_tokens // 16 if window is None else window
    if not 0 <= window < num_tokens:
        raise UserError(f"window = {window}: must lie in [0, {num_tokens - 1}]")
    map_height = float(np.clip(0.09 * layers * heads, 2.2, 5))
    figure = Figure(figsize=(11, map_height + 4.8), dpi=figures.DPI, layout="constrained")
    figure.suptitle(figures.titled(f"Full attention of a prompt of {num_tokens:,} tokens", name), parse_math=False)
    heat_map, curves = figure.subplots(2, height_ratios=[map_height, 3.4])
    _draw_positions(heat_map, mean_attention(received)[..., : num_tokens - window], num_tokens)
    _draw_shares(curves, cumulative_shares(received))
    return figures.write(figure, path)


def mean_attention(received: Float32[np.ndarray, "layers Hkv L"]) -> Float64[np.ndarray, "layers Hkv L"]:
    """The mean attention probability of the queries that see a key, `[layers, H_kv, L]`."""
    num_tokens = received.shape[-1]
    return received / np.arange(num_tokens, 0, -1, dtype=np.float64)


def cumulative_shares(received: Float[np.ndarray, "layers Hkv L"]) -> Float64[np.ndarray, "layers Hkv L"]:
    """Entry i: the share of a head's attention mass that its i + 1 tokens of the most mass hold."""
    falling = -np.sort(-received.astype(np.float64), axis=-1)
    total = np.cumsum(falling, axis=-1)
    return total / total[..., -1:]


def _draw_positions(axes: Axes, mean: Float64[np.ndarray, "layers Hkv K"], num_tokens: int) -> None:
    """A row a head, those of a layer side by side; columns are keys, or several with their mean."""
    layers, heads, keys = mean.shape
    step = -(-keys // _MOST_COLUMNS)
    edges = np.append(np.arange(0, keys, step), keys)
    binned = np.add.reduceat(mean.reshape(-1, keys), edges[:-1], axis=1) / np.diff(edges)
    binned = np.maximum(binned, _LEAST)
    scale = LogNorm(*np.quantile(binned, (0.01, 0.999)))  # a single sink does not take the whole scale
    mesh = axes.pcolormesh(edges, np.arange(layers * heads + 1), binned, cmap="magma_r", norm=scale)
    axes.set_ylim(layers * heads, 0)
    axes.hlines(np.arange(1, layers) * heads, 0, keys, color="white", linewidth=1)
    every = -(-layers // 16)
    axes.set_yticks((np.arange(0, layers, every) + 0.5) * heads, [str(i) for i in range(0, layers, every)])
    axes.set_ylabel("layer, a row a KV head" if heads > 1 else "layer")
    axes.set_xlabel("key position" + (f" (mean of {step} neighbors)" if step > 1 else ""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    left_out = num_tokens - keys
    title = "Mean attention to each key by the queries that see it"
    axes.set_title(title + (f"; the last {left_out:,}, which few do, are left out" if left_out else ""), fontsize=10)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01, extend="both")
    bar.set_label("attention probability")
    bar.outline.set_visible(False)


def _draw_shares(axes: Axes, shares: Float64[np.ndarray, "layers Hkv L"]) -> None:
    """A line a head, by the tokens of the most mass first."""
    layers, heads, num_tokens = shares.shape
    colors = colormaps["viridis"](np.linspace(0, 0.92, layers))
    tokens = np.arange(1, num_tokens + 1) / num_tokens
    for layer, head in np.ndindex(layers, heads):
        label = f"layer {layer}" if head == 0 and (layers <= 8 or layer in (0, layers // 2, layers - 1)) else None
        axes.plot(tokens, shares[layer, head], color=colors[layer], linewidth=1, alpha=0.8, label=label)
    for share in _SHARES:
        axes.axhline(share, color="#A0A0A0", linewidth=0.8, linestyle="--")
    medians = (np.median(1 + (shares < share).sum(axis=-1)) / num_tokens for share in _SHARES)
    parts = (f"{median:.1%} of the tokens hold {share:.0%}" for share, median in zip(_SHARES, medians, strict=True))
    axes.set_title(f"Median head: {', '.join(parts)} of its attention mass", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(1 / num_tokens, 1)
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of the prompt's tokens, those that get most first")
    axes.set_ylabel("share of the attention mass")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
