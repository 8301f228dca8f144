"""Token scores: how much the last prompt query attends to every token (Eq. 5'), and block mass and HHI."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes


class TokenScores(NamedTuple):
    """Scores and block statistics of a prompt; all float32."""

    # s, the group mean of softmax(q_last K^T / sqrt(d)) [B, Hkv, L]; 0 past a row's length.
    scores: Float32[Array, "B Hkv L"]
    mass: Float32[Array, "B Hkv nb"]  # sum of s over each whole block [B, Hkv, L // b]
    # Herfindahl-Hirschman index of each block, sum of (s / mass)^2; 1 / b where the mass is 0.
    hhi: Float32[Array, "B Hkv nb"]


def token_scores(
    q_last: Float[Array, "B Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    backend: Backend = "auto",
) -> TokenScores:
    """Scores every prompt token by the attention of the last prompt query (Eq. 5').

    Args:
        q_last: Query of each row's last prompt token [B, Hq, d].
        k: Prompt keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Prompt lengths [B], at least 1; may be traced.
        block_size: Tokens in a block, b.
        backend: See `backends.Backend`.

    Returns:
        Scores and block statistics.
    """
    check_shapes({"q_last": (q_last, "B Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    check_blocks(block_size)
    implementation = dispatch("token_scores", backend)
    return TokenScores(*implementation(q_last, k, lengths, block_size=block_size))
