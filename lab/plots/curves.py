"""Methods as curves, stages of runs as bars, and budgets as a map of layers and KV heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tca_jax.lab.plots import figures

BASELINE = "full"  # drawn as a dashed line
MOST_CURVES = 6
Point = tuple[str, float, float]  # method, x, y

_APART = 0.05  # least distance of the names of curves, of the height of the axes
_DARK = 0.55  # of the color scale: numbers on darker cells are white
_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LABELLED = 0.05  # of the longest bar: shorter stages have no room for their figure


def plot_accuracy(panels: Mapping[str, Sequence[Point]], path: figures.PathLike) -> Path:
    """Draws right answers against the bytes of the KV cache: a curve a method, at most six.

    Args:
        panels: By heading, points (method, share of full attention's bytes, share of right answers), as
            `results.accuracy_panels` reads them.
        path: PNG file to write.
    """
    widest = max(1.0, *(x for panel in panels.values() for _, x, _ in panel))
    figure = Figure(figsize=(1 + 4.6 * len(panels), 4.4), dpi=figures.DPI, layout="constrained")
    drawn = list(figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0])
    methods = list(dict.fromkeys(method for points in panels.values() for method, *_ in points))
    ranks = {name: rank for rank, name in enumerate(figures.METHOD_COLORS)}
    shown = sorted(methods, key=lambda name: ranks.get(name, len(ranks)))[:MOST_CURVES]
    left_out = len(methods) - len(shown)
    more = f" ({left_out} more methods in the file)" if left_out else ""
    figure.suptitle(f"Right answers by the KV cache that is held{more}", parse_math=False)
    for axes, (heading, points) in zip(drawn, panels.items(), strict=True):
        for method in shown:
            if line := sorted((x, y) for name, x, y in points if name == method):
                x, y = zip(*line, strict=True)
                color = figures.METHOD_COLORS.get(method) or colormaps["tab20"](sum(map(ord, method)) % 20)
                axes.plot(x, y, "o-", label=method, color=color, markersize=4, clip_on=False)
                if method == BASELINE:
                    axes.axhline(max(y), color="#A0A0A0", linewidth=0.8, linestyle="--", zorder=1)
        axes.set_title(heading, fontsize=10, parse_math=False)
        axes.grid(alpha=0.25)
        axes.set(xlim=(0, 1.05 * widest), ylim=(0, 1.05), xlabel="KV cache bytes, of full attention's")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    drawn[0].set_ylabel("right answers")
    for axes in drawn:
        label_ends(axes)
    return figures.write(figure, path)


def label_ends(axes: Axes) -> None:
    """Writes the name of each curve beside its right end, the names apart and inside of the axes."""
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [axes.transLimits.transform(axes.transScale.transform(np.asarray(line.get_xydata())[-1])) for line in named]
    order = sorted(range(len(named)), key=lambda i: ends[i][1])
    places, highest = [float(ends[i][1]) for i in order], 0.98
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + _APART)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], highest)
        highest = places[i] - _APART
    for i, y in zip(order, places, strict=True):
        shift, side = (0.03, "left") if ends[i][0] < 0.9 else (-0.03, "right")
        label = axes.text(ends[i][0] + shift, y, str(named[i].get_label()), transform=axes.transAxes, ha=side)
        label.set(fontsize=8, color=named[i].get_color(), verticalalignment="center")


def plot_latency(bars: Mapping[str, Mapping[str, float]], title: str, path: figures.PathLike) -> Path:
    """Draws a bar for each run, made of its stages.

    Args:
        bars: Seconds of each stage by the run's name, as `results.latency_bars` reads them; all runs have the same
            stages or a part of them.
        title: Of the picture.
        path: PNG file to write.
    """
    longest = max(sum(stages.values()) for stages in bars.values())
    factor, unit = next((each for each in _UNITS if longest >= each[0]), _UNITS[-1])
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(bars)), dpi=figures.DPI, layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(stage for stages in bars.values() for stage in stages))
    left = np.zeros(len(bars))
    for stage, color in zip(names, colormaps["tab10"](np.arange(len(names))), strict=True):
        lengths = np.array([stages.get(stage, 0.0) for stages in bars.values()]) / factor
        drawn = axes.barh(range(len(bars)), lengths, left=left, height=0.7, label=stage, color=color)
        texts = [f"{each:.3g}" if each * factor >= _LABELLED * longest else "" for each in lengths]
        axes.bar_label(drawn, texts, label_type="center", fontsize=8)
        left = left + lengths
    for row, total in enumerate(left):
        axes.annotate(f" {total:.3g} {unit}", (total, row), va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), list(bars), parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, parse_math=False)
    figure.legend(loc="outside lower center", ncols=min(4, len(names)), fontsize=9)
    return figures.write(figure, path)


def plot_kept_share(share: Float[np.ndarray, "layers Hkv"], num_tokens: int, name: str, path: figures.PathLike) -> Path:
    """Draws a heat map of the kept share of the cache by layer and KV head.

    Args:
        share: Share of a prompt's tokens that each head keeps: `profile.kept_share(num_tokens)`, or of any method
            `kept_tokens(lm, prompt).mean(axis=-1)`; `[layers, H_kv]`.
        num_tokens: Length of the prompt that fills the cache.
        name: Name of the model in the title.
        path: PNG file to write.
    """
    title = f"KV cache kept after {num_tokens:,} tokens: {share.mean():.1%} on average"
    width, height = np.clip(1.5 + 0.4 * share.shape[0], 8, 16), np.clip(1.2 + 0.35 * share.shape[1], 2.2, 10)
    figure = Figure(figsize=(float(width), float(height)), dpi=figures.DPI, layout="constrained")
    axes = figure.subplots()
    layers, heads = share.shape
    image = axes.imshow(share.T, cmap=figures.KEPT_COLORS, vmin=0, vmax=1, aspect="auto")
    axes.set_title(figures.titled(title, name), parse_math=False)
    axes.set(xlabel="layer", ylabel="KV head")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=32, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    for count, line in ((layers, axes.axvline), (heads, axes.axhline)):
        for edge in range(1, count):
            line(edge - 0.5, color="white", linewidth=1)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=max(12, heads), format=PercentFormatter(1.0))
    bar.set_label("tokens kept")
    bar.outline.set_visible(False)
    size, percent = (9, "%") if layers <= 16 else (7, "")
    for (layer, head), value in np.ndenumerate(share) if layers <= _MAX_LABELLED_LAYERS else ():
        color = "white" if value > _DARK else "#202020"
        axes.text(layer, head, f"{100 * value:.0f}{percent}", ha="center", va="center", fontsize=size, color=color)
    return figures.write(figure, path)
