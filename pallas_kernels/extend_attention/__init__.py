"""Extend attention: the queries of part of a block, over cached tokens, the window and each other."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import UserError
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks
from tca_jax.pallas_kernels.kv import Pool, Ring, check_cache


def extend_attention(
    q: Float[Array, "B m Hq d"],
    pool: Pool,
    ring: Ring,
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    *,
    growth: Pool | None = None,
    block_size: int,
    window: int,
    capacity: int,
    growth_capacity: int = 0,
    backend: Backend = "auto",
) -> tuple[Float[Array, "B m Hq d"], Float32[Array, "B m Hq"]]:
    """Attention of up to a block of new tokens per row, whose own keys and values are in the ring already.

    Column j holds the query at position first + j. Ring slot s holds position p = newest - ((newest - s) mod R), and
    query j attends to it iff max(0, (newest // b) b - w) <= p <= min(first + j, newest), and to all of its head's
    regions: what m calls of `decode_attention`, one token each, attend to. Columns past `newest` are padding. Values
    that are not attended to must be finite.

    Args:
        q: Queries [B, m, Hq, d], m <= b; query head h belongs to KV head h // (Hq // Hkv).
        pool: Selected tokens, at most `capacity` of them in a region. Rows may share regions, as in decode attention.
        ring: The latest tokens up to `newest`; R is a multiple of b: w + b, or less if all fits.
        first: Position of the first query of every row [B]; may be traced.
        newest: Position of the row's last token in the ring [B], of the block of `first`; less than `first` where a
            row has no query, which then costs nothing; may be traced.
        growth: A second pool, all of whose regions are attended to as well, at most `growth_capacity` tokens in each.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w; a multiple of b.
        capacity: Largest capacity of a region; 0 when the pool holds nothing.
        growth_capacity: The same of `growth`.
        backend: See `backends.Backend`.

    Returns:
        Output [B, m, Hq, d] in the type of `q`, zeros for padding, and lse, the log-sum-exp of the scores, float32
        [B, m, Hq], -1e30 for padding.

    Raises:
        ValueError: a shape, `block_size`, `window`, a capacity or `backend` is not allowed.
    """
    check_blocks(block_size, window=window)
    queries = {"q": (q, "B m Hq d"), "first": (first, "B"), "newest": (newest, "B")}
    sizes = check_cache(queries, pool, growth, ring, capacity=capacity, growth_capacity=growth_capacity)
    if sizes["m"] > block_size:
        raise UserError(f"q has {sizes['m']} queries per row: must be at most block_size = {block_size}")
    implementation = dispatch("extend_attention", backend)
    return implementation(
        q,
        pool,
        ring,
        first,
        newest,
        growth=growth,
        block_size=block_size,
        window=window,
        capacity=capacity,
        growth_capacity=growth_capacity,
    )
