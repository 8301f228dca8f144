"""Plots as PNG files: budgets, kept tokens over a text and at a needle, attention."""

from tca_jax.plots.attention import plot_attention as plot_attention
from tca_jax.plots.budgets import WorthMap as WorthMap
from tca_jax.plots.budgets import plot_kept_share as plot_kept_share
from tca_jax.plots.needle import plot_kept_tokens as plot_kept_tokens
from tca_jax.plots.selected import plot_selected_tokens as plot_selected_tokens
