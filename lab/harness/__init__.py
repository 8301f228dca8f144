"""The adapter for EleutherAI's lm-evaluation-harness: importing `tca_jax.lab.harness.model` registers "tca_jax" there.

`tca-jax lm-eval` is lm_eval's own command line with that done. It needs the extra `lab`.
"""
