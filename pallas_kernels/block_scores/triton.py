"""Block scores through Pallas-Triton: one pass over the keys keeps the largest logit of every sampled query and block.

A program has the sampled queries of some neighbouring tiles of a KV head, all heads of the group, and goes over the
blocks up to its last tile. It writes one number for each query and block, a `block_size`-th of the logits, and each
query's log-sum-exp over its blocks; XLA takes the powers. Tiles are taken in parts, which bounds what is written.
Operands of 16 bits are rounded to int8 (rounding.py): products take half the time, and logits move by about a percent
of their spread.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.block_scores import sampled_positions
from tca_jax.pallas_kernels.kernel_math import LOG2E, full_precision_tile, lengths_by_head, shared_memory
from tca_jax.pallas_kernels.numerics import MASKED, cdiv
from tca_jax.pallas_kernels.rounding import HEAD_DIMS, mean_key, round_keys, round_queries, tiles_of_prompt
from tca_jax.pallas_kernels.triton_call import check_supported, dot, scaled_exp2, triton_call

_MOST_ROWS = 256  # of a program
_MOST_BYTES = 2**29  # of what a part of the tiles writes


@dataclasses.dataclass(frozen=True)
class BlockScoresConfig:
    """Tiling of block scores."""

    tiles: int  # query tiles of a program
    keys: int  # tokens of a tile of K, a power of two from 16 that divides the block size
    warps: int  # warps of a program
    stages: int  # tiles of K in flight in a program


def default_config(rows: int, block_size: int, head_dim: int, dtype: Any) -> BlockScoresConfig:
    """About 128 query rows and up to a block of keys, so that two programs share a multiprocessor."""
    most, itemsize = math.gcd(block_size, 128), jnp.dtype(dtype).itemsize
    if itemsize == 4:
        side, warps = full_precision_tile(head_dim)
        return BlockScoresConfig(1, min(most, side), warps, stages=1)
    tiles = max(1, 128 // rows)
    held = max(16, pl.next_power_of_2(tiles * rows))
    for keys, stages in ((128, 3), (128, 2), (128, 1), (64, 1), (32, 1), (16, 1)):
        in_flight = stages * block_size if stages > 1 else keys  # Triton's pipeline holds all tiles of a block at once
        if 2 * (held + in_flight) * head_dim * itemsize <= shared_memory():
            break
    return BlockScoresConfig(tiles, min(most, keys), 8 if held > 128 else 4, stages)


@partial(jax.jit, static_argnames=("block_size", "stride", "config", "interpret"))
@jax.named_scope("block_scores")
def block_scores(
    q: Array,
    k: Array,
    lengths: Array,
    *,
    block_size: int,
    stride: int,
    config: BlockScoresConfig | None = None,
    interpret: bool = False,
) -> Array:
    """See `block_scores.block_scores`."""
    batch, length, kv_heads, head_dim = k.shape
    check_supported("block_scores", head_dim, q, k, block_size=block_size)
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0, 0), jnp.float32)
    group, blocks = q.shape[2] // kv_heads, cdiv(length, block_size)
    rows = block_size // stride * group
    given = f"{block_size // stride} queries of a tile times {group} heads"
    require(rows <= _MOST_ROWS, f"block_scores on Triton: {given}: at most {_MOST_ROWS}", Unsupported)
    rounded = k.dtype != jnp.float32 and head_dim in HEAD_DIMS
    peak_type = jnp.float16 if rounded else jnp.float32  # finer than products of int8
    config = config or default_config(rows, block_size, head_dim, jnp.int8 if rounded else k.dtype)
    held = max(16, pl.next_power_of_2(config.tiles * rows))
    # Parts of as many programs as may write at once.
    programs = cdiv(blocks, config.tiles)
    parts = cdiv(programs, max(1, _MOST_BYTES // (4 * batch * kv_heads * blocks * held)))
    part = cdiv(programs, parts)
    tiles = parts * part * config.tiles
    positions = jnp.minimum(sampled_positions(lengths, tiles, block_size, stride), length - 1)  # [B, N', S]
    queries = jnp.take_along_axis(q, positions.reshape(batch, -1, 1, 1), axis=1, mode="promise_in_bounds")
    if rounded:
        queries, scales = round_queries(queries, interpret)
        by_head = lengths_by_head(lengths, kv_heads)
        tiles_of_keys = tiles_of_prompt(by_head, blocks * block_size, config.keys)
        k, key_scales = round_keys(k, tiles_of_keys, mean_key(k, by_head), config.keys, interpret)
    else:
        scales = jnp.full(queries.shape[:-1], LOG2E / math.sqrt(head_dim), jnp.float32)
        key_scales = jnp.ones((batch, blocks * block_size // config.keys, kv_heads), jnp.float32)

    def by_program(x: Array) -> Array:
        """Rows of a tile side by side, from [B, N' x S, Hq, ...]: [B, Hkv, programs, tiles x S x G, ...]."""
        x = x.reshape(batch, parts * part, config.tiles * (block_size // stride), kv_heads, group, *x.shape[3:])
        return jnp.moveaxis(x, 3, 1).reshape(batch, kv_heads, parts * part, -1, *x.shape[5:])

    rows_of_q = by_program(queries), by_program(scales)
    before = jnp.arange(tiles)[:, None] * block_size < lengths[:, None, None]  # tiles that begin before the length
    places = jnp.where(before, positions, -1).reshape(batch, parts * part, -1).repeat(group, axis=-1)
    kernel = partial(_peaks, block_size=block_size, held=held, config=config, interpret=interpret)

    def of_part(number: Array) -> Float32[Array, "B Hkv t N"]:
        first = number * part
        own = [lax.dynamic_slice_in_dim(x, first, part, axis=2) for x in rows_of_q]
        where = lax.dynamic_slice_in_dim(places, first, part, axis=1)
        peaks, sums = triton_call(
            kernel,
            (*own, where, k, key_scales, lengths, first[None].astype(jnp.int32)),
            [((batch, kv_heads, part, blocks, held), peak_type), ((batch, kv_heads, part, held), jnp.float32)],
            grid=(part, kv_heads, batch),
            name="block_scores",
            warps=config.warps,
            stages=config.stages,
            interpret=interpret,
        )
        return _shares(peaks, sums, where, config.tiles, block_size)

    scores = lax.map(of_part, jnp.arange(parts, dtype=jnp.int32))  # [parts, B, Hkv, t, N]
    return jnp.moveaxis(scores, 0, 2).reshape(batch, kv_heads, tiles, blocks)[:, :, :blocks]


def _shares(
    peaks: Float[Array, "B Hkv p N held"],
    sums: Float32[Array, "B Hkv p held"],
    places: Int[Array, "B p rows"],  # -1: sees nothing
    tiles: int,
    block_size: int,
) -> Float32[Array, "B Hkv t N"]:
    """The softmax of each row over its blocks, the largest of the rows of a tile."""
    batch, kv_heads, part, blocks, _ = peaks.shape
    seen = (jnp.arange(blocks)[:, None] <= places[:, :, None] // block_size)[:, None]  # [B, 1, p, N, rows]
    shares = jnp.where(seen, jnp.exp2(peaks - sums[..., None, :])[..., : seen.shape[-1]], 0)
    largest = shares.reshape(batch, kv_heads, part, blocks, tiles, -1).max(axis=-1)
    return jnp.moveaxis(largest, 4, 3).reshape(batch, kv_heads, part * tiles, blocks)


def _peaks(
    q_ref: Any,
    scales_ref: Any,
    places_ref: Any,
    k_ref: Any,
    key_scales_ref: Any,
    lengths_ref: Any,
    first_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    *,
    block_size: int,
    held: int,
    config: BlockScoresConfig,
    interpret: bool,
) -> None:
    """The largest logit of each row in each block, and the log-sum-exp of these, to base 2."""
    _, _, part, count, head_dim = q_ref.shape
    zero = jnp.zeros((), q_ref.dtype)
    unseen = np.int32(-(2**30)) if q_ref.dtype == jnp.int8 else np.float32(-(2.0**99))  # product of a masked token
    turn, head, row = (pl.program_id(axis) for axis in range(3))
    program = part - 1 - turn  # the last tiles, which see most, come first
    length = lengths_ref[row]
    first_tile = (first_ref[0] + program) * config.tiles
    lanes, columns = jnp.arange(held), jnp.arange(config.keys)
    own = lanes < count
    at, dims = jnp.where(own, lanes, 0), jnp.arange(head_dim)
    q = pltriton.load(q_ref.at[row, head, program, at[:, None], dims[None, :]], mask=own[:, None], other=zero)
    scale = pltriton.load(scales_ref.at[row, head, program, at], mask=own, other=0.0)
    place = pltriton.load(places_ref.at[row, program, at], mask=own, other=0)
    steps = block_size // config.keys
    power, alive = partial(scaled_exp2, interpret=interpret), first_tile * block_size < length
    end = jnp.minimum(first_tile + config.tiles, (length + block_size - 1) // block_size)

    def one_block(block: Array, state: tuple[Array, Array], *, masked: bool) -> tuple[Array, Array]:
        highest, summed = state
        found = jnp.full((held,), MASKED, jnp.float32)
        for step in range(steps):
            start = block * block_size + step * config.keys
            where = k_ref.at[row, pl.ds(start, config.keys), head, :]
            token = start + columns
            inside = (token < length)[:, None]
            k = pltriton.load(where, mask=inside, other=zero) if masked else where[...]
            products = dot(q, k, transposed=True)
            if masked:
                products = jnp.where(token[None, :] <= place[:, None], products, unseen)
            peak = jnp.max(products, axis=1)
            logit = scale * key_scales_ref[row, block * steps + step, head] * peak.astype(jnp.float32)
            found = jnp.maximum(found, jnp.where(peak > unseen, logit, MASKED) if masked else logit)
        if out_ref.dtype == jnp.float16:  # within its range; sums are of the numbers that shares are taken of
            found = jnp.clip(found, -6e4, 6e4).astype(jnp.float16).astype(jnp.float32)
        pltriton.store(out_ref.at[row, head, program, block, :], found.astype(out_ref.dtype))
        higher = jnp.maximum(highest, found)
        return higher, summed * power(highest, 1.0, -higher) + power(found, 1.0, -higher)

    whole = jnp.where(alive, first_tile, 0)
    state = jnp.full((held,), MASKED, jnp.float32), jnp.zeros((held,), jnp.float32)
    state = lax.fori_loop(0, whole, partial(one_block, masked=False), state)
    highest, summed = lax.fori_loop(whole, jnp.where(alive, end, whole), partial(one_block, masked=True), state)
    pltriton.store(sums_ref.at[row, head, program, :], highest + jnp.log2(summed))
