"""lm-evaluation-harness (extra "lab"): `harness.model` registers a checkpoint as the model type tca_jax."""
