"""Attention by key position: mean attention of each token, and how few tokens hold most of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter, StrMethodFormatter

from tca_jax.lab.plots import figures

_MOST_COLUMNS = 512  # of the heat map: as many as it has pixels for
_LEAST = 1e-9  # probability, for the logarithm of nothing
_SHARES = (0.5, 0.9)  # of the attention mass, whose tokens are counted


def plot_attention(received: Float32[np.ndarray, "layers Hkv L"], name: str, path: str | os.PathLike[str]) -> Path:
    """Draws the mean attention of each key, by head, and the share of tokens that holds a share of it.

    Args:
        received: Attention mass of every token of a prompt, from `attention_received`.
        name: Name of the model in the title.
        path: PNG file to write; missing folders are created.

    Returns:
        `path`.
    """
    layers, heads, num_tokens = received.shape
    height = float(np.clip(0.09 * layers * heads, 2.2, 5))
    figure = Figure(figsize=(11, height + 4.8), dpi=figures.DPI, layout="constrained")
    figure.suptitle(figures.titled(f"Full attention of a prompt of {num_tokens:,} tokens", name), parse_math=False)
    heat_map, curves = figure.subplots(2, height_ratios=[height, 3.4])
    left_out = num_tokens // 16  # at the prompt's end, which few queries see
    _draw_positions(heat_map, mean_attention(received)[..., : num_tokens - left_out], left_out)
    _draw_shares(curves, cumulative_shares(received))
    return figures.write(figure, path)


def mean_attention(received: Float32[np.ndarray, "layers Hkv L"]) -> Float64[np.ndarray, "layers Hkv L"]:
    """The mean attention probability of the queries that see a key, `[layers, H_kv, L]`."""
    return received / np.arange(received.shape[-1], 0, -1, dtype=np.float64)


def cumulative_shares(received: Float[np.ndarray, "layers Hkv L"]) -> Float64[np.ndarray, "layers Hkv L"]:
    """Entry i: the share of a head's attention mass that its i + 1 tokens of the most mass hold."""
    total = np.cumsum(-np.sort(-received.astype(np.float64), axis=-1), axis=-1)
    return total / total[..., -1:]


def draw_rows(axes: Axes, edges: np.ndarray, values: np.ndarray, layers: int, **colors: Any) -> Any:
    """A row a head, those of a layer side by side, with the columns between `edges`."""
    heads = len(values) // layers
    mesh = axes.pcolormesh(edges, np.arange(len(values) + 1), values, **colors)
    axes.set_ylim(len(values), 0)
    axes.hlines(np.arange(1, layers) * heads, edges[0], edges[-1], color="white", linewidth=1)
    step = -(-layers // 16)
    axes.set_yticks((np.arange(0, layers, step) + 0.5) * heads, [str(i) for i in range(0, layers, step)])
    axes.set_ylabel("layer, a row a KV head" if heads > 1 else "layer")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return mesh


def _draw_positions(axes: Axes, mean: Float64[np.ndarray, "layers Hkv K"], left_out: int) -> None:
    """Columns are keys, or several with their mean."""
    layers, _, keys = mean.shape
    step = -(-keys // _MOST_COLUMNS)
    edges = np.append(np.arange(0, keys, step), keys)
    binned = np.maximum(np.add.reduceat(mean.reshape(-1, keys), edges[:-1], axis=1) / np.diff(edges), _LEAST)
    scale = LogNorm(*np.quantile(binned, (0.01, 0.999)))  # a single sink does not take the complete scale
    mesh = draw_rows(axes, edges, binned, layers, cmap="magma_r", norm=scale)
    axes.set_xlabel("key position" + (f" (mean of {step} neighbors)" if step > 1 else ""))
    axes.set_title(
        f"Mean attention to each key by the queries that see it, without the last {left_out:,} keys", fontsize=10
    )
    axes.figure.colorbar(mesh, ax=axes, pad=0.01, extend="both").set_label("attention probability")


def _draw_shares(axes: Axes, shares: Float64[np.ndarray, "layers Hkv L"]) -> None:
    """A line a head, by the tokens of the most mass first."""
    layers, heads, num_tokens = shares.shape
    colors = colormaps["viridis"](np.linspace(0, 0.92, layers))
    tokens = np.arange(1, num_tokens + 1) / num_tokens
    for layer, head in np.ndindex(layers, heads):
        label = f"layer {layer}" if head == 0 and (layers <= 8 or layer in (0, layers // 2, layers - 1)) else None
        axes.plot(tokens, shares[layer, head], color=colors[layer], linewidth=1, alpha=0.8, label=label)
    counts = [np.median(1 + (shares < share).sum(axis=-1)) / num_tokens for share in _SHARES]
    parts = [f"{count:.1%} of the tokens hold {share:.0%}" for count, share in zip(counts, _SHARES, strict=True)]
    axes.set_title(f"Median head: {', '.join(parts)} of its attention mass", fontsize=10)
    for share in _SHARES:
        axes.axhline(share, color="#A0A0A0", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlim=(1 / num_tokens, 1), ylim=(0, 1.02))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g}%"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="share of the tokens, in the order of their mass", ylabel="share of the attention mass")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
