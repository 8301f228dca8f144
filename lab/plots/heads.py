"""Heat maps of budgets by layer and KV head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tca_jax.lab.plots import figures

_DARK = 0.55  # of the color scale: numbers on darker cells are white
_MAX_LABELLED_LAYERS = 40  # with more layers a number does not fit into its cell


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
