"""Observation scores in plain JAX, a KV head at a time, which bounds memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores


@partial(jax.jit, static_argnames=("spread", "decay"))
@jax.named_scope("observation_scores")
def observation_scores(q_last: Array, k: Array, lengths: Array, *, spread: int, decay: float = 0.98) -> Array:
    """Largest probability of every token; see `observation_scores.observation_scores`."""
    (batch, length, kv_heads, head_dim), observed = k.shape, q_last.shape[1]
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0), jnp.float32)
    positions = jnp.minimum(lengths, length)[:, None] - observed + jnp.arange(observed)  # [B, o]
    seen = (jnp.arange(length) <= positions[..., None])[:, :, None]  # [B, o, 1, L]
    queries = jnp.where((positions >= 0)[..., None, None], q_last, 0)
    queries = queries.reshape(batch, observed, kv_heads, -1, head_dim)

    def of_head(head: tuple[Array, Array]) -> Float32[Array, "B L"]:
        logits = jnp.where(seen, scaled_scores("bogd,bkd->bogk", *head), MASKED)
        probabilities = jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        return jnp.where(seen, probabilities, 0).max(axis=(1, 2))

    largest = jax.lax.map(of_head, (jnp.moveaxis(queries, 2, 0), jnp.moveaxis(k, 2, 0)))
    spread_scores = _spread(jnp.moveaxis(largest, 0, 1), min(spread, length), decay)
    return jnp.where(jnp.arange(length) < lengths[:, None, None], spread_scores, 0)


def _spread(scores: Float32[Array, "B Hkv L"], spread: int, decay: float) -> Float32[Array, "B Hkv L"]:
    """Maximum over 0 <= a < spread of decay^a times the score a tokens earlier, in spans that double."""
    reach = 1
    while reach < spread:
        step = min(reach, spread - reach)
        earlier = jnp.pad(scores[..., :-step], ((0, 0), (0, 0), (step, 0)))
        scores, reach = jnp.maximum(scores, decay**step * earlier), reach + step
    return scores
