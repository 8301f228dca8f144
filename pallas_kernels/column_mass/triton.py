"""Column mass through Pallas-Triton: a pass for the norm of every row, a second for the sums of every column.

In the first, a program holds a query tile and streams the keys left of it. In the second, a program holds a key tile
and streams the queries, of all heads of its group, that see it: first the tiles that need a mask, then near and far
ones apart. A query's edge is that of its block and tiles divide blocks, so a pair of tiles is near or far as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import Unsupported
from tca_jax.pallas_kernels.kernel_math import (
    LOG2E,
    divide_up,
    full_precision_tile,
    quotient_and_remainder,
    shared_memory,
)
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, round_up
from tca_jax.pallas_kernels.triton_call import check_supported, dot, scaled_exp2, triton_call


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """Tiling of one pass.

    Attributes:
        queries: Tokens of a query tile, a power of two from 16.
        keys: Tokens of a key tile, a power of two from 16.
        warps: Warps of a program.
        stages: Tiles in flight in a program.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class ColumnMassConfig:
    """Tiling of column mass.

    Attributes:
        norms: Of the pass over rows.
        columns: Of the pass over columns; both tiles divide the block size.
    """

    norms: PassConfig
    columns: PassConfig


def default_config(block_size: int, head_dim: int, dtype: Any) -> ColumnMassConfig:
    """Tiles that let two programs share a multiprocessor: one has the matrix units while the other takes powers."""
    if jnp.dtype(dtype).itemsize == 4:
        tile, warps = full_precision_tile(head_dim)
        passes = (PassConfig(size, size, warps, stages=1) for size in (tile, math.gcd(block_size, tile)))
        return ColumnMassConfig(*passes)
    tile = math.gcd(block_size, 128)
    held = 128 * head_dim * jnp.dtype(dtype).itemsize
    streamed = next(size for size in (128, 64, 32) if held + 2 * size * held // 128 <= shared_memory())
    norms = PassConfig(128, streamed, warps=8, stages=2)
    return ColumnMassConfig(norms, PassConfig(min(tile, streamed), tile, warps=4, stages=2))


@partial(jax.jit, static_argnames=("block_size", "window", "config", "interpret"))
@jax.named_scope("column_mass")
def column_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    config: ColumnMassConfig | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "B Hkv L"], Float32[Array, "B Hkv L"]]:
    """(near, far); see `column_mass.column_mass`. What lies past a row's length is never read.

    Raises:
        NotImplementedError: the head dimension, the types, or a block size that is no multiple of 16.
    """
    batch, length, kv_heads, head_dim = k.shape
    check_supported("column_mass", head_dim, q, k)
    if block_size % 16:
        raise Unsupported(f"column_mass on Triton: block_size = {block_size}: must be a multiple of 16, the least tile")
    config = config or default_config(block_size, head_dim, q.dtype)
    norms = row_norms(q, k, lengths, config=config.norms, multiple=config.columns.queries, interpret=interpret)
    tiles = cdiv(length, config.columns.keys)
    sums = ((batch, kv_heads, tiles * config.columns.keys), jnp.float32)
    near, far = triton_call(
        partial(_sum_columns, block_size=block_size, window=window, config=config.columns, interpret=interpret),
        (q, k, norms, lengths),
        [sums, sums],
        grid=(batch * kv_heads * tiles,),
        name="column_mass_columns",
        warps=config.columns.warps,
        stages=config.columns.stages,
        interpret=interpret,
    )
    return near[..., :length], far[..., :length]


