"""Attention of a prompt's last queries: the scores of SnapKV and its kin, the sample that lines are found in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.numerics import scaled_scores


def last_attention(
    q: Float[Array, "B O G d"], k: Float[Array, "B L d"], lengths: Int[Array, " B"]
) -> Float32[Array, "B G O L"]:
    """Causal attention of the last O queries of a KV head's group; 0 for queries at negative positions."""
    queries = q.shape[1]
    places = lengths[:, None, None] - queries + jnp.arange(queries)[:, None]  # [B, O, 1]
    seen = (jnp.arange(k.shape[1]) <= places)[:, None]
    return jax.nn.softmax(scaled_scores("bogd,bld->bgol", q, k), axis=-1, where=seen)


def diagonal_sums(attention: Float32[Array, "B G O L"], lengths: Int[Array, " B"]) -> Float32[Array, "B G L"]:
    """Sums along the diagonals: entry o adds up the attention of the last queries on the token o before each."""
    *lead, queries, length = attention.shape
    # Counted back from the row's last token, query a sees the token o before its own at u = o + (O - 1 - a): rows
    # shifted right by their number line up.
    places = (lengths[:, None] - 1 - jnp.arange(length))[:, None, None]
    reversed_ = jnp.where(places >= 0, jnp.take_along_axis(attention, jnp.maximum(places, 0), axis=-1), 0)
    flat = jnp.pad(reversed_, [(0, 0)] * (len(lead) + 1) + [(0, queries)]).reshape(*lead, -1)
    shifted = flat[..., : queries * (length + queries - 1)].reshape(*lead, queries, length + queries - 1)
    return shifted.sum(axis=-2)[..., queries - 1 :]
