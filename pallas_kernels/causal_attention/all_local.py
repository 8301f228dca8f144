"""Exact causal attention by a prefill kernel whose window covers the prompt."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import round_up

_BLOCK = 128  # tile of the prefill kernels; exact attention has no blocks of its own


def attend_all_local(
    prefill_attention: Callable[..., Array],
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B L Hq d"]:
    """All tokens of a prompt are local: nothing is left of the window, and the pool is empty."""
    batch, length, kv_heads, head_dim = k.shape
    nothing, zeros = jnp.zeros((_BLOCK, head_dim), k.dtype), jnp.zeros((batch, kv_heads), jnp.int32)
    budgets = jnp.zeros((batch, kv_heads, length // _BLOCK), jnp.int32)
    pool, window = Pool(nothing, nothing, zeros, zeros), round_up(length, _BLOCK)
    return prefill_attention(q, k, v, pool, budgets, lengths, block_size=_BLOCK, window=window)
