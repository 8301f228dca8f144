"""Observation scores: the most that any of the last prompt queries attends to a token, spread to those that follow.

docs/method.md, "Reserve".
"""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import check_integer, require
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_shapes


def observation_scores(
    q_last: Float[Array, "B o Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    spread: int,
    decay: float = 0.98,
    backend: Backend = "auto",
) -> Float32[Array, "B Hkv L"]:
    """Scores every prompt token by the largest causal attention of the last prompt queries, spread forwards.

    With s_obs[j] the maximum, over those queries and the query heads of the group, of softmax(q K^T / sqrt(d)) at
    token j, the score is max over 0 <= a < spread of decay^a s_obs[j - a]: a token inherits from those before it, for
    a head that copies looks at one token and needs the ones that follow next.

    Args:
        q_last: Last prompt queries [B, o, Hq, d]; q_last[:, -a] is the query at position length - a. Those at negative
            positions (prompts shorter than o) do not matter.
        k: Prompt keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Prompt lengths [B]; may be traced.
        spread: Tokens that a token's score reaches, itself included; at least 1.
        decay: Factor of the score from one token to the next, in (0, 1].
        backend: See `backends.Backend`.

    Returns:
        s_f, float32 [B, Hkv, L]; 0 past a row's length.
    """
    sizes = check_shapes({"q_last": (q_last, "B o Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    require(sizes["o"], f"q_last has shape {q_last.shape}: must hold at least one query")
    check_integer("spread", spread, at_least=1)
    require(0 < decay <= 1, f"decay = {decay}: must lie in (0, 1]")
    scores: Float32[Array, "B Hkv L"] = dispatch("observation_scores", backend)(
        q_last, k, lengths, spread=spread, decay=decay
    )
    return scores
