"""Column mass in plain JAX: the oracle of the operation; two passes over the causal triangle, O(L) memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.numerics import MASKED, round_up, scaled_scores, varying_like
from tca_jax.pallas_kernels.tiles import Tiles, default_tiles, heads_first, tile_map


@partial(jax.jit, static_argnames=("block_size", "window", "tiles"))
@jax.named_scope("column_mass")
def column_mass(
    q: Array, k: Array, lengths: Array, *, block_size: int, window: int, tiles: Tiles | None = None
) -> tuple[Array, Array]:
    """Row log-sum-exp, then every key tile over the queries that see it; see `column_mass.column_mass`."""
    batch, length, q_heads, _ = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    tiles = tiles or default_tiles(block_size, length)
    norms = row_log_sum_exp(q, k, lengths, block_size=block_size, tiles=tiles)
    padded_q, padded_k = round_up(length, tiles.queries), round_up(length, tiles.keys)
    queries, keys = heads_first(q, kv_heads, padded_q), heads_first(k, kv_heads, padded_k)
    norms = heads_first(norms[..., None], kv_heads, padded_q)[:, 0]
    num_tiles, size = padded_k // tiles.keys, tiles.queries * group

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


@partial(jax.jit, static_argnames=("block_size", "tiles"))
@jax.named_scope("row_log_sum_exp")
def row_log_sum_exp(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    tiles: Tiles | None = None,
) -> Float32[Array, "B L Hq"]:
    """Log-sum-exp of every query's causal scores; arbitrary past a length."""
    batch, length, q_heads, _ = q.shape
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    tiles = tiles or default_tiles(block_size, length)
    padded_q, padded_k = round_up(length, tiles.queries), round_up(length, tiles.keys)
    queries, keys = heads_first(q, kv_heads, padded_q), heads_first(k, kv_heads, padded_k)
    num_tiles, size = padded_q // tiles.queries, tiles.queries * group

    def one_tile(index: Array) -> Array:
        region, number = jnp.divmod(index, num_tiles)
        rows = jax.lax.dynamic_slice_in_dim(queries, index * size, size)
        position = jnp.repeat(number * tiles.queries + jnp.arange(tiles.queries), group)[:, None]

        def step(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            tile = jax.lax.dynamic_slice_in_dim(keys, region * padded_k + i * tiles.keys, tiles.keys)
            seen = i * tiles.keys + jnp.arange(tiles.keys) <= position
            scores = jnp.where(seen, scaled_scores("rd,kd->rk", rows, tile), MASKED)
            peak = jnp.maximum(state[0], scores.max(axis=-1))
            weight = jnp.where(seen, jnp.exp(scores - peak[:, None]), 0).sum(axis=-1)
            return peak, state[1] * jnp.exp(state[0] - peak) + weight

        end = jnp.minimum((number + 1) * tiles.queries, lengths[region // kv_heads])
        trips = jnp.where(number * tiles.queries < end, divide_up(end, tiles.keys), 0)
        empty = jnp.full(size, MASKED, jnp.float32), jnp.zeros(size, jnp.float32)
        peak, weight = jax.lax.fori_loop(0, trips, step, varying_like(empty, q, k, lengths))
        return peak + jnp.log(weight)

    norms = tile_map(one_tile, batch * kv_heads * num_tiles, tiles.parallel)
    norms = norms.reshape(batch, kv_heads, padded_q, group)[:, :, :length]
    return norms.swapaxes(1, 2).reshape(batch, length, q_heads)
