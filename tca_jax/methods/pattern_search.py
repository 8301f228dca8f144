"""MInference's offline search: how much of its attention each query head keeps under each candidate pattern."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.methods.head_patterns import HeadPattern
from tca_jax.methods.minference import PatternArrays, best_blocks, lines
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, scaled_scores

#: What the published search compares. Sizes of a block-sparse head play no part: it keeps an eighth of blocks of 32.
CANDIDATES = (
    HeadPattern("a_shape", 100, 800),
    HeadPattern("vertical_slash", 30, 800),
    HeadPattern("vertical_slash", 100, 750),
    HeadPattern("vertical_slash", 500, 700),
    HeadPattern("vertical_slash", 3500, 100),
    HeadPattern("block_sparse", 8, 1),
)
#: Queries before this one do not count: what they attend to is near.
FIRST_QUERY = 2500
_SEARCH_BLOCK, _SEARCH_PARTS = 32, 8
_NEAREST_DIAGONALS = 30  # that a vertical-slash head takes first: in the search fewer than in inference
_ROWS = 64  # queries at once


@partial(jax.jit, static_argnames=("candidates", "first_query"))
def pattern_scores(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    candidates: tuple[HeadPattern, ...] = CANDIDATES,
    first_query: int = FIRST_QUERY,
) -> Float32[Array, "B Hq P"]:
    """Attention mass that each head keeps under each candidate, mean over its queries from `first_query` on.

    Columns and diagonals count as such, not as the blocks that inference computes. Memory is linear in L but for the
    block-sparse candidate; the time is that of full attention, once for each candidate.

    Args:
        q: Queries after RoPE, right-padded.
        k: Keys after RoPE.
        lengths: Lengths of the texts, above `first_query`.
        candidates: Patterns to compare; static.
        first_query: First query that counts; static.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    q = q.reshape(batch, length, kv_heads, group, dim)

    def one_head(head: Array) -> Float32[Array, "B G P"]:
        queries, keys = q[:, :, head], k[:, :, head]
        seen = [_lines_or_blocks(candidate, queries, keys, lengths) for candidate in candidates]

        def rows(step: Array) -> Float32[Array, "B G P"]:
            number = step * _ROWS + jnp.arange(_ROWS)
            counts = (number >= first_query) & (number < lengths[:, None])  # [B, R]
            position = jnp.minimum(number, length - 1)
            attention = _attention(queries[:, position], keys, position, lengths)
            kept = [jnp.where(_visible(each, position, length), attention, 0).sum(axis=-1) for each in seen]
            return jnp.where(counts[:, None, :, None], jnp.stack(kept, axis=-1), 0).sum(axis=2)

        return jax.lax.map(rows, jnp.arange(cdiv(length, _ROWS))).sum(axis=0)

    sums = jax.lax.map(one_head, jnp.arange(kv_heads))  # [Hkv, B, G, P]
    number = jnp.maximum(lengths - first_query, 1)[:, None, None]
    return jnp.moveaxis(sums, 0, 1).reshape(batch, heads, len(candidates)) / number


def _lines_or_blocks(candidate: HeadPattern, q: Array, k: Array, lengths: Array) -> tuple[Array, ...]:
    """Columns and diagonals [B, G, L] of a candidate, or its pairs of blocks [B, G, N, N]."""
    if candidate.kind == "block_sparse":
        blocks = cdiv(q.shape[1], _SEARCH_BLOCK) // _SEARCH_PARTS
        return (best_blocks(q, k, lengths, max(1, blocks), _SEARCH_BLOCK),)
    if candidate.kind == "a_shape":  # the search's mask reaches one diagonal further
        candidate = candidate._replace(diagonals=candidate.diagonals + 1)
    own = PatternArrays.of((candidate,) * q.shape[2])
    return lines(q, k, lengths, PatternArrays(*map(jnp.asarray, own)), _NEAREST_DIAGONALS)


def _attention(
    q: Float[Array, "B R G d"], k: Float[Array, "B L d"], position: Int[Array, " R"], lengths: Int[Array, " B"]
) -> Float32[Array, "B G R L"]:
    """Full attention of some queries."""
    column = jnp.arange(k.shape[1])
    seen = (column <= position[:, None]) & (column < lengths[:, None, None])
    scores = jnp.where(seen[:, None], scaled_scores("brgd,bld->bgrl", q, k), MASKED)
    return jnp.where(seen[:, None], jax.nn.softmax(scores, axis=-1), 0)


def _visible(seen: tuple[Array, ...], position: Int[Array, " R"], length: int) -> Bool[Array, "B G R L"]:
    """What some queries see of what they could."""
    if len(seen) == 1:
        of_blocks = seen[0][:, :, position // _SEARCH_BLOCK]
        return jnp.repeat(of_blocks, _SEARCH_BLOCK, axis=-1)[..., :length]
    columns, diagonals = seen
    back = jnp.maximum(position[:, None] - jnp.arange(length), 0)
    return columns[:, :, None] | diagonals[:, :, back]
