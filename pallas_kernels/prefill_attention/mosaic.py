"""Prefill attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper).

The memory warpgroup streams first the diagonal tile, then the last tile of the head's region in the pool, then the rest
of the region, then the window. Only the first two need a mask, so one unmasked loop does nearly all the work.
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

from tca_jax.errors import Unsupported, require
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
    start_moving,
)
from tca_jax.pallas_kernels.numerics import varying_like
from tca_jax.pallas_kernels.prefill_attention import FarBlocks


@dataclasses.dataclass(frozen=True)
class MosaicPrefillConfig:
    """Tiling of the kernel."""

    stages: int = 2  # K and V tiles in flight; each takes 512 d bytes of shared memory


# Under a jit of its own, all layers of a program share one kernel. JAX 0.11 numbers Mosaic kernels as it lowers them,
# so two calls never lower to the same text, and each would take a second to compile.
@functools.partial(jax.jit, static_argnames=("block_size", "window", "config"))
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
    config: MosaicPrefillConfig | None = None,
) -> Array:
    """See `prefill_attention.prefill_attention`. Values among the padding must be finite."""
    length, head_dim = q.shape[1], q.shape[3]
    config = config or MosaicPrefillConfig()
    require(far is None, "prefill_attention on mosaic takes no far blocks", Unsupported)
    check_supported("prefill_attention", q.dtype, head_dim, block_size)
    padding = -length % block_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    prefixes, order = prefix_schedule(budgets, q.shape[1] // block_size, window // block_size)
    operands = (q, k, v, pool.k, pool.v, pool.offsets, prefixes, lengths_by_head(lengths, k.shape[2]), order)
    work = functools.partial(_find_work, block_size=block_size, window=window)
    compute, move = (functools.partial(program, stages=config.stages) for program in (_compute, _move))
    out = mosaic_call(work, compute, move, operands, name="prefill_attention_kernel", stages=config.stages)
    return varying_like(out[:, :length], q, k, v, pool, budgets, lengths)


@dataclasses.dataclass(frozen=True)
class _Work:
    """One program's query tile of one head, and the K and V tiles that it reads, all traced int32 scalars.

    Steps run in this order: the diagonal tile, the region's last tile where only part of it counts (`tail` tokens),
    the region's `full_tiles`, the window's tiles from `edge_tile` to the diagonal. No step for a tile past the length.
    """

    row: Any
    head: Any
    kv_head: Any
    tile: Any
    length: Any
    offset: Any
    full_tiles: Any
    tail: Any
    edge_tile: Any
    masked_steps: Any
    steps: Any


def _find_work(refs: Any, *, block_size: int, window: int) -> _Work:
    q_ref, k_ref, _, _, _, offsets_ref, prefixes_ref, lengths_ref, order_ref, _ = refs
    num_kv_heads = k_ref.shape[2]
    group, tiles = q_ref.shape[2] // num_kv_heads, q_ref.shape[1] // TILE
    # Heads of a group run side by side and regions one after another, since they share K and V in L2; within a region
    # the longest tiles come first, and the largest regions first, so that the last programs to run are short ones.
    work = lax.axis_index("work")
    turn = lax.div(work, group)
    tile = tiles - 1 - lax.rem(turn, tiles)
    region = order_ref[lax.div(turn, tiles)]
    row, kv_head = lax.div(region, num_kv_heads), lax.rem(region, num_kv_heads)
    block = lax.div(tile * TILE, block_size)
    prefix = prefixes_ref[row, kv_head, block]
    edge_tile = lax.div(jnp.maximum(block * block_size - window, 0), TILE)
    full_tiles, tail = lax.div(prefix, TILE), lax.rem(prefix, TILE)
    length = lengths_ref[row, kv_head]
    alive = tile * TILE < length
    masked_steps = jnp.where(alive, jnp.where(tail > 0, 2, 1), 0)
    return _Work(
        row=row,
        head=kv_head * group + lax.rem(work, group),
        kv_head=kv_head,
        tile=tile,
        length=length,
        offset=offsets_ref[row, kv_head],
        full_tiles=full_tiles,
        tail=tail,
        edge_tile=edge_tile,
        masked_steps=masked_steps,
        steps=jnp.where(alive, masked_steps + full_tiles + tile - edge_tile, 0),
    )


def _move(refs: Any, scoped: Any, work: _Work, *, stages: int) -> None:
    """The memory warpgroup: fetches the diagonal tile, the region's last one, the rest of the region, the window."""
    _, k_ref, v_ref, k_pool_ref, v_pool_ref, *_ = refs
    start_moving()

    def fetch_pool(step: Any, tile: Any) -> None:
        index = aligned(work.offset + tile * TILE, TILE)  # regions start on multiples of 128
        fetch(scoped, stages, step, k_pool_ref.at[index], v_pool_ref.at[index])

    def fetch_prompt(step: Any, tile: Any) -> None:
        index = (work.row, aligned(tile * TILE, TILE), work.kv_head)
        fetch(scoped, stages, step, k_ref.at[index], v_ref.at[index])

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        fetch_prompt(jnp.int32(0), work.tile)
        pl.when(work.tail > 0)(lambda: fetch_pool(jnp.int32(1), work.full_tiles))
        pl.loop(0, work.full_tiles)(lambda i: fetch_pool(work.masked_steps + i, i))
        unmasked = work.masked_steps + work.full_tiles
        window_tiles = work.tile - work.edge_tile
        pl.loop(0, window_tiles)(lambda i: fetch_prompt(unmasked + i, work.edge_tile + i))


def _compute(refs: Any, scoped: Any, work: _Work, warpgroup: Any, *, stages: int) -> None:
    mask = functools.partial(_mask, work, warpgroup)
    attend(refs, scoped, work, warpgroup, stages=stages, first=work.tile * TILE, lowest=-jnp.inf, mask=mask)


def _mask(work: _Work, warpgroup: Any, _: Any, step: Any, scores: Any) -> Any:
    """Step 0 is the diagonal tile (column <= row), step 1 the region's last tile (column < tail)."""
    rows, columns = iotas(scores.shape)
    diagonal = (step == 0).astype(jnp.int32)
    bound = jnp.where(step == 0, warpgroup * ROWS + 1, work.tail)
    return jnp.where(columns < rows * diagonal + bound, scores, -jnp.inf)
