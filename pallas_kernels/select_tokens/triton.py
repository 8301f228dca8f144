"""Token selection through Pallas-Triton: a program a block ranks its tokens and copies the best into the pool.

Reads and writes what is kept, and clears the rows of the pool that no token takes: nothing is written twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.triton_call import check_supported, triton_call

MAX_BLOCK = 256  # the largest whose pairs of tokens one program compares
_CLEARED = 32  # rows that a program clears at once


@partial(jax.jit, static_argnames=("block_size", "pool_tokens", "rows", "cleared", "interpret"))
@jax.named_scope("select_tokens")
def select_tokens(
    scores: Array,
    budgets: Array,
    k: Array,
    v: Array,
    offsets: Array,
    *,
    block_size: int,
    pool_tokens: int,
    rows: int = 32,  # tokens that a program copies at once, a power of two
    cleared: int = 1024,  # rows that a program clears where the pool holds no tokens
    interpret: bool = False,
) -> Pool:
    """Ranks and copies; see `select_tokens.select_tokens`."""
    batch, length, kv_heads, head_dim = k.shape
    check_supported("select_tokens", head_dim, k, v)
    fits, must = block_size <= MAX_BLOCK and not block_size & (block_size - 1), f"a power of two, at most {MAX_BLOCK}"
    require(fits, f"select_tokens on Triton: block_size = {block_size}: must be {must}", Unsupported)
    regions, blocks = batch * kv_heads, length // block_size
    if blocks == 0 or pool_tokens == 0:
        kept = jnp.clip(budgets, 0, block_size).sum(axis=-1, dtype=jnp.int32)
        shape = (pool_tokens, head_dim)
        return Pool(jnp.zeros(shape, k.dtype), jnp.zeros(shape, v.dtype), offsets, kept)
    call = partial(triton_call, warps=4, stages=1, interpret=interpret)
    budgets, counts = budgets.reshape(regions, blocks), [((regions, blocks), jnp.int32), ((regions,), jnp.int32)]
    before, kept = call(partial(_count, block_size), (budgets,), counts, grid=(regions,), name="select_tokens_count")
    # A region's share of the clearing programs, were all gaps of one size.
    clearers = cdiv(pool_tokens, regions * cleared)
    kernel = partial(_select_or_clear, length, kv_heads, block_size, blocks, clearers, rows)
    of_regions = scores.reshape(regions, length), budgets, before, kept, offsets.reshape(regions)
    operands = *of_regions, k.reshape(-1, head_dim), v.reshape(-1, head_dim)
    pools = [((pool_tokens, head_dim), x.dtype) for x in (k, v)]
    grid = regions, blocks + clearers  # heads run side by side: a token's keys lie together
    k_pool, v_pool = call(kernel, operands, pools, grid=grid, name="select_tokens")
    return Pool(k_pool, v_pool, offsets, kept.reshape(batch, kv_heads))


def _count(block_size: int, budgets_ref: Any, before_ref: Any, kept_ref: Any) -> None:
    """Tokens kept of a region before each of its blocks, and in all."""
    region, blocks = pl.program_id(0), budgets_ref.shape[1]
    lanes = jnp.arange(pl.next_power_of_2(blocks), dtype=jnp.int32)
    valid = lanes < blocks
    kept = jnp.clip(pltriton.load(budgets_ref.at[region, lanes], mask=valid, other=0), 0, block_size)
    pltriton.store(before_ref.at[region, lanes], jnp.cumsum(kept) - kept, mask=valid)
    kept_ref[region] = jnp.sum(kept)


def _select_or_clear(
    tokens: int, kv_heads: int, block_size: int, blocks: int, clearers: int, rows: int, *refs: Any
) -> None:
    """Selects from one block, or clears one share of the gap after a region."""
    scores_ref, budgets_ref, before_ref, kept_ref, offsets_ref, k_ref, v_ref, *pool_refs = refs
    region, work = pl.program_id(0), pl.program_id(1)

    @pl.when(work < blocks)
    def _() -> None:
        budget = jnp.clip(budgets_ref[region, work], 0, block_size)
        slots = _ranked_slots(scores_ref, region, work * block_size, budget, block_size)
        lanes, columns = jnp.arange(block_size, dtype=jnp.int32), jnp.arange(k_ref.shape[1], dtype=jnp.int32)
        first = lax.div(region, jnp.int32(kv_heads)) * tokens + work * block_size
        head = lax.rem(region, jnp.int32(kv_heads))
        start = offsets_ref[region] + before_ref[region, work]

        def copy(i: Array, _: None) -> None:
            order = i * rows + jnp.arange(rows, dtype=jnp.int32)
            chosen = jnp.sum(jnp.where(slots[:, None] == order[None], lanes[:, None], 0), axis=0)
            source, target = (first + chosen) * kv_heads + head, start + order
            wanted = ((order < budget) & (target < pool_refs[0].shape[0]))[:, None]
            places = source[:, None], columns[None]
            tiles = [pltriton.load(ref.at[places], mask=wanted, other=0.0) for ref in (k_ref, v_ref)]
            for ref, tile in zip(pool_refs, tiles, strict=True):
                pltriton.store(ref.at[target[:, None], columns[None]], tile, mask=wanted)

        lax.fori_loop(0, divide_up(budget, rows), copy, None)

    @pl.when(work >= blocks)
    def _() -> None:
        gap = _gap(offsets_ref, kept_ref, region, offsets_ref[region] + kept_ref[region])
        _clear(pool_refs, *gap, work - blocks, clearers)

    @pl.when((work >= blocks) & (region == 0))
    def _() -> None:
        _clear(pool_refs, *_gap(offsets_ref, kept_ref, -1, 0), work - blocks, clearers)


def _ranked_slots(scores_ref: Any, region: Array, first: Array, budget: Array, block_size: int) -> Array:
    """Where in the block's output each of its tokens goes, by position; -1 for one that is not kept."""
    lanes = jnp.arange(block_size, dtype=jnp.int32)
    scores = scores_ref[region, first + lanes]
    own, other = scores[None], scores[:, None]  # the others along the rows: a thread sums its column by itself
    ahead = (other > own) | ((other == own) & (lanes[:, None] < lanes[None]))
    kept = jnp.sum(ahead.astype(jnp.int32), axis=0) < budget
    return jnp.where(kept, jnp.cumsum(kept.astype(jnp.int32)) - 1, -1)


