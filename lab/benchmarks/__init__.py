"""Figures of speed and memory against full attention: `tca-jax bench`."""
