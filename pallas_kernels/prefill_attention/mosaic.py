"""Prefill attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper).

The memory warpgroup streams first the diagonal tile, then the last tile of the head's region in the pool, then the rest
of the region, then the window. Only the first two need a mask. Listed blocks and means come last, with a bias per key.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from tca_jax.pallas_kernels.kernel_math import lengths_by_head, prefix_schedule
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.mosaic_call import (
    ROWS,
    TILE,
    aligned,
    attend,
    check_supported,
    fetch,
    iotas,
    mosaic_call,
    query_tile,
    start_moving,
)
from tca_jax.pallas_kernels.numerics import MASKED, varying_like
from tca_jax.pallas_kernels.prefill_attention import FarBlocks


# Under a jit of its own, all layers of a program share one kernel. JAX 0.11 numbers Mosaic kernels as it lowers them,
# so two calls never lower to the same text, and each would take a second to compile.
@functools.partial(jax.jit, static_argnames=("block_size", "window"))
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
) -> Array:
    """See `prefill_attention.prefill_attention`. Values among the padding, and of all means, must be finite."""
    length, head_dim = q.shape[1], q.shape[3]
    check_supported("prefill_attention", q.dtype, head_dim, block_size)
    padding = -length % block_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    far_work = 0.0 if far is None else far.work(block_size)
    prefixes, order = prefix_schedule(budgets, q.shape[1] // block_size, window // block_size, far_work)
    of_far = () if far is None else _far_operands(far, padding, head_dim)
    table = (pool.offsets, prefixes, lengths_by_head(lengths, k.shape[2]), order)
    operands = (q, k, v, pool.k, pool.v, *table, *of_far)
    work = functools.partial(_find_work, block_size=block_size, window=window)
    move = functools.partial(_move, block_size=block_size)
    out = mosaic_call(work, _compute, move, operands, name="prefill_attention_kernel", biased=far is not None)
    return varying_like(out[:, :length], q, k, v, pool, budgets, lengths, far)


def _far_operands(far: FarBlocks, padding: int, head_dim: int) -> tuple[Array, ...]:
    """Lists, their counts, means, counts of means and biases of tokens and means, in units of the products of q and k.

    Means and their biases fill whole tiles.
    """
    blocks = far.counts.shape[-1]
    rest, counted = -blocks % TILE, jnp.arange(blocks) < far.mean_counts[..., None]
    mean_k, mean_v = (jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) for x in (far.mean_k, far.mean_v))
    token_bias = jnp.pad(jnp.where(far.selected, jnp.float32(MASKED), 0), ((0, 0), (0, 0), (0, padding)))
    mean_bias = jnp.maximum(jnp.where(counted, far.mean_bias * head_dim**0.5, MASKED), MASKED)
    mean_bias = jnp.pad(mean_bias, ((0, 0), (0, 0), (0, 0), (0, rest)), constant_values=MASKED)
    return far.blocks, far.counts, mean_k, mean_v, far.mean_counts, token_bias, mean_bias


@dataclasses.dataclass(frozen=True)
class _Work:
    """One program's query tile of one head, and the K and V tiles that it reads, all traced int32 scalars.

    Steps run in this order: the diagonal tile, the region's last tile where only part of it counts (`tail` tokens),
    the region's `full_tiles`, the window's tiles from `edge_tile` to the diagonal, then the `biased_steps`, which are
    the `listed_tiles` of listed blocks, and means. No step for a tile past the length.
    """

    row: Any
    head: Any
    kv_head: Any
    tile: Any
    block: Any
    length: Any
    offset: Any
    full_tiles: Any
    tail: Any
    edge_tile: Any
    masked_steps: Any
    listed_tiles: Any
    biased_steps: Any
    steps: Any


def _find_work(refs: Any, *, block_size: int, window: int) -> _Work:
    _, _, _, _, _, offsets_ref, prefixes_ref, lengths_ref, order_ref, *far, _ = refs
    row, kv_head, head, tile = query_tile(refs, order_ref)
    block = lax.div(tile * TILE, block_size)
    prefix = prefixes_ref[row, kv_head, block]
    edge_tile = lax.div(jnp.maximum(block * block_size - window, 0), TILE)
    full_tiles, tail = lax.div(prefix, TILE), lax.rem(prefix, TILE)
    length = lengths_ref[row, kv_head]
    alive = tile * TILE < length
    masked_steps = jnp.where(alive, jnp.where(tail > 0, 2, 1), 0)
    listed_tiles = biased_steps = jnp.int32(0)
    if far:
        _, counts_ref, _, _, mean_counts_ref, *_ = far
        listed_tiles = counts_ref[row, kv_head, block] * (block_size // TILE)
        biased_steps = listed_tiles + lax.div(mean_counts_ref[row, kv_head, block] + TILE - 1, TILE)
    return _Work(
        row=row,
        head=head,
        kv_head=kv_head,
        tile=tile,
        block=block,
        length=length,
        offset=offsets_ref[row, kv_head],
        full_tiles=full_tiles,
        tail=tail,
        edge_tile=edge_tile,
        masked_steps=masked_steps,
        listed_tiles=listed_tiles,
        biased_steps=jnp.where(alive, biased_steps, 0),
        steps=jnp.where(alive, masked_steps + full_tiles + tile - edge_tile + biased_steps, 0),
    )


def _move(refs: Any, scoped: Any, work: _Work, *, block_size: int) -> None:
    """The memory warpgroup: fetches the tiles in the order of `_Work`."""
    _, k_ref, v_ref, k_pool_ref, v_pool_ref, _, _, _, _, *far, _ = refs
    start_moving()

    def fetch_pool(step: Any, tile: Any) -> None:
        index = aligned(work.offset + tile * TILE, TILE)  # regions start on multiples of 128
        fetch(scoped, step, k_pool_ref.at[index], v_pool_ref.at[index])

    def fetch_prompt(step: Any, tile: Any, bias_ref: Any = None) -> None:
        tokens = aligned(tile * TILE, TILE)
        index = (work.row, tokens, work.kv_head)
        bias = None if bias_ref is None else bias_ref.at[work.row, work.kv_head, tokens]
        fetch(scoped, step, k_ref.at[index], v_ref.at[index], bias)

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        fetch_prompt(jnp.int32(0), work.tile)
        pl.when(work.tail > 0)(lambda: fetch_pool(jnp.int32(1), work.full_tiles))
        pl.loop(0, work.full_tiles)(lambda i: fetch_pool(work.masked_steps + i, i))
        unmasked = work.masked_steps + work.full_tiles
        window_tiles = work.tile - work.edge_tile
        pl.loop(0, window_tiles)(lambda i: fetch_prompt(unmasked + i, work.edge_tile + i))
        if not far:
            return
        blocks_ref, _, mean_k_ref, mean_v_ref, _, token_bias_ref, mean_bias_ref = far
        begin, parts = work.steps - work.biased_steps, block_size // TILE

        def listed(i: Any) -> Any:
            first = blocks_ref[work.row, work.kv_head, work.block, lax.div(i, jnp.int32(parts))]
            return lax.div(first, jnp.int32(TILE)) + lax.rem(i, jnp.int32(parts))

        def fetch_listed(i: Any, tile: Any) -> Any:
            following = listed(jnp.minimum(i + 1, work.listed_tiles - 1))  # read before this tile waits for its slot
            fetch_prompt(begin + i, tile, token_bias_ref)
            return following

        @pl.when(work.listed_tiles > 0)
        def fetch_blocks() -> None:
            lax.fori_loop(0, work.listed_tiles, fetch_listed, listed(jnp.int32(0)))

        @pl.loop(0, work.biased_steps - work.listed_tiles)
        def fetch_means(i: Any) -> None:
            index = (work.row, aligned(i * TILE, TILE), work.kv_head)
            bias = mean_bias_ref.at[work.row, work.kv_head, work.block, index[1]]
            step = begin + work.listed_tiles + i
            fetch(scoped, step, mean_k_ref.at[index], mean_v_ref.at[index], bias)


def _compute(refs: Any, scoped: Any, work: _Work, warpgroup: Any) -> None:
    mask = functools.partial(_mask, work, warpgroup)
    attend(refs, scoped, work, warpgroup, first=work.tile * TILE, mask=mask)


def _mask(work: _Work, warpgroup: Any, _: Any, step: Any, scores: Any) -> Any:
    """Step 0 is the diagonal tile (column <= row), step 1 the region's last tile (column < tail)."""
    rows, columns = iotas(scores.shape)
    diagonal = (step == 0).astype(jnp.int32)
    bound = jnp.where(step == 0, warpgroup * ROWS + 1, work.tail)
    return jnp.where(columns < rows * diagonal + bound, scores, -jnp.inf)