def _gap(offsets_ref: Any, kept_ref: Any, region: Array | int, begin: Array | int) -> tuple[Array | int, Array]:
    """The rows from `begin`, where a region's tokens end, to where the next begins; region -1: the pool's start."""
    lanes = jnp.arange(pl.next_power_of_2(offsets_ref.shape[0]), dtype=jnp.int32)
    valid = lanes < offsets_ref.shape[0]
    starts = pltriton.load(offsets_ref.at[lanes], mask=valid, other=-1)
    kept = pltriton.load(kept_ref.at[lanes], mask=valid, other=0)
    # Of empty regions at one offset the last owns the gap.
    follows = (starts > begin) | ((starts == begin) & ((kept > 0) | (lanes > region)))
    return begin, jnp.min(jnp.where(follows, starts, np.iinfo(np.int32).max))


def _clear(pool_refs: list[Any], begin: Array | int, end: Array, share: Array, shares: int) -> None:
    """Writes zeros to every `shares`-th tile of rows of [begin, end)."""
    rows, head_dim = pool_refs[0].shape
    lanes, columns = jnp.arange(_CLEARED, dtype=jnp.int32), jnp.arange(head_dim, dtype=jnp.int32)
    end = jnp.minimum(end, rows)

    def clear(i: Array, _: None) -> None:
        targets = begin + (share + i * shares) * _CLEARED + lanes
        for ref in pool_refs:
            zeros = jnp.zeros((_CLEARED, head_dim), ref.dtype)
            pltriton.store(ref.at[targets[:, None], columns[None]], zeros, mask=(targets < end)[:, None])

    tiles = divide_up(jnp.maximum(end - begin, 0), _CLEARED)
    lax.fori_loop(0, divide_up(jnp.maximum(tiles - share, 0), shares), clear, None)