def row_norms(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    config: PassConfig,
    multiple: int,
    interpret: bool,
) -> Float32[Array, "B Hq N"]:
    """The negated logarithm, to base 2, of every query's sum of exponentials; minus infinity past a length.

    Args:
        q: Queries [B, L, Hq, d].
        k: Keys [B, L, Hkv, d].
        lengths: Lengths [B].
        config: Tiling.
        multiple: What N, L rounded up, is a multiple of.
        interpret: Whether to run in interpret mode.
    """
    batch, length, heads, _ = q.shape
    padded = round_up(length, max(config.queries, multiple))
    (norms,) = triton_call(
        partial(_find_norms, config=config, interpret=interpret),
        (q, k, lengths),
        [((batch, heads, padded), jnp.float32)],
        grid=(batch * heads * (padded // config.queries),),
        name="column_mass_norms",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    return norms


def _find_norms(
    q_ref: Any, k_ref: Any, lengths_ref: Any, norms_ref: Any, *, config: PassConfig, interpret: bool
) -> None:
    """Norms of one query tile of one head."""
    kv_heads, head_dim = k_ref.shape[2:]
    group, tiles = q_ref.shape[2] // kv_heads, norms_ref.shape[2] // config.queries
    # Heads of a group run side by side, for they share K; the longest tiles come first.
    turn, member = quotient_and_remainder(pl.program_id(0), group)
    turn, tile = quotient_and_remainder(turn, tiles)
    row, kv_head = quotient_and_remainder(turn, kv_heads)
    head, first = kv_head * group + member, (tiles - 1 - tile) * config.queries
    length = lengths_ref[row]
    rows, columns = first + jnp.arange(config.queries), jnp.arange(config.keys)
    q = pltriton.load(q_ref.at[row, pl.ds(first, config.queries), head, :], mask=(rows < length)[:, None], other=0.0)
    scale = LOG2E / math.sqrt(head_dim)
    power = partial(scaled_exp2, scale=scale, interpret=interpret)

    def step(i: Array, state: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        peak, weight = state
        token = i * config.keys + columns
        where = k_ref.at[row, pl.ds(i * config.keys, config.keys), kv_head, :]
        k = pltriton.load(where, mask=(token < length)[:, None], other=0.0) if masked else where[...]
        scores = dot(q, k, transposed=True)
        if masked:
            scores = jnp.where(token[None, :] <= rows[:, None], scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        bias = -scale * new_peak
        weights = power(scores, bias=jnp.broadcast_to(bias[:, None], scores.shape))
        return new_peak, weight * power(peak, bias=bias) + jnp.sum(weights, axis=1)

    # The diagonal first: after it every row has a finite maximum. No trips for a tile past the length.
    last = divide_up(jnp.minimum(first + config.queries, length), config.keys)
    whole, _ = quotient_and_remainder(jnp.where(first < length, first, 0), config.keys)
    state = (jnp.full((config.queries,), MASKED, jnp.float32), jnp.zeros((config.queries,), jnp.float32))
    state = lax.fori_loop(jnp.where(first < length, whole, last), last, partial(step, masked=True), state)
    peak, weight = lax.fori_loop(0, whole, partial(step, masked=False), state)
    norms_ref[row, head, pl.ds(first, config.queries)] = jnp.where(
        rows < length, -(scale * peak + LOG2E * jnp.log(weight)), -jnp.inf
    )


def _sum_columns(
    q_ref: Any,
    k_ref: Any,
    norms_ref: Any,
    lengths_ref: Any,
    near_ref: Any,
    far_ref: Any,
    *,
    block_size: int,
    window: int,
    config: PassConfig,
    interpret: bool,
) -> None:
    """Near and far sums of one key tile, over all heads of its group."""
    batch, _, heads, head_dim = q_ref.shape
    kv_heads = k_ref.shape[2]
    group = heads // kv_heads
    # The first key tiles are seen by the most queries.
    tile, region = quotient_and_remainder(pl.program_id(0), batch * kv_heads)
    row, kv_head = quotient_and_remainder(region, kv_heads)
    length, start = lengths_ref[row], tile * config.keys
    tokens, within = start + jnp.arange(config.keys), jnp.arange(config.queries)
    k = pltriton.load(k_ref.at[row, pl.ds(start, config.keys), kv_head, :], mask=(tokens < length)[:, None], other=0.0)

    def weights(position: Array, head: Array, q: Array) -> Array:
        """Attention [keys, queries] of the queries from `position` on; 0 for those past the length."""
        norms = norms_ref[row, head, pl.ds(position, config.queries)]
        scores = dot(k, q, transposed=True)
        bias = jnp.broadcast_to(norms[None, :], scores.shape)
        return scaled_exp2(scores, LOG2E / math.sqrt(head_dim), bias, interpret=interpret)

    def plain(i: Array, sums: Array) -> Array:
        number, member = quotient_and_remainder(i, group)
        position, head = number * config.queries, kv_head * group + member
        q = q_ref[row, pl.ds(position, config.queries), head, :]
        return sums + jnp.sum(weights(position, head, q), axis=1)

    # Query tiles: the diagonal ends at `clear`, near ones at `near_end`, and those without padding at `whole`.
    (first, _), clear = quotient_and_remainder(start, config.queries), divide_up(start + config.keys, config.queries)
    whole, padded = quotient_and_remainder(length, config.queries)
    block, _ = quotient_and_remainder(start, block_size)
    near_end = (block + window // block_size + 1) * (block_size // config.queries)

    def masked(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        number, member = quotient_and_remainder(i, group)
        number = jnp.where(number < clear, number, whole)  # the diagonal, then the tile that has padding
        position, head = number * config.queries, kv_head * group + member
        token = position + within
        q = pltriton.load(
            q_ref.at[row, pl.ds(position, config.queries), head, :], mask=(token < length)[:, None], other=0.0
        )
        mass = jnp.sum(jnp.where(tokens[:, None] <= token[None, :], weights(position, head, q), 0), axis=1)
        near = number < near_end
        return sums[0] + jnp.where(near, mass, 0), sums[1] + jnp.where(near, 0, mass)

    last = jnp.where((padded > 0) & (whole >= clear), clear + 1, clear)
    last = jnp.where(start < length, last, first)
    zeros = jnp.zeros((config.keys,), jnp.float32)
    near, far = lax.fori_loop(first * group, last * group, masked, (zeros, zeros))
    border = jnp.clip(near_end, clear, jnp.maximum(whole, clear))
    near = lax.fori_loop(clear * group, border * group, plain, near)
    far = lax.fori_loop(border * group, whole * group, plain, far)
    near_ref[row, kv_head, pl.ds(start, config.keys)] = jnp.where(tokens < length, near / group, 0)
    far_ref[row, kv_head, pl.ds(start, config.keys)] = jnp.where(tokens < length, far / group, 0)
