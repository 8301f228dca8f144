"""Pairs of a query and a key that attention is computed for: how many there are, and how many were attended to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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


def selected_pairs(
    budgets: Int[Array, "B Hkv nb"], lengths: Int[Array, " B"], *, block_size: int, window: int
) -> Float32[Array, "B Hkv"]:
    """Causal pairs (query, key) that a KV head's queries attend to over their windows and a selection left of these.

    A query in block t has the tokens from max(0, t b - w) up to its own, and what is selected of the blocks before.

    Args:
        budgets: Selected tokens of every block `[B, Hkv, L // b]`.
        lengths: Prompt lengths `[B]`, at most L.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w, a multiple of b.

    Returns:
        The pairs of one query head, `[B, Hkv]`: those of a group all have as many.
    """
    with jax.named_scope("count_pairs"):
        blocks = np.arange(budgets.shape[-1] + 1)  # of queries; a last one that is cut off has no budget
        edges = np.maximum(0, blocks - window // block_size)
        queries = jnp.clip(lengths[:, None] - blocks * block_size, 0, block_size)
        local = queries * ((blocks - edges) * block_size) + queries * (queries + 1) // 2
        prefixes = jnp.pad(jnp.cumsum(budgets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
        return sum_of_counts(local[:, None] + queries[:, None] * prefixes[..., edges])
