"""XAttention (arXiv 2503.16428): a tile attends to the fewest key blocks that hold a share of its antidiagonal sums.

Queries and keys are taken in groups of `stride` tokens; the score of two groups is the sum, over an antidiagonal of
their square, of products q k, over stride sqrt(d). A softmax over a query group's scores, summed by blocks, is the mass
of each key block. Follows mit-han-lab/x-attention at 3185fb2: the first block and the tile's own are always taken and
count towards the threshold. The code reads in chunks; in the first one (of the whole prompt up to 16,384 tokens, then
shorter) a tile takes one block more than its threshold asks for; `chunk=0` turns this off. Thresholds by query head are
a table. What differs: prompts of at most `dense_tokens` get exact attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.errors import check_integer, check_number, is_finite_number, require
from tca_jax.lab.rivals.compression import rival
from tca_jax.lab.rivals.scores import covering
from tca_jax.lab.rivals.tables import check_shape, numbers_by_head, of_layer
from tca_jax.methods.base import Heads, Layer
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed, lists_of_mask
from tca_jax.pallas_kernels.numerics import cdiv, scaled_scores

_AT_ONCE = 16  # tiles whose scores are in memory together
_SEGMENTS = 4  # of the queries, each of which scores the keys up to its own end: 5/8 of all pairs instead of all
_LEAST_CHUNK, _CHUNK_AREA = 2**11, 2**28  # tokens of the authors' chunks, and those times the prompt's


@dataclasses.dataclass(frozen=True)
class XAttentionPrefill(BlockSparsePrefill):
    # share of its estimated mass that every tile keeps, in (0, 1]: the knob of the budget; or a table `[layers, Hq]`
    threshold: Any = 0.9
    stride: int = 16  # tokens of a group; half of it estimates better at four times the cost
    block_size: int = 128  # tokens in a block, a multiple of `stride`; 16 or a multiple of it for the Triton kernel
    dense_tokens: int = 1024  # longest prompt, in tokens, with exact causal attention
    chunk: int | None = None  # tokens of the first chunk; None: as the code has it for the prompt's length; 0: none

    def __post_init__(self) -> None:
        if is_finite_number(self.threshold):
            check_number("threshold", self.threshold, above=0, at_most=1)
            threshold: Any = float(self.threshold)
        else:
            shape = "a number, or numbers [layers, Hq]"
            table = numbers_by_head("threshold", self.threshold, shape, above=0, at_most=1)
            threshold = tuple(map(tuple, table.tolist()))
        object.__setattr__(self, "threshold", threshold)
        check_integer("chunk", 0 if self.chunk is None else self.chunk, at_least=0)
        check_integer("block_size", self.block_size, at_least=1)
        check_integer("stride", self.stride, at_least=1)
        divides = self.block_size % self.stride == 0
        require(divides, f"stride = {self.stride}: must divide block_size = {self.block_size}")
        check_integer("dense_tokens", self.dense_tokens, at_least=0)

    @property
    def layers_differ(self) -> bool:  # type: ignore[override]
        return isinstance(self.threshold, tuple)

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if isinstance(self.threshold, tuple):
            check_shape("threshold", self.threshold, num_layers, num_kv_heads, "query heads")

    def estimate(self, layer: Layer, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> Listed:
        sums = antidiagonal_mass(q, k, lengths, stride=self.stride, block_size=self.block_size)
        threshold, group = self.threshold, q.shape[2]
        if isinstance(threshold, tuple):
            shares = np.asarray(of_layer("threshold", threshold, layer, heads.of_model * group), np.float32)
            threshold = jnp.asarray(heads.of(shares.reshape(-1, group)))[head][:, None]
        chunk = first_chunk(lengths) if self.chunk is None else jnp.full_like(lengths, self.chunk)
        in_chunk = (jnp.arange(sums.shape[-1]) * self.block_size < chunk[:, None])[:, None]  # [B, 1, tiles]
        return lists_of_mask(chosen_blocks(sums, threshold, in_chunk), self.block_size, k.shape[1])


xattention = rival("xattention", XAttentionPrefill)


def first_chunk(lengths: Int[Array, " B"]) -> Int[Array, " B"]:
    """Tokens of the first chunk in which the authors' code reads prompts, by their lengths."""
    power = jnp.int32(1) << (32 - jax.lax.clz(jnp.maximum(lengths - 1, 0)))
    return jnp.maximum(jnp.minimum(jnp.maximum(power, _LEAST_CHUNK), _CHUNK_AREA // power), _LEAST_CHUNK)


def chosen_blocks(
    sums: Float32[Array, "B G N N"],
    threshold: Array | float,  # of each query head `[G, 1]`, or of all
    in_chunk: Bool[Array, "B 1 N"],
) -> Bool[Array, "B G N N"]:
    """Blocks that every tile attends to, by its estimated attention on every block; `in_chunk`: tiles of the first."""
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
    """Estimated attention of query tiles on key blocks: softmax over groups of `stride` queries, summed."""
    batch, length, group, dim = q.shape
    tiles, in_block = cdiv(length, block_size), block_size // stride
    outside = tiles * block_size - length
    real = (jnp.arange(length) < lengths[:, None])[..., None]
    k = jnp.pad(jnp.where(real, k, 0), ((0, 0), (0, outside), (0, 0)))
    q = jnp.pad(jnp.where(real[..., None], q, 0), ((0, 0), (0, outside), (0, 0), (0, 0)))
    keys = k.reshape(batch, tiles * in_block, stride * dim)
    queries = q.reshape(batch, tiles, in_block, stride, group, dim)
    queries = queries[:, :, :, ::-1].transpose(1, 0, 4, 2, 3, 5)  # antidiagonals: the last query meets the first key
    queries = queries.reshape(*queries.shape[:4], stride * dim)
    parts, per = [], cdiv(tiles, _SEGMENTS)
    for first in range(0, tiles, per):
        end = min(first + per, tiles)

        def of_tile(tile: Array, end: int = end) -> Float32[Array, "B G n"]:
            """Softmax of a tile's groups of queries over groups of keys, added up by blocks."""
            scores = scaled_scores("bgre,bke->bgrk", queries[tile], keys[:, : end * in_block])
            row, column = tile * in_block + jnp.arange(in_block)[:, None], jnp.arange(end * in_block)
            seen = (column <= row) & (stride * column < lengths[:, None, None])  # groups with a token of the prompt
            shares = jax.nn.softmax(scores / stride**0.5, axis=-1, where=seen[:, None])  # divides by sqrt(stride d)
            of_blocks = shares.reshape(*shares.shape[:3], end, in_block).sum(axis=-1)
            return jnp.where((stride * row < lengths[:, None, None])[:, None], of_blocks, 0).sum(axis=2)

        sums = jax.lax.map(of_tile, jnp.arange(first, end), batch_size=min(_AT_ONCE, end - first))
        parts.append(jnp.pad(jnp.moveaxis(sums, 0, 2), ((0, 0), (0, 0), (0, 0), (0, tiles - end))))
    return jnp.concatenate(parts, axis=2)
