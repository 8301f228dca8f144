"""Column mass: how much attention every token gets from nearby queries and from far ones (calibration)."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes


def column_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    backend: Backend = "auto",
) -> tuple[Float32[Array, "B Hkv L"], Float32[Array, "B Hkv L"]]:
    """Column sums of the causal softmax(Q K^T / sqrt(d)), averaged over each group (Algorithm 1).

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Lengths [B]; may be traced.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w; a multiple of b.
        backend: See `backends.Backend`.

    Returns:
        (near, far), each [B, Hkv, L]: the column's sum over the queries that hold the token in their local
        range, and over those whose range, from max(0, (i // b) b - w) on, lies right of it. 0 past a length.
    """
    check_blocks(block_size, window=window)
    check_shapes({"q": (q, "B L Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    implementation = dispatch("column_mass", backend)
    return implementation(q, k, lengths, block_size=block_size, window=window)
