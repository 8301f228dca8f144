"""The parts of block scores that are XLA's: sampled queries of kernels' programs, and the softmax over blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.block_scores import sampled_positions
from tca_jax.pallas_kernels.numerics import cdiv

_MOST_BYTES = 2**29  # of what a part of the tiles writes
#: Queries [B, Hkv, p, rows, d], tokens that each sees [B, p, rows] (-1: none) and first program [1] of a part to the
#: largest logits [B, Hkv, p, N, held] and their log-sum-exps over blocks [B, Hkv, p, held], to base 2.
Peaks = Callable[[Array, Array, Array], tuple[Array, ...]]


def by_parts(
    peaks_of: Peaks,
    q: Float[Array, "B L Hq d"],
    kv_heads: int,
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    stride: int,
    program_tiles: int,  # of a program
    held: int,  # rows of a program
) -> Float32[Array, "B Hkv N N"]:
    """Block scores; tiles are taken in parts of as many programs as may write at once, which bounds memory."""
    (batch, length, heads, head_dim), blocks = q.shape, cdiv(q.shape[1], block_size)
    programs, group = cdiv(blocks, program_tiles), heads // kv_heads
    parts = cdiv(programs, max(1, _MOST_BYTES // (4 * batch * kv_heads * blocks * held)))
    part = cdiv(programs, parts)
    tiles = parts * part * program_tiles
    positions = jnp.minimum(sampled_positions(lengths, tiles, block_size, stride), length - 1)  # [B, N', S]
    queries = jnp.take_along_axis(q, positions.reshape(batch, -1, 1, 1), axis=1, mode="promise_in_bounds")
    # Rows of a tile side by side: [B, Hkv, programs, tiles x S x G, d].
    queries = queries.reshape(batch, parts * part, program_tiles * (block_size // stride), kv_heads, group, head_dim)
    queries = jnp.moveaxis(queries, 3, 1).reshape(batch, kv_heads, parts * part, -1, head_dim)
    before = jnp.arange(tiles)[:, None] * block_size < lengths[:, None, None]  # tiles that begin before the length
    places = jnp.where(before, positions, -1).reshape(batch, parts * part, -1).repeat(group, axis=-1)

    def of_part(number: Array) -> Float32[Array, "B Hkv t N"]:
        first = number * part
        own = lax.dynamic_slice_in_dim(queries, first, part, axis=2)
        where = lax.dynamic_slice_in_dim(places, first, part, axis=1)
        peaks, sums = peaks_of(own, where, first[None].astype(jnp.int32))
        seen = (jnp.arange(blocks)[:, None] <= where[:, :, None] // block_size)[:, None]  # [B, 1, p, N, rows]
        shares = jnp.where(seen, jnp.exp2(peaks - sums[..., None, :])[..., : seen.shape[-1]], 0)
        largest = shares.reshape(batch, kv_heads, part, blocks, program_tiles, -1).max(axis=-1)
        return jnp.moveaxis(largest, 4, 3).reshape(batch, kv_heads, part * program_tiles, blocks)

    scores = lax.map(of_part, jnp.arange(parts, dtype=jnp.int32))  # [parts, B, Hkv, t, N]
    return jnp.moveaxis(scores, 0, 2).reshape(batch, kv_heads, tiles, blocks)[:, :, :blocks]
