"""Pictures as PNG files: budgets, kept tokens, attention, and results of benchmarks and evaluations."""

from tca_jax.lab.plots.curves import plot_accuracy, plot_keeping, plot_latency, plot_reading
from tca_jax.lab.plots.heads import WorthMap, plot_attention, plot_kept_share
from tca_jax.lab.plots.inspection import attention_received, kept_tokens, local_start, token_texts
from tca_jax.lab.plots.selected import plot_selected_tokens

__all__ = ["WorthMap", "attention_received", "kept_tokens", "local_start", "plot_accuracy", "plot_attention"]
__all__ += ["plot_keeping", "plot_kept_share", "plot_latency", "plot_reading", "plot_selected_tokens", "token_texts"]
