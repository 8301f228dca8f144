"""XAttention (arXiv 2503.16428): key blocks are ranked by sums over antidiagonals, and the fewest that hold a share of
the mass are attended to.

Queries and keys are taken in groups of `stride` tokens; the score of two groups is the sum, over an antidiagonal of
their square, of products q k. A softmax over a query group's row of scores, added up by blocks, says how much of its
attention each key block has. Where text and code differ this is the code (mit-han-lab/x-attention): the scores are
scaled by 1 / (stride sqrt(d)), the first block and the tile's own are always taken and their mass counts towards the
threshold, and a threshold of one number serves all heads: the paper's minimum thresholds by head come from a search on
data that were not released for other models.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import UserError, check_integer, check_number
from tca_jax.methods.base import Heads, Method
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed
from tca_jax.methods.full import FullCache
from tca_jax.methods.ranks import covering
from tca_jax.pallas_kernels.block_sparse_attention.lists import lists_of_mask
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, round_up, scaled_scores

_MOST_SCORES = 2**26  # that are in memory at once
_SEGMENTS = 4  # of the queries, each of which scores the keys up to its own end: 5/8 of all pairs instead of all


@dataclasses.dataclass(frozen=True)
class XAttentionPrefill(BlockSparsePrefill):
    """The fewest blocks of every tile that hold a share of its estimated mass.

    Attributes:
        threshold: That share, in (0, 1].
        stride: Tokens of a group, S; a divisor of `block_size`.
        block_size: Tokens in a block and queries in a tile.
        dense_tokens: Prompts of at most so many tokens get exact causal attention.
    """

    threshold: float = 0.9
    stride: int = 16
    block_size: int = 128
    dense_tokens: int = 1024

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0, at_most=1)
        check_integer("block_size", self.block_size, at_least=1)
        check_integer("stride", self.stride, at_least=1)
        if self.block_size % self.stride:
            raise UserError(f"stride = {self.stride}: must divide block_size = {self.block_size}")
        check_integer("dense_tokens", self.dense_tokens, at_least=0)

    def estimate(self, layer: int, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> tuple[Listed, ...]:
        sums = antidiagonal_mass(q, k, lengths, stride=self.stride, block_size=self.block_size)
        blocks = jnp.arange(sums.shape[-1])
        forced = (blocks == 0) | (blocks == blocks[:, None])
        held = jnp.where(forced, sums, 0).sum(axis=-1)
        others = ~forced & (blocks < blocks[:, None])
        chosen = covering(sums, self.threshold * sums.sum(axis=-1) - held, others)
        return (Listed(lists_of_mask(chosen | forced, self.block_size)),)


def antidiagonal_mass(
    q: Float[Array, "B L G d"], k: Float[Array, "B L d"], lengths: Int[Array, " B"], *, stride: int, block_size: int
) -> Float32[Array, "B G N N"]:
    """Estimated attention of every query tile on every key block: sums of softmax over the tile's groups of queries.

    Args:
        q: Queries of one KV head's group, right-padded.
        k: Its keys.
        lengths: Prompt lengths. A last group that is cut off counts with what it has.
        stride: Tokens of a group.
        block_size: Tokens in a block, and in a tile.
    """
    batch, length, group, dim = q.shape
    tiles, in_block = cdiv(length, block_size), block_size // stride
    at_once = max(1, _MOST_SCORES // (batch * group * in_block * tiles * in_block))  # tiles
    segments = min(_SEGMENTS, tiles)
    per = cdiv(tiles, segments)
    at_once = min(at_once, per)
    per = round_up(per, at_once)
    padded = segments * per * block_size
    real = (jnp.arange(length) < lengths[:, None])[..., None]
    k = jnp.pad(jnp.where(real, k, 0), ((0, 0), (0, tiles * block_size - length), (0, 0)))
    q = jnp.pad(jnp.where(real[..., None], q, 0), ((0, 0), (0, padded - length), (0, 0), (0, 0)))
    keys = k.reshape(batch, tiles * in_block, stride * dim)
    queries = q.reshape(batch, segments, per // at_once, at_once * in_block, stride, group, dim)
    queries = queries[:, :, :, :, ::-1].transpose(1, 2, 0, 5, 3, 4, 6)  # antidiagonals: the last query meets the first
    queries = queries.reshape(*queries.shape[:5], stride * dim)
    parts = []
    for segment in range(segments):
        end = min((segment + 1) * per, tiles)

        def mass(step: Array, segment: int = segment, end: int = end) -> Float32[Array, "B G t n"]:
            first = (segment * per + step * at_once) * in_block
            rows = queries[segment, step]
            return _mass_of_rows(rows, keys[:, : end * in_block], first, lengths, stride, in_block)

        sums = jax.lax.map(mass, jnp.arange(per // at_once))  # [steps, B, G, t, n]
        sums = jnp.moveaxis(sums, 0, 2).reshape(batch, group, per, end)
        parts.append(jnp.pad(sums, ((0, 0), (0, 0), (0, 0), (0, tiles - end))))
    return jnp.concatenate(parts, axis=2)[:, :, :tiles]


def _mass_of_rows(
    queries: Float[Array, "B G R e"],
    keys: Float[Array, "B K e"],
    first: Int[Array, ""],
    lengths: Int[Array, " B"],
    stride: int,
    in_block: int,
) -> Float32[Array, "B G t n"]:
    """Softmax of groups of queries, `first` the number of the first, over groups of keys, added up by blocks."""
    batch, group, rows, width = queries.shape
    dim = width // stride
    scores = scaled_scores("bgre,bke->bgrk", queries, keys) * (width**0.5 / (dim**0.5 * stride))
    row, column = first + jnp.arange(rows), jnp.arange(keys.shape[1])
    held = lengths[:, None] > stride * jnp.arange(max(1, keys.shape[1]))  # groups of keys with a token of the prompt
    seen = (column <= row[:, None]) & held[:, None, :]
    scores = jnp.where(seen[:, None], scores, MASKED)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights.reshape(batch, group, rows, -1, in_block).sum(axis=-1)
    alive = (stride * row < lengths[:, None])[:, None, :, None]
    shares = jnp.where(alive, weights / weights.sum(axis=-1, keepdims=True), 0)
    return shares.reshape(batch, group, rows // in_block, in_block, -1).sum(axis=-2)


def xattention(threshold: float = 0.9, stride: int = 16, block_size: int = 128, dense_tokens: int = 1024) -> Method:
    """XAttention for the prompt's queries; the cache keeps every token.

    Args:
        threshold: Share of its estimated mass that every query tile keeps, in (0, 1]: the knob of the budget.
        stride: Tokens of a group; half of it estimates better at four times the cost.
        block_size: Tokens in a block, a multiple of `stride`; 16 or a multiple of it for the Triton kernel.
        dense_tokens: Prompts of at most so many tokens get exact causal attention.

    Raises:
        ValueError: a number is not allowed.
    """
    return Method("xattention", XAttentionPrefill(threshold, stride, block_size, dense_tokens), FullCache())
