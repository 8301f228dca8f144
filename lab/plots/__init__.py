"""Pictures as PNG files: budgets, kept tokens, attention, and results of benchmarks and evaluations."""

from tca_jax.lab.plots.curves import plot_accuracy as plot_accuracy
from tca_jax.lab.plots.curves import plot_keeping as plot_keeping
from tca_jax.lab.plots.curves import plot_latency as plot_latency
from tca_jax.lab.plots.curves import plot_reading as plot_reading
from tca_jax.lab.plots.heads import WorthMap as WorthMap
from tca_jax.lab.plots.heads import plot_attention as plot_attention
from tca_jax.lab.plots.heads import plot_kept_share as plot_kept_share
from tca_jax.lab.plots.inspection import attention_received as attention_received
from tca_jax.lab.plots.inspection import kept_tokens as kept_tokens
from tca_jax.lab.plots.inspection import local_start as local_start
from tca_jax.lab.plots.inspection import token_texts as token_texts
from tca_jax.lab.plots.selected import plot_selected_tokens as plot_selected_tokens
