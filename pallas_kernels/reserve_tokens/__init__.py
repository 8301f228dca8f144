"""Reserve tokens: the highest scores of a head over all of its ranked tokens, whatever their blocks.

docs/method.md, "Reserve".
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float32, Int

from tca_jax.errors import check_integer
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_shapes


def reserve_tokens(
    scores: Float32[Array, "B Hkv L"],
    ranked_tokens: Int[Array, " B"],
    *,
    reserve: int,
    backend: Backend = "auto",
) -> Bool[Array, "B Hkv L"]:
    """Marks the `reserve` highest scores among a row's first tokens, ties to the lower position. Exact.

    Args:
        scores: Scores [B, Hkv, L]; those of ranked tokens are finite and not negative, others do not matter. A device
            that flushes numbers under 2^-126 to 0 (XLA on a CPU does) takes them for ties with 0.
        ranked_tokens: Tokens to choose from, the first of each row [B]; may be traced.
        reserve: Tokens to mark in every head; all ranked ones where they are fewer.
        backend: See `backends.Backend`.

    Returns:
        bool [B, Hkv, L].
    """
    check_shapes({"scores": (scores, "B Hkv L"), "ranked_tokens": (ranked_tokens, "B")})
    check_integer("reserve", reserve, at_least=0)
    marks: Bool[Array, "B Hkv L"] = dispatch("reserve_tokens", backend)(scores, ranked_tokens, reserve=reserve)
    return marks
