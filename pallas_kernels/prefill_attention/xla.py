"""Prefill attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tca_jax.pallas_kernels.kernel_math import lengths_by_head, prefix_schedule
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import round_up, scaled_scores, zero_padding
from tca_jax.pallas_kernels.online_softmax import KeyValues, OnlineSoftmax, Span, attend_span
from tca_jax.pallas_kernels.prefill_attention import FarBlocks
from tca_jax.pallas_kernels.tiles import Tiles, default_tiles, heads_first, tile_map


@partial(jax.jit, static_argnames=("block_size", "window", "tiles"))
@jax.named_scope("prefill_attention")
def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    pool: Pool,
    budgets: Array,
    lengths: Array,
    *,
    block_size: int,
    window: int,
    far: FarBlocks | None = None,
    tiles: Tiles | None = None,
) -> Array:
    """One online softmax a query tile, over its prefix of the pool, its window, listed blocks and means."""
    batch, length, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    lengths = lengths_by_head(lengths, kv_heads)
    group = q_heads // kv_heads
    tiles = tiles or default_tiles(block_size, length)
    if far is not None:  # a tile has one list
        tiles = dataclasses.replace(tiles, queries=block_size)
    padded = round_up(length, tiles.queries)
    num_tiles, size = padded // tiles.queries, tiles.queries * group
    queries = heads_first(q, kv_heads, padded)
    # A weight of zero does not silence a NaN among the padding's values; zeros do.
    local = KeyValues(heads_first(k, kv_heads, length), heads_first(zero_padding(v, lengths), kv_heads, length))
    pooled = KeyValues(pool.k, pool.v)
    prefixes, _ = prefix_schedule(budgets, padded // block_size, window // block_size)

    def one_tile(index: Array) -> Float[Array, "R d"]:
        index, head = jnp.divmod(index, kv_heads)  # heads run fastest: tiles computed at once cost about the same
        row, number = jnp.divmod(index, num_tiles)
        region = row * kv_heads + head
        first = number * tiles.queries
        end = jnp.minimum(first + tiles.queries, lengths[row, head])
        position = jnp.repeat(first + jnp.arange(tiles.queries), group)  # of every row of the tile
        block = position // block_size
        prefix, edge = prefixes[row, head, block], jnp.maximum(0, block * block_size - window)
        selected = jnp.where(first < end, prefix[-1], 0)
        pool_span = Span(pool.offsets[row, head], jnp.int32(0), selected, jnp.zeros_like(prefix), prefix)
        window_span = Span(region * length, edge[0], end, edge, position + 1)

        rows = jax.lax.dynamic_slice_in_dim(queries, (region * padded + first) * group, size)
        state = OnlineSoftmax.empty(*rows.shape)
        state = attend_span(rows, pooled, pool_span, state, tiles.keys)
        state = attend_span(rows, local, window_span, state, tiles.keys)
        if far is not None:
            place, keys = (row, head, number), KeyValues(k[row, :, head], v[row, :, head])
            state = _attend_far(rows, state, far, keys, place, first < end, block_size)
        return jnp.where((position < lengths[row, head])[:, None], state.attention(), 0).astype(q.dtype)

    outputs = tile_map(one_tile, batch * num_tiles * kv_heads, tiles.parallel)
    outputs = outputs.reshape(batch, num_tiles, kv_heads, tiles.queries, group, head_dim).swapaxes(2, 3)
    return outputs.reshape(batch, padded, q_heads, head_dim)[:, :length]


def _attend_far(
    rows: Array,
    state: OnlineSoftmax,
    far: FarBlocks,
    keys: KeyValues,  # of the row and head
    place: tuple[Array, ...],
    alive: Array,
    block_size: int,
) -> OnlineSoftmax:
    """With the listed blocks and the means of a query block, `place` [row, KV head, block]."""
    row, head, _ = place
    free = ~far.selected[row, head]

    def listed(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        first = far.blocks[(*place, i)]  # left of a window, so the block is whole
        k, v, seen = (jax.lax.dynamic_slice_in_dim(x, first, block_size) for x in (*keys, free))
        scores = scaled_scores("rd,kd->rk", rows, k)
        return state.attend(scores, jnp.broadcast_to(seen, scores.shape), v)

    state = jax.lax.fori_loop(0, jnp.where(alive, far.counts[place], 0), listed, state)
    bias = far.mean_bias[place]
    seen = (bias > -jnp.inf) & (jnp.arange(len(bias)) < jnp.where(alive, far.mean_counts[place], 0))
    scores = scaled_scores("rd,kd->rk", rows, far.mean_k[row, :, head]) + jnp.where(seen, bias, 0)
    return state.attend(scores, jnp.broadcast_to(seen, scores.shape), far.mean_v[row, :, head])
