"""Attention of a prompt's last queries, the sample that vertical and slash lines are found in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores


def last_attention(
    q: Float[Array, "B O G d"], k: Float[Array, "B L d"], lengths: Int[Array, " B"]
) -> Float32[Array, "B G O L"]:
    """Causal attention probabilities of the last O queries of each row, tokens counted from the row's last one.

    Args:
        q: The last queries of one KV head's group, `q[:, -1]` the last.
        k: Its keys, right-padded.
        lengths: Prompt lengths.

    Returns:
        Entry [b, g, a, u] is the probability of the token at position lengths[b] - 1 - u; zeros for a query at a
        negative position, and for tokens that there are not.
    """
    queries, length = q.shape[1], k.shape[1]
    places = lengths[:, None] - 1 - jnp.arange(length)
    keys = jnp.take_along_axis(k, jnp.maximum(places, 0)[..., None], axis=1)
    scores = scaled_scores("bogd,bud->bgou", q, keys)
    back = queries - 1 - jnp.arange(queries)  # of each query from the last
    seen = (jnp.arange(length) >= back[:, None]) & (places >= 0)[:, None, :]  # [B, O, L]
    real = (back < lengths[:, None])[:, None, :, None]
    probabilities = jax.nn.softmax(jnp.where(seen[:, None], scores, MASKED), axis=-1)
    return jnp.where(seen[:, None] & real, probabilities, 0)


def by_position(values: Float32[Array, "B G L"], lengths: Int[Array, " B"]) -> Float32[Array, "B G L"]:
    """Values of tokens counted from a row's last one, by their positions; zeros past the row's length."""
    places = lengths[:, None] - 1 - jnp.arange(values.shape[-1])
    return jnp.where((places >= 0)[:, None], jnp.take_along_axis(values, jnp.maximum(places, 0)[:, None], axis=-1), 0)


def diagonal_sums(attention: Float32[Array, "B G O L"]) -> Float32[Array, "B G L"]:
    """Sums along the diagonals: entry o adds up what each of the last queries gives the token o before its own."""
    *lead, queries, length = attention.shape
    # Query a sees the token o before its own at u = o + (O - 1 - a): rows shifted right by their number line up.
    flat = jnp.pad(attention, [(0, 0)] * (len(lead) + 1) + [(0, queries)]).reshape(*lead, -1)
    shifted = flat[..., : queries * (length + queries - 1)].reshape(*lead, queries, length + queries - 1)
    return shifted.sum(axis=-2)[..., queries - 1 :]
