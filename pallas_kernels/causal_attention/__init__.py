"""Exact causal attention of ragged prompts: cuDNN where there is an NVIDIA GPU, else a prefill kernel."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_shapes


def causal_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "B L Hq d"]:
    """softmax(q k^T / sqrt(d)) v over all tokens up to the query's own.

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length is finite, and does not matter.
        v: Values [B, L, Hkv, d].
        lengths: Prompt lengths [B]; may be traced.
        backend: See `backends.Backend`.

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero.
    """
    tokens = "B L Hkv d"
    check_shapes({"q": (q, "B L Hq d"), "k": (k, tokens), "v": (v, tokens), "lengths": (lengths, "B")})
    return dispatch("causal_attention", backend)(q, k, v, lengths)
