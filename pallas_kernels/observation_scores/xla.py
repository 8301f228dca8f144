"""Observation scores in plain JAX: the oracle of the operation; two passes over tiles of keys, O(L) memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, varying_like

#: Keys of a tile.
_TILE = 512


@partial(jax.jit, static_argnames=("spread", "decay"))
@jax.named_scope("observation_scores")
def observation_scores(q_last: Array, k: Array, lengths: Array, *, spread: int, decay: float = 0.98) -> Array:
    """Log-sum-exp of every query, then every token's largest probability; see `observation_scores`."""
    batch, length, kv_heads, _ = k.shape
    observed, tile = q_last.shape[1], min(_TILE, length)
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0), jnp.float32)
    lengths = jnp.minimum(lengths, length)
    positions = lengths[:, None] - observed + jnp.arange(observed)  # [B, o]
    queries = jnp.where((positions >= 0)[..., None, None], q_last, 0)
    queries = queries.reshape(batch, observed, kv_heads, -1, q_last.shape[-1])

    def scores(i: Array) -> tuple[Array, Float32[Array, "B Hkv o G t"], Bool[Array, "B 1 o 1 t"]]:
        """A tile's first token, its scores and which of them count. The last tile reaches back over seen tokens."""
        start = jnp.minimum(i * tile, length - tile)
        index = start + jnp.arange(tile)
        keys = jax.lax.dynamic_slice_in_dim(k, start, tile, axis=1)
        seen = index <= positions[..., None]
        return start, scaled_scores("bohgd,bkhd->bhogk", queries, keys), seen[:, None, :, None]

    def normalise(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        start, logits, seen = scores(i)
        seen &= start + jnp.arange(tile) >= i * tile
        logits = jnp.where(seen, logits, MASKED)
        peak = jnp.maximum(state[0], logits.max(axis=-1))
        weight = jnp.where(seen, jnp.exp(logits - peak[..., None]), 0).sum(axis=-1)
        return peak, state[1] * jnp.exp(state[0] - peak) + weight

    def maximise(i: Array, largest: Array) -> Array:
        start, logits, seen = scores(i)
        logs = jnp.where(seen, logits - norms[..., None], -jnp.inf).max(axis=(2, 3))
        return jax.lax.dynamic_update_slice_in_dim(largest, jnp.exp(logs), start, axis=2)

    trips = divide_up(jnp.maximum(lengths.max(), 0), tile)
    rows = (batch, kv_heads, observed, q_last.shape[2] // kv_heads)
    empty = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    peak, weight = jax.lax.fori_loop(0, trips, normalise, varying_like(empty, q_last, k, lengths))
    norms = peak + jnp.log(jnp.maximum(weight, jnp.finfo(jnp.float32).tiny))
    zeros = varying_like(jnp.zeros((batch, kv_heads, length), jnp.float32), q_last, k, lengths)
    largest = jax.lax.fori_loop(0, trips, maximise, zeros)
    spread_scores = _spread(largest, min(spread, length), decay)
    return jnp.where(jnp.arange(length) < lengths[:, None, None], spread_scores, 0)


def _spread(scores: Float32[Array, "B Hkv L"], spread: int, decay: float) -> Float32[Array, "B Hkv L"]:
    """Maximum over 0 <= a < spread of decay^a times the score a tokens earlier."""

    def step(a: Array, best: Array) -> Array:
        earlier = jnp.where(jnp.arange(scores.shape[-1]) >= a, jnp.roll(scores, a, axis=-1), 0)
        return jnp.maximum(best, jnp.float32(decay) ** a * earlier)

    return jax.lax.fori_loop(1, spread, step, scores)
