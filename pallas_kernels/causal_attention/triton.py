"""Exact causal attention through Pallas-Triton, by the kernel of prefill attention."""

from __future__ import annotations

from functools import partial

from jaxtyping import Array

from tca_jax.pallas_kernels.causal_attention.all_local import attend_all_local
from tca_jax.pallas_kernels.prefill_attention.triton import prefill_attention


def causal_attention(q: Array, k: Array, v: Array, lengths: Array, *, interpret: bool = False) -> Array:
    """See `causal_attention.causal_attention`."""
    return attend_all_local(partial(prefill_attention, interpret=interpret), q, k, v, lengths)
