"""Paged attention: a few queries of each row over the pages that it holds; with one query, decoding."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.kv import Pages, check_pages


def paged_attention(
    q: Float[Array, "B m Hq d"],
    caches: tuple[Pages, ...],
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    *,
    window: int,
    backend: Backend = "auto",
) -> tuple[Float[Array, "B m Hq d"], Float32[Array, "B m Hq"]]:
    """Attention of up to a block of new tokens per row, whose own keys and values are in the pages already.

    Column j holds the query at position first + j. It attends to all kept tokens of its head, and to the token at
    position p iff max(0, (newest // b) b - window) <= p <= min(first + j, newest): what a prefill of the same tokens
    calls local. Columns past `newest` are padding. Slots that no query attends to may hold anything.

    Args:
        q: Queries [B, m, Hq, d], m <= b; query head h belongs to KV head h // (Hq // Hkv).
        caches: Pages that are attended to, all of one page size b. Their kept tokens are all attended to, and their
            windows together hold each local token once. A cache of R rows serves B / R neighbouring rows of `q` each.
        first: Position of the first query of every row [B]; may be traced.
        newest: Position of the row's last query [B], of the block of `first`; less than `first` where a row has no
            query, which then costs nothing; may be traced.
        window: Least number of local tokens, w; a multiple of b.
        backend: See `backends.Backend`.

    Returns:
        Output [B, m, Hq, d] in the type of `q`, zeros for padding, and lse, the log-sum-exp of the scores, float32
        [B, m, Hq], -1e30 for padding: exp(score - lse) is a token's attention probability, which eviction ranks by.
    """
    queries = {"q": (q, "B m Hq d"), "first": (first, "B"), "newest": (newest, "B")}
    sizes = check_pages(queries, caches, window=window)
    must = f"must be at most the page size, {sizes['b']}"
    require(sizes["m"] <= sizes["b"], f"q has {sizes['m']} queries per row: {must}")
    return dispatch("paged_attention", backend)(q, caches, first, newest, window=window)
