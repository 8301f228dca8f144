"""Plots of results as PNG files: accuracy, latency, loss against attended share and answers against bytes."""

from tca_jax.lab.plots.accuracy import plot_accuracy as plot_accuracy
from tca_jax.lab.plots.latency import plot_latency as plot_latency
from tca_jax.lab.plots.tradeoffs import plot_keeping as plot_keeping
from tca_jax.lab.plots.tradeoffs import plot_reading as plot_reading
