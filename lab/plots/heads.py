"""Heat maps by layer and KV head: kept and attended shares, the worth of heads, attention by key position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from tca_jax.lab.plots import figures
from tca_jax.lab.plots.figures import KEPT_COLORS, MARK_COLOR

_DECADES = 4  # of worth below the largest that have colors of their own
_DARK = 0.55  # of the color scale: numbers on darker cells are white
_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell
_MOST_COLUMNS = 512  # of the map of attention: as many as it has pixels for
_LEAST = 1e-9  # probability, for the logarithm of nothing
_SHARES = (0.5, 0.9)  # of the attention mass, whose tokens are counted


class WorthMap(NamedTuple):
    """Worth of heads in one search of calibration."""

    title: str
    nats: Float[np.ndarray, "layers Hkv"]  # loss that each head gives back; NaN where not measured
    chosen: Bool[np.ndarray, "layers Hkv"]  # heads to outline


def plot_kept_share(
    share: Float[np.ndarray, "layers Hkv"],
    num_tokens: int,
    name: str,
    path: figures.PathLike,
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
        path: PNG file to write.
        prefill_share: `profile.prefill_kept_share(num_tokens)`; None for the cache alone.
        worth: Maps of worth; those without a finite number are left out.
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


def plot_attention(received: Float32[np.ndarray, "layers Hkv L"], name: str, path: figures.PathLike) -> Path:
    """Draws the mean attention of each key, by head, and the share of tokens that holds a share of it.

    Args:
        received: Attention mass of every token of a prompt, from `attention_received`.
        name: Name of the model in the title.
        path: PNG file to write.
    """
    layers, heads, num_tokens = received.shape
    height = float(np.clip(0.09 * layers * heads, 2.2, 5))
    figure = Figure(figsize=(11, height + 4.8), dpi=figures.DPI, layout="constrained")
    figure.suptitle(figures.titled(f"Full attention of a prompt of {num_tokens:,} tokens", name), parse_math=False)
    heat_map, curves = figure.subplots(2, height_ratios=[height, 3.4])
    left_out = num_tokens // 16  # at the prompt's end, which few queries see
    mean = received / np.arange(num_tokens, 0, -1, dtype=np.float64)  # over the queries that see a key
    _draw_positions(heat_map, mean[..., : num_tokens - left_out], left_out)
    mass = np.cumsum(-np.sort(-received.astype(np.float64), axis=-1), axis=-1)  # the tokens of the most mass first
    _draw_shares(curves, mass / mass[..., -1:])
    return figures.write(figure, path)


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
    """A line a head."""
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


def _draw_share(axes: Axes, share: Float[np.ndarray, "layers Hkv"], title: str, label: str) -> None:
    percent = "%" if len(share) <= 16 else ""
    _draw_map(axes, share, Normalize(0, 1), title, label, lambda value: f"{100 * value:.0f}{percent}")


def _draw_worth(
    axes: Axes, title: str, nats: Float[np.ndarray, "layers Hkv"], chosen: Bool[np.ndarray, "layers Hkv"]
) -> None:
    """Logarithmic colors, as worth spans orders of magnitude, with the chosen heads outlined."""
    highest = max(float(np.nanmax(nats)), 0) or 1.0  # any scale does where no head is worth anything
    lowest = highest / 10**_DECADES
    text = lambda value: _short(value) if value > lowest else ""  # noqa: E731
    _draw_map(axes, nats, LogNorm(lowest, highest), title, "nats", text)
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
    for count, line in ((layers, axes.axvline), (heads, axes.axhline)):
        for edge in range(1, count):
            line(edge - 0.5, color="white", linewidth=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    extra = {"extend": "min"} if isinstance(scale, LogNorm) else {"format": PercentFormatter(1.0)}
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=max(12, heads), **extra)
    bar.set_label(label)
    bar.outline.set_visible(False)
    for layer, head in np.argwhere(np.isfinite(values)) if layers <= _MAX_LABELLED_LAYERS else ():
        value = float(values[layer, head])
        color = "white" if scale(max(value, scale.vmin)) > _DARK else "#202020"
        size = 9 if layers <= 16 else 7
        axes.text(layer, head, text(value), ha="center", va="center", fontsize=size, color=color)
