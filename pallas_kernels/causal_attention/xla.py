"""Exact causal attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from jaxtyping import Array

from tca_jax.pallas_kernels.causal_attention.all_local import attend_all_local
from tca_jax.pallas_kernels.prefill_attention.xla import prefill_attention


def causal_attention(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """See `causal_attention.causal_attention`."""
    return attend_all_local(prefill_attention, q, k, v, lengths)
