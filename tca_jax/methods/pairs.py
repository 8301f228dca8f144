"""Pairs of a query and a key that attention is computed for: how many there are, and how many were attended to."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

_LOW_BITS = 12


def causal_pairs(lengths: Int[Array, " B"]) -> Float32[Array, " B"]:
    """Pairs (query i, key j <= i) of prompts of n tokens: n (n + 1) / 2."""
    n = lengths.astype(jnp.float32)
    return n * (n + 1) / 2


def sum_of_counts(counts: Int[Array, "*rows n"]) -> Float32[Array, "*rows"]:
    """Sums over the last axis, rounded at their end alone: of up to 2^20 numbers that are not negative.

    The sums may be past what int32 holds, and sums in float32 would round with every number.
    """
    low = jnp.sum(counts & (1 << _LOW_BITS) - 1, axis=-1, dtype=jnp.uint32)
    high = jnp.sum(counts >> _LOW_BITS, axis=-1, dtype=jnp.uint32) + (low >> _LOW_BITS)
    low &= (1 << _LOW_BITS) - 1
    return high.astype(jnp.float32) * (1 << _LOW_BITS) + low.astype(jnp.float32)


def attended_share(pairs: Sequence[Float32[Array, " B"]], lengths: Int[Array, " B"]) -> Float32[Array, " B"]:
    """Share of each prompt's causal pairs that its queries attended to, mean over layers and heads that a program sees.

    Args:
        pairs: `Attended.pairs` of every layer.
        lengths: Prompt lengths.
    """
    first, *others = (of_layer / causal_pairs(lengths) for of_layer in pairs)
    return sum(others, start=first) / len(pairs)
