"""Reserve tokens in plain JAX: the oracle of the operation, and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array


@partial(jax.jit, static_argnames=("reserve",))
@jax.named_scope("reserve_tokens")
def reserve_tokens(scores: Array, ranked_tokens: Array, *, reserve: int) -> Array:
    """Compares with the least score that is marked; see `reserve_tokens.reserve_tokens`."""
    length = scores.shape[-1]
    reserve = min(reserve, length)
    if reserve == 0:
        return jnp.zeros(scores.shape, bool)
    ranked = jnp.arange(length) < ranked_tokens[:, None, None]
    scores = jnp.where(ranked, scores, -jnp.inf)
    least = jax.lax.top_k(scores, reserve)[0][..., -1:]  # minus infinity where there are fewer
    above, tied = scores > least, ranked & (scores == least)
    room = reserve - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room))
