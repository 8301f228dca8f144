"""Reserve tokens: a head's highest scores over all of its ranked tokens, whatever their blocks (docs/method.md)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from tca_jax.errors import check_integer
from tca_jax.pallas_kernels.checks import check_shapes


@partial(jax.jit, static_argnames=("reserve",))
@jax.named_scope("reserve_tokens")
def reserve_tokens(
    scores: Float32[Array, "B Hkv L"], ranked_tokens: Int[Array, " B"], *, reserve: int
) -> Bool[Array, "B Hkv L"]:
    """Marks the `reserve` highest scores among a row's first tokens, ties to the lower position. Exact.

    Args:
        scores: Scores [B, Hkv, L]; those of ranked tokens are finite and not negative, others do not matter. A device
            that flushes numbers under 2^-126 to 0 (XLA on a CPU does) takes them for ties with 0.
        ranked_tokens: Tokens to choose from, the first of each row [B]; may be traced.
        reserve: Tokens to mark in every head; all ranked ones where they are fewer.

    Returns:
        bool [B, Hkv, L].
    """
    check_shapes({"scores": (scores, "B Hkv L"), "ranked_tokens": (ranked_tokens, "B")})
    check_integer("reserve", reserve, at_least=0)
    length = scores.shape[-1]
    reserve = min(reserve, length)
    if reserve == 0:
        return jnp.zeros(scores.shape, bool)
    ranked = jnp.arange(length) < ranked_tokens[:, None, None]
    scores = jnp.where(ranked, scores, -jnp.inf)
    # As many parts hold the highest: those of the highest maxima. XLA sorts short rows in one kernel, long ones in 20.
    parts = jnp.pad(scores, ((0, 0), (0, 0), (0, -length % 32)), constant_values=-jnp.inf)
    parts = parts.reshape(*scores.shape[:2], -1, 32)
    highest = jax.lax.top_k(parts.max(axis=-1), min(reserve, parts.shape[2]))[1]
    candidates = jnp.take_along_axis(parts, highest[..., None], axis=2).reshape(*scores.shape[:2], -1)
    least = jax.lax.top_k(candidates, reserve)[0][..., -1:]  # minus infinity where there are fewer
    above, tied = scores > least, ranked & (scores == least)
    room = reserve - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room))
