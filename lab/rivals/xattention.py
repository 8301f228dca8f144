"""XAttention (arXiv 2503.16428): key blocks are ranked by sums over antidiagonals, and the fewest that hold a share of
the mass are attended to.

Queries and keys are taken in groups of `stride` tokens; the score of two groups is the sum, over an antidiagonal of
their square, of products q k. A softmax over a query group's row of scores, added up by blocks, says how much of its
attention each key block has. Where text and code differ this is the code (mit-han-lab/x-attention at 3185fb2):

- The scores are scaled by 1 / (stride sqrt(d)).
- The first block and the tile's own are always taken, and their mass counts towards the threshold.
- The code reads a prompt in chunks. In the first one a tile takes its own block, and of the others one more than its
  threshold asks for; the first block is one of the others. Up to 16,384 tokens the first chunk is the whole prompt,
  from there on the shorter the longer the prompt. `chunk=0` turns this off.
- Thresholds by query head are a table, as the authors publish one for LLaMA-3.1-8B; the search that made it is not
  here. One number serves all heads, as in the code's default.

Not as in the code: prompts of at most `dense_tokens` get exact attention (block-sparse tiles save nothing there).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.errors import UserError, check_integer, check_number, is_finite_number
from tca_jax.lab.rivals.head_tables import check_query_heads, numbers_by_head, of_layer
from tca_jax.lab.rivals.ranks import covering
from tca_jax.methods.base import Heads, Method
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed
from tca_jax.methods.full import FullCache
from tca_jax.pallas_kernels.block_sparse_attention.lists import lists_of_mask
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, round_up, scaled_scores

_MOST_SCORES = 2**26  # that are in memory at once
_SEGMENTS = 4  # of the queries, each of which scores the keys up to its own end: 5/8 of all pairs instead of all
_LEAST_CHUNK, _CHUNK_AREA = 2**11, 2**28  # tokens of the authors' chunks, and those times the prompt's


@dataclasses.dataclass(frozen=True)
class XAttentionPrefill(BlockSparsePrefill):
    """The fewest blocks of every tile that hold a share of its estimated mass."""

    threshold: float | tuple[tuple[float, ...], ...] = 0.9
    stride: int = 16
    block_size: int = 128
    dense_tokens: int = 1024
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None:
            check_integer("chunk", self.chunk, at_least=0)
        check_integer("block_size", self.block_size, at_least=1)
        check_integer("stride", self.stride, at_least=1)
        if self.block_size % self.stride:
            raise UserError(f"stride = {self.stride}: must divide block_size = {self.block_size}")
        check_integer("dense_tokens", self.dense_tokens, at_least=0)

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if isinstance(self.threshold, tuple):
            check_query_heads("threshold", self.threshold, num_layers, num_kv_heads)

    def estimate(self, layer: int, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> tuple[Listed, ...]:
        sums = antidiagonal_mass(q, k, lengths, stride=self.stride, block_size=self.block_size)
        threshold = self._threshold_of(layer, heads, head, q.shape[2])
        chunk = first_chunk(lengths) if self.chunk is None else jnp.full_like(lengths, self.chunk)
        in_chunk = (jnp.arange(sums.shape[-1]) * self.block_size < chunk[:, None])[:, None]  # [B, 1, tiles]
        chosen = chosen_blocks(sums, threshold, in_chunk)
        return (Listed(lists_of_mask(chosen, self.block_size)),)

    def _threshold_of(self, layer: int, heads: Heads, head: Array, group: int) -> Array | float:
        """The threshold of each query head of a KV head `[G, 1]`, or that of all."""
        if not isinstance(self.threshold, tuple):
            return self.threshold
        shares = np.asarray(of_layer("threshold", self.threshold, layer, heads.of_model * group), np.float32)
        return jnp.asarray(heads.of(shares.reshape(-1, group)))[head][:, None]


def first_chunk(lengths: Int[Array, " B"]) -> Int[Array, " B"]:
    """Tokens of the first chunk in which the authors' code reads prompts of such lengths `[B]`."""
    power = jnp.int32(1) << (32 - jax.lax.clz(jnp.maximum(lengths - 1, 0)))
    return jnp.maximum(jnp.minimum(jnp.maximum(power, _LEAST_CHUNK), _CHUNK_AREA // power), _LEAST_CHUNK)


def chosen_blocks(
    sums: Float32[Array, "B G N N"], threshold: Array | float, in_chunk: Bool[Array, "B 1 N"]
) -> Bool[Array, "B G N N"]:
    """Blocks that every tile attends to.

    Args:
        sums: Estimated attention of every tile on every block `[B, G, N, N]`.
        threshold: Share of it, a number or `[G, 1]`.
        in_chunk: Tiles of the first chunk `[B, 1, N]`.
    """
    blocks = jnp.arange(sums.shape[-1])
    own, before = blocks == blocks[:, None], blocks < blocks[:, None]
    forced = own | ((blocks == 0) & ~in_chunk[..., None])
    missing = threshold * sums.sum(axis=-1) - jnp.where(forced, sums, 0).sum(axis=-1)
    others = before & ~forced
    fewest = covering(sums, missing, others)
    left = others & ~fewest
    next_one = left & (blocks == jnp.argmax(jnp.where(left, sums, -1), axis=-1, keepdims=True))
    return forced | fewest | (next_one & in_chunk[..., None])


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


def xattention(
    threshold: float | Sequence[Sequence[float]] | np.ndarray = 0.9,
    stride: int = 16,
    block_size: int = 128,
    dense_tokens: int = 1024,
    chunk: int | None = None,
) -> Method:
    """XAttention for the prompt's queries; the cache keeps every token.

    Args:
        threshold: Share of its estimated mass that every query tile keeps, in (0, 1]: the knob of the budget. Or one
            for each query head, `[layers, Hq]`, such as a table that the authors published.
        stride: Tokens of a group; half of it estimates better at four times the cost.
        block_size: Tokens in a block, a multiple of `stride`; 16 or a multiple of it for the Triton kernel.
        dense_tokens: Prompts of at most so many tokens get exact causal attention.
        chunk: Tokens of the first chunk, in which the authors' code selects otherwise; None: as that code has it for
            the prompt's length; 0: no tile selects so.

    Raises:
        ValueError: a number is not allowed.
    """
    shares = _checked_threshold(threshold)
    return Method("xattention", XAttentionPrefill(shares, stride, block_size, dense_tokens, chunk), FullCache())


def _checked_threshold(value: Any) -> float | tuple[tuple[float, ...], ...]:
    if is_finite_number(value):
        check_number("threshold", value, above=0, at_most=1)
        return float(value)
    table = numbers_by_head(
        "threshold",
        value,
        "[layers, Hq]",
        lambda shares: (shares > 0) & (shares <= 1),
        "must lie in (0, 1]",
        otherwise="a number, or numbers ",
    )
    return tuple(map(tuple, table.tolist()))
