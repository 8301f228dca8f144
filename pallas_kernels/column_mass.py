"""Column mass: how much attention every token gets from nearby queries and from far ones (calibration).

Two passes over the causal triangle, in O(L) memory.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.checks import check_blocks, check_shapes
from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.numerics import round_up, scaled_scores, varying_like
from tca_jax.pallas_kernels.online_softmax import KeyValues, OnlineSoftmax, Span, attend_span
from tca_jax.pallas_kernels.tiles import Tiles, default_tiles, heads_first, tile_map


@partial(jax.jit, static_argnames=("block_size", "window", "tiles"))
@jax.named_scope("column_mass")
def column_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    tiles: Tiles | None = None,
) -> tuple[Float32[Array, "B Hkv L"], Float32[Array, "B Hkv L"]]:
    """Column sums of the causal softmax(Q K^T / sqrt(d)), averaged over each group (Algorithm 1).

    Args:
        q: Queries [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Lengths [B]; may be traced.
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w; a multiple of b.
        tiles: Tile sizes; None for those of the device.

    Returns:
        (near, far), each [B, Hkv, L]: the column's sum over the queries that hold the token in their local
        range, and over those whose range, from max(0, (i // b) b - w) on, lies right of it. 0 past a length.
    """
    check_blocks(block_size, window=window)
    check_shapes({"q": (q, "B L Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    batch, length, q_heads, _ = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    tiles = tiles or default_tiles(block_size, length)
    padded_q, padded_k = round_up(length, tiles.queries), round_up(length, tiles.keys)
    queries, keys = heads_first(q, kv_heads, padded_q), heads_first(k, kv_heads, padded_k)
    unweighted = KeyValues(keys, jnp.zeros((len(keys), 1), keys.dtype))  # only the softmax counts
    query_tiles, num_tiles, size = padded_q // tiles.queries, padded_k // tiles.keys, tiles.queries * group

    def log_sum_exp(index: Array) -> Array:
        """Of every query of a tile, arbitrary past a length."""
        region, number = jnp.divmod(index, query_tiles)  # region: (row, KV head)
        rows = jax.lax.dynamic_slice_in_dim(queries, index * size, size)
        position = jnp.repeat(number * tiles.queries + jnp.arange(tiles.queries), group)
        end = jnp.minimum((number + 1) * tiles.queries, lengths[region // kv_heads])
        end = jnp.where(number * tiles.queries < end, end, 0)
        span = Span(region * padded_k, jnp.int32(0), end, jnp.zeros_like(position), position + 1)
        return attend_span(rows, unweighted, span, OnlineSoftmax.empty(size, 1), tiles.keys).log_sum_exp()

    norms = tile_map(log_sum_exp, batch * kv_heads * query_tiles, tiles.parallel).reshape(-1)

    def one_tile(index: Array) -> tuple[Array, Array]:
        region, number = jnp.divmod(index, num_tiles)  # region: (row, KV head)
        end = lengths[region // kv_heads]
        column = number * tiles.keys + jnp.arange(tiles.keys)
        tile = jax.lax.dynamic_slice_in_dim(keys, region * padded_k + number * tiles.keys, tiles.keys)

        def step(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            start = (region * padded_q + i * tiles.queries) * group
            scores = scaled_scores("rd,kd->rk", jax.lax.dynamic_slice_in_dim(queries, start, size), tile)
            position = jnp.repeat(i * tiles.queries + jnp.arange(tiles.queries), group)[:, None]
            seen = (column <= position) & (position < end)
            norm = jax.lax.dynamic_slice_in_dim(norms, start, size)[:, None]
            # A query's edge is that of its block, so a block's rows can be summed before near and far part.
            mass = jnp.where(seen, jnp.exp(scores - norm), 0).reshape(-1, block_size * group, tiles.keys).sum(axis=1)
            block = i * (tiles.queries // block_size) + jnp.arange(mass.shape[0])
            near = column >= (jnp.maximum(0, block - window // block_size) * block_size)[:, None]
            return sums[0] + jnp.where(near, mass, 0).sum(axis=0), sums[1] + jnp.where(near, 0, mass).sum(axis=0)

        zeros = jnp.zeros(tiles.keys, jnp.float32)
        first = number * tiles.keys // tiles.queries
        sums = varying_like((zeros, zeros), q, k, lengths)
        near, far = jax.lax.fori_loop(first, divide_up(end, tiles.queries), step, sums)
        return near / group, far / group

    near, far = tile_map(one_tile, batch * kv_heads * num_tiles, tiles.parallel)
    shape = (batch, kv_heads, padded_k)
    return near.reshape(shape)[..., :length], far.reshape(shape)[..., :length]
