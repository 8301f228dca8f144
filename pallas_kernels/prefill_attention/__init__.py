"""Prefill attention: every query over its window and over a prefix of its head's selected tokens (Eq. 3)."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes, check_whole_blocks
from tca_jax.pallas_kernels.kv import Pool, pool_shapes


def prefill_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    pool: Pool,
    budgets: Int[Array, "B Hkv nb"],
    lengths: Int[Array, " B"] | Int[Array, "B Hkv"],
    *,
    block_size: int,
    window: int,
    backend: Backend = "auto",
) -> Float[Array, "B L Hq d"]:
    """Attention of a whole prompt over local and selected tokens (Eq. 3).

    Query i attends to its local tokens [max(0, (i // b) b - w), i] and to the selected tokens left of them, a
    prefix of its head's region, for a region is sorted by position. The cost is that of the pairs kept. With
    a window of at least L this is exact causal attention.

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        v: Values [B, L, Hkv, d].
        pool: Selected tokens, as `select_tokens` lays them out.
        budgets: Selected tokens of every block [B, Hkv, L // b]; 0 for blocks that are not ranked.
        lengths: Prompt lengths [B], or one for each KV head [B, Hkv]; may be traced. A head of length 0 costs nothing
            and gives zeros.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w; a multiple of b.
        backend: See `backends.Backend`.

    Returns:
        [B, L, Hq, d] in the type of `q`; rows past a length are zero.
    """
    check_blocks(block_size, window=window)
    sizes = check_shapes(
        {
            "q": (q, "B L Hq d"),
            "k": (k, "B L Hkv d"),
            "v": (v, "B L Hkv d"),
            **pool_shapes(pool),
            "budgets": (budgets, "B Hkv nb"),
            "lengths": (lengths, "B" if lengths.ndim == 1 else "B Hkv"),
        }
    )
    check_whole_blocks("budgets", sizes, block_size)
    implementation = dispatch("prefill_attention", backend)
    return implementation(q, k, v, pool, budgets, lengths, block_size=block_size, window=window)
