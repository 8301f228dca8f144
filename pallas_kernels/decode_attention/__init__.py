"""Decode attention: one query a row, over its window in a ring and its heads' regions of the KV pools."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks
from tca_jax.pallas_kernels.kv import Pool, Ring, check_cache


def decode_attention(
    q: Float[Array, "B Hq d"],
    pool: Pool,
    ring: Ring,
    positions: Int[Array, " B"],
    *,
    growth: Pool | None = None,
    block_size: int,
    window: int,
    capacity: int,
    growth_capacity: int = 0,
    backend: Backend = "auto",
) -> tuple[Float[Array, "B Hq d"], Float32[Array, "B Hq"]]:
    """Attention of one new token a row, whose own key and value are in the ring already.

    Ring slot s holds position p = pos - ((pos - s) mod R), and is attended to iff
    p >= max(0, (pos // b) b - w): what a prefill of the same tokens would call local. Values that are not
    attended to must be finite.

    Args:
        q: Queries [B, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        pool: Selected tokens, at most `capacity` of them in a region. Rows may share regions: answers that go on
            from one document have equal offsets.
        ring: The latest tokens; R is a multiple of b: w + b, or less if all fits.
        positions: Position of every query [B]; may be traced.
        growth: A second pool, all of whose regions are attended to as well, at most `growth_capacity` tokens in each:
            what is kept of the tokens after the document.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w; a multiple of b.
        capacity: Largest capacity of a region; 0 when the pool holds nothing.
        growth_capacity: The same of `growth`.
        backend: See `backends.Backend`.

    Returns:
        Output [B, Hq, d] in the type of `q`, and lse, the log-sum-exp of the scores, float32 [B, Hq]:
        exp(score - lse) is a token's attention probability, which eviction ranks by.

    Raises:
        ValueError: a shape, `block_size`, `window`, a capacity or `backend` is not allowed.
    """
    check_blocks(block_size, window=window)
    queries = {"q": (q, "B Hq d"), "positions": (positions, "B")}
    check_cache(queries, pool, growth, ring, capacity=capacity, growth_capacity=growth_capacity)
    implementation = dispatch("decode_attention", backend)
    return implementation(
        q,
        pool,
        ring,
        positions,
        growth=growth,
        block_size=block_size,
        window=window,
        capacity=capacity,
        growth_capacity=growth_capacity,
    )
