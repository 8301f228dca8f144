"""Token scores in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores


@partial(jax.jit, static_argnames=("block_size",))
@jax.named_scope("token_scores")
def token_scores(q_last: Array, k: Array, lengths: Array, *, block_size: int) -> tuple[Array, Array, Array]:
    """Scores, block mass and block HHI; see `token_scores.token_scores`."""
    batch, length, kv_heads, head_dim = k.shape
    grouped = q_last.reshape(batch, kv_heads, -1, head_dim)
    logits = scaled_scores("bhgd,blhd->bhgl", grouped, k)
    valid = jnp.arange(length) < lengths[:, None, None, None]
    logits = jnp.where(valid, logits, MASKED)
    weights = jnp.where(valid, jnp.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    # A row of length 0 has no weights; its scores are 0.
    probabilities = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    scores = probabilities.mean(axis=2)

    num_blocks = length // block_size
    blocks = scores[..., : num_blocks * block_size].reshape(batch, kv_heads, num_blocks, block_size)
    mass = blocks.sum(axis=-1)
    # Normalised before squaring: the squares of small scores would underflow.
    shares = blocks / jnp.where(mass > 0, mass, 1)[..., None]
    hhi = jnp.where(mass > 0, jnp.square(shares).sum(axis=-1), 1 / block_size)
    return scores, mass, hhi
