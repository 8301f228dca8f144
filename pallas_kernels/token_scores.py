"""Token scores: how much the last prompt query attends to every token (Eq. 5'), and block mass and HHI."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.checks import check_blocks, check_shapes
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores


class TokenScores(NamedTuple):
    """Scores and block statistics of a prompt; all float32."""

    # s, the group mean of softmax(q_last K^T / sqrt(d)) [B, Hkv, L]; 0 past a row's length.
    scores: Float32[Array, "B Hkv L"]
    mass: Float32[Array, "B Hkv nb"]  # sum of s over each whole block [B, Hkv, L // b]
    # Herfindahl-Hirschman index of each block, sum of (s / mass)^2; 1 / b where the mass is 0.
    hhi: Float32[Array, "B Hkv nb"]


@partial(jax.jit, static_argnames=("block_size",))
@jax.named_scope("token_scores")
def token_scores(
    q_last: Float[Array, "B Hq d"], k: Float[Array, "B L Hkv d"], lengths: Int[Array, " B"], *, block_size: int
) -> TokenScores:
    """Scores every prompt token by the attention of the last prompt query (Eq. 5').

    Args:
        q_last: Query of each row's last prompt token [B, Hq, d].
        k: Prompt keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Prompt lengths [B], at least 1; may be traced.
        block_size: Tokens in a block, b.

    Returns:
        Scores and block statistics.
    """
    check_shapes({"q_last": (q_last, "B Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    check_blocks(block_size)
    batch, length, kv_heads, head_dim = k.shape
    grouped = q_last.reshape(batch, kv_heads, -1, head_dim)
    valid = jnp.arange(length) < lengths[:, None, None, None]
    logits = jnp.where(valid, scaled_scores("bhgd,blhd->bhgl", grouped, k), MASKED)
    scores = jnp.where(valid, jax.nn.softmax(logits, axis=-1), 0).mean(axis=2)

    num_blocks = length // block_size
    blocks = scores[..., : num_blocks * block_size].reshape(batch, kv_heads, num_blocks, block_size)
    mass = blocks.sum(axis=-1)
    # Normalised before squaring: the squares of small scores would underflow.
    shares = blocks / jnp.where(mass > 0, mass, 1)[..., None]
    hhi = jnp.where(mass > 0, jnp.square(shares).sum(axis=-1), 1 / block_size)
    return TokenScores(scores, mass, hhi)
