"""Observation scores: the most that any of the last prompt queries attends to a token, spread to those that follow."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import check_integer, require
from tca_jax.pallas_kernels.checks import check_shapes
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores

_MOST_ENTRIES = 2**27  # of the attention of the last queries that lie in memory at once


@partial(jax.jit, static_argnames=("spread", "decay"))
@jax.named_scope("observation_scores")
def observation_scores(
    q_last: Float[Array, "B o Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    spread: int,
    decay: float = 0.98,
) -> Float32[Array, "B Hkv L"]:
    """Scores every prompt token by the largest causal attention of the last prompt queries, spread forwards.

    With s_obs[j] the maximum, over those queries and the query heads of the group, of softmax(q K^T / sqrt(d)) at
    token j, the score is max over 0 <= a < spread of decay^a s_obs[j - a]: a token inherits from those before it, for
    a head that copies looks at one token and needs the ones that follow next (docs/method.md, "Reserve").

    Args:
        q_last: Last prompt queries [B, o, Hq, d]; q_last[:, -a] is the query at position length - a. Those at negative
            positions (prompts shorter than o) do not matter.
        k: Prompt keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Prompt lengths [B]; may be traced.
        spread: Tokens that a token's score reaches, itself included; at least 1.
        decay: Factor of the score from one token to the next, in (0, 1].

    Returns:
        s_f, float32 [B, Hkv, L]; 0 past a row's length.
    """
    sizes = check_shapes({"q_last": (q_last, "B o Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    require(sizes["o"], f"q_last has shape {q_last.shape}: must hold at least one query")
    check_integer("spread", spread, at_least=1)
    require(0 < decay <= 1, f"decay = {decay}: must lie in (0, 1]")
    (batch, length, kv_heads, head_dim), observed = k.shape, q_last.shape[1]
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0), jnp.float32)
    positions = jnp.minimum(lengths, length)[:, None] - observed + jnp.arange(observed)  # [B, o]
    seen = (jnp.arange(length) <= positions[..., None])[:, :, None]  # [B, o, 1, L]
    queries = jnp.where((positions >= 0)[..., None, None], q_last, 0).reshape(batch, observed, kv_heads, -1, head_dim)

    def of_head(head: tuple[Array, Array]) -> Float32[Array, "B L"]:
        logits = jnp.where(seen, scaled_scores("bogd,bkd->bogk", *head), MASKED)
        return jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0).max(axis=(1, 2))

    at_once = max(1, _MOST_ENTRIES // (batch * observed * queries.shape[3] * length))
    heads = jnp.moveaxis(queries, 2, 0), jnp.moveaxis(k, 2, 0)
    largest = jax.lax.map(of_head, heads, batch_size=min(kv_heads, at_once))
    spread_scores = _spread(jnp.moveaxis(largest, 0, 1), min(spread, length), decay)
    return jnp.where(jnp.arange(length) < lengths[:, None, None], spread_scores, 0)


def _spread(scores: Float32[Array, "B Hkv L"], spread: int, decay: float) -> Float32[Array, "B Hkv L"]:
    """Maximum over 0 <= a < spread of decay^a times the score a tokens earlier, in spans that double."""
    reach = 1
    while reach < spread:
        step = min(reach, spread - reach)
        earlier = jax.lax.pad(scores, jnp.float32(0), ((0, 0, 0), (0, 0, 0), (step, -step, 0)))  # moved by a step
        scores, reach = jnp.maximum(scores, decay**step * earlier), reach + step
    return scores
