"""Decode attention through Pallas-Triton: a program takes all query heads of a region over one chunk of its tokens."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.kernel_math import LOG2E, streamed_tile
from tca_jax.pallas_kernels.kv import Pool, Ring, held_pools
from tca_jax.pallas_kernels.numerics import MASKED
from tca_jax.pallas_kernels.triton_call import check_supported, dot, multiprocessors
from tca_jax.pallas_kernels.triton_chunks import (
    ChunkConfig,
    ChunkLayout,
    Lists,
    Regions,
    State,
    attend_chunks,
    split,
)


class DecodeConfig(ChunkConfig):
    """Tiling of decode attention: a tile has the query heads of one region for rows."""


def default_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """Tiles of 16 KiB, and as many chunks as the multiprocessors hold at once; measured on an H200."""
    keys = streamed_tile(head_dim, itemsize)
    return DecodeConfig(keys=keys, programs=2 * multiprocessors(), warps=2, stages=3)


@partial(jax.jit, static_argnames=("block_size", "window", "capacity", "growth_capacity", "config", "interpret"))
@jax.named_scope("decode_attention")
def decode_attention(
    q: Float[Array, "B Hq d"],
    pool: Pool,
    ring: Ring,
    positions: Int[Array, " B"],
    *,
    growth: Pool | None = None,
    block_size: int,
    window: int,
    capacity: int,
    growth_capacity: int = 0,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq d"], Float32[Array, "B Hq"]]:
    """One softmax over ring and regions; see `decode_attention.decode_attention`.

    Tokens that are not attended to are never read.
    """
    _, kv_heads, _, head_dim = ring.k.shape
    pools = held_pools(pool, capacity, growth, growth_capacity)
    check_supported("decode_attention", head_dim, q, *ring, *(x for held in pools for x in (held.k, held.v)))
    config = config or default_config(head_dim, ring.k.dtype.itemsize)
    layout = ChunkLayout.plan(
        ring,
        config,
        group=q.shape[1] // kv_heads,
        queries=1,
        tiles_of_rows=1,
        block_size=block_size,
        window=window,
        capacities=(capacity, growth_capacity),
    )
    out, lse = attend_chunks(
        _attend_chunk,
        layout,
        q.reshape(-1, head_dim),
        pools,
        ring,
        positions,
        config=config,
        name="decode_attention",
        interpret=interpret,
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _attend_chunk(
    layout: ChunkLayout,
    q_ref: Any,
    pools: tuple[Regions, ...],
    ring: Ring,
    lists: Lists,
    out_ref: Any,
    peak_ref: Any,
    weight_ref: Any,
) -> None:
    """Attention of one region's query heads to one chunk of its tokens, not normalised."""
    chunk = pl.program_id(0)
    chunks = split(layout, lists)
    region = chunks.region_of(chunk)

    @pl.when(region < layout.regions)
    def _() -> None:
        begin, end = chunks.tiles_of(chunk, region)
        heads = jnp.arange(max(16, pl.next_power_of_2(layout.group)), dtype=jnp.int32)  # a matrix unit takes 16
        columns = jnp.arange(q_ref.shape[1], dtype=jnp.int32)
        seen = heads < layout.group
        where = (layout.whereabouts(region, heads)[:, None], columns[None])
        q = pltriton.load(q_ref.at[where], mask=seen[:, None], other=0.0)
        state = (
            jnp.full(heads.shape, MASKED, jnp.float32),
            jnp.zeros(heads.shape, jnp.float32),
            jnp.zeros(q.shape, jnp.float32),
        )
        for pool, pooled in zip(pools, chunks.pooled, strict=True):
            offset, length = pool.offsets[region], chunks.of(region, pooled)
            tiles = layout.tiles(length)
            step = _tile_step(layout, q, pool.k, pool.v, length, partial(operator.add, offset))
            state = lax.fori_loop(jnp.minimum(begin, tiles), jnp.minimum(end, tiles), step, state)
            begin, end = (jnp.maximum(tile, tiles) - tiles for tile in (begin, end))
        first, length = layout.local_tokens(chunks.of(region, chunks.positions))
        step = _tile_step(layout, q, ring.k, ring.v, length, layout.slots(region, first))
        peak, weight, out = lax.fori_loop(begin, end, step, state)
        rows = chunk * layout.rows + heads
        pltriton.store(peak_ref.at[rows], peak, mask=seen)
        pltriton.store(weight_ref.at[rows], weight, mask=seen)
        pltriton.store(out_ref.at[rows[:, None], columns[None]], out, mask=seen[:, None])


def _tile_step(
    layout: ChunkLayout, q: Array, k_ref: Any, v_ref: Any, length: Array, row_of: Callable[[Array], Array]
) -> Callable[[Array, State], State]:
    """The step of an online softmax, to base 2, over tiles of `length` tokens; `row_of` finds their rows."""
    scale = LOG2E / math.sqrt(q.shape[1])
    columns = jnp.arange(q.shape[1], dtype=jnp.int32)

    def step(tile: Array, state: State) -> State:
        peak, weight, out = state
        index = tile * layout.keys + jnp.arange(layout.keys, dtype=jnp.int32)
        seen = index < length
        where = (row_of(index)[:, None], columns[None])
        # Rows that are not attended to are not read: what they hold, NaN even, cannot reach the sums.
        k = pltriton.load(k_ref.at[where], mask=seen[:, None], other=0.0)
        v = pltriton.load(v_ref.at[where], mask=seen[:, None], other=0.0)
        scores = jnp.where(seen[None], dot(q, k, transposed=True) * scale, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights, decay = jnp.exp2(scores - new_peak[:, None]), jnp.exp2(peak - new_peak)
        out = out * decay[:, None] + dot(weights.astype(v.dtype), v)
        return new_peak, weight * decay + jnp.sum(weights, axis=1), out

    return step
