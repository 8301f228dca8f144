"""Pictures as PNG files: budgets, kept tokens, and results of benchmarks and evaluations."""

from tca_jax.lab.plots.curves import plot_accuracy, plot_kept_share, plot_latency
from tca_jax.lab.plots.selected import kept_tokens, plot_selected_tokens

__all__ = ["kept_tokens", "plot_accuracy", "plot_kept_share", "plot_latency", "plot_selected_tokens"]
