"""Exact causal attention of ragged prompts: cuDNN where there is an NVIDIA GPU, else a prefill kernel."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.backends import Backend, can_run, dispatch
from tca_jax.pallas_kernels.checks import check_shapes
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import round_up

_BLOCK = 128  # tile of the prefill kernels; exact attention has no blocks of its own


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
        backend: See `backends.Backend`; "auto" tries cuDNN, then the backends of `prefill_attention`.

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero.
    """
    tokens = "B L Hkv d"
    check_shapes({"q": (q, "B L Hq d"), "k": (k, tokens), "v": (v, tokens), "lengths": (lengths, "B")})
    first = backend if isinstance(backend, str) else backend[0]
    if first == "cudnn" or (first == "auto" and can_run("cudnn")):
        try:
            return dispatch("causal_attention", "cudnn")(q, k, v, lengths)
        except NotImplementedError:
            if first != "auto":
                raise
    # The window holds the prompt: nothing is left of it, and the pool is empty.
    batch, length, kv_heads, head_dim = k.shape
    nothing, zeros = jnp.zeros((_BLOCK, head_dim), k.dtype), jnp.zeros((batch, kv_heads), jnp.int32)
    budgets = jnp.zeros((batch, kv_heads, length // _BLOCK), jnp.int32)
    pool, window = Pool(nothing, nothing, zeros, zeros), round_up(length, _BLOCK)
    return dispatch("prefill_attention", backend)(q, k, v, pool, budgets, lengths, block_size=_BLOCK, window=window)
