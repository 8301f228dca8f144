"""Block mass through Pallas-Triton: one pass over representatives keeps the log-sum-exp of every query and block.

A program has the sampled queries of some neighbouring tiles of a KV head, all heads of the group. It goes over the
representatives of the blocks left of their windows, then over the tokens of the windows. It writes one number for each
query and block, and each query's log-sum-exp over all; XLA takes the powers. Tiles are taken in parts, which bounds
memory.
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
from jaxtyping import Array, Float32, Int

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.block_mass import Representatives, sampled_positions
from tca_jax.pallas_kernels.kernel_math import LOG2E, full_precision_tile, shared_memory
from tca_jax.pallas_kernels.numerics import MASKED, cdiv
from tca_jax.pallas_kernels.triton_call import check_supported, dot, scaled_exp2, triton_call

_MOST_ROWS = 256  # of a program
_MOST_BYTES = 2**29  # of what a part of the tiles writes
_UNSEEN = -(2.0**99)  # score of a key that is not seen: a power of two, whose product with any scale is exact


@dataclasses.dataclass(frozen=True)
class BlockMassConfig:
    """Tiling of block mass."""

    tiles: int  # query tiles of a program
    keys: int  # representatives, at least a block's, or tokens of the window in a tile; a power of two from 16
    warps: int  # warps of a program
    stages: int  # tiles of K in flight in a program


def default_config(rows: int, representatives: int, head_dim: int, dtype: Any) -> BlockMassConfig:
    """About 64 query rows and keys, so that two programs share a multiprocessor, and a block's representatives."""
    itemsize, tiles = jnp.dtype(dtype).itemsize, max(1, 64 // rows)
    held = max(16, pl.next_power_of_2(tiles * rows))
    if itemsize == 4:
        side, warps = full_precision_tile(head_dim)
        return BlockMassConfig(1, max(representatives, side), warps, stages=1)
    for keys, stages in ((64, 3), (64, 2), (64, 1), (32, 1), (16, 1)):
        if 2 * (held + stages * keys) * head_dim * itemsize <= shared_memory():
            break
    return BlockMassConfig(tiles, max(representatives, keys), 8 if held > 64 else 4, stages)


@partial(jax.jit, static_argnames=("block_size", "window", "stride", "config", "interpret"))
@jax.named_scope("block_mass")
def block_mass(
    q: Array,
    k: Array,
    representatives: Representatives,
    lengths: Array,
    *,
    block_size: int,
    window: int,
    stride: int,
    config: BlockMassConfig | None = None,
    interpret: bool = False,
) -> Array:
    """See `block_mass.block_mass`. Keys past a row's length are never read."""
    batch, length, kv_heads, head_dim = k.shape
    each = representatives.k.shape[3]
    check_supported("block_mass", head_dim, q, k, representatives.k, block_size=block_size)
    fits = each in (1, 2, 4, 8, 16, 32, 64, 128)
    require(fits, f"block_mass on Triton: {each} keys of a block: must be a power of two up to 128", Unsupported)
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0, 0), jnp.float32)
    group, blocks = q.shape[2] // kv_heads, cdiv(length, block_size)
    rows = block_size // stride * group
    given = f"{block_size // stride} queries of a tile times {group} heads"
    require(rows <= _MOST_ROWS, f"block_mass on Triton: {given}: at most {_MOST_ROWS}", Unsupported)
    config = config or default_config(rows, each, head_dim, k.dtype)
    held = max(16, pl.next_power_of_2(config.tiles * rows))
    # Parts of as many programs as may write at once.
    programs = cdiv(blocks, config.tiles)
    parts = cdiv(programs, max(1, _MOST_BYTES // (4 * batch * kv_heads * blocks * held)))
    part = cdiv(programs, parts)
    tiles = parts * part * config.tiles
    positions = jnp.minimum(sampled_positions(lengths, tiles, block_size, stride), length - 1)  # [B, N', S]
    queries = jnp.take_along_axis(q, positions.reshape(batch, -1, 1, 1), axis=1, mode="promise_in_bounds")
    # Rows of a tile side by side: [B, Hkv, programs, tiles x S x G, d].
    queries = queries.reshape(batch, parts * part, config.tiles * (block_size // stride), kv_heads, group, head_dim)
    queries = jnp.moveaxis(queries, 3, 1).reshape(batch, kv_heads, parts * part, -1, head_dim)
    before = jnp.arange(tiles)[:, None] * block_size < lengths[:, None, None]  # tiles that begin before the length
    places = jnp.where(before, positions, -1).reshape(batch, parts * part, -1).repeat(group, axis=-1)
    sizes = {"block_size": block_size, "window_blocks": window // block_size, "each": each, "held": held}
    kernel = partial(_totals, **sizes, config=config, interpret=interpret)
    keys, bias = representatives.k.reshape(batch, kv_heads, -1, head_dim), representatives.bias * math.sqrt(head_dim)
    bias = jnp.where(bias > -jnp.inf, bias, _UNSEEN).reshape(batch, kv_heads, -1)

    def of_part(number: Array) -> Float32[Array, "B Hkv t N"]:
        first = number * part
        own = lax.dynamic_slice_in_dim(queries, first, part, axis=2)
        where = lax.dynamic_slice_in_dim(places, first, part, axis=1)
        totals, sums = triton_call(
            kernel,
            (own, where, k, keys, bias, lengths, first[None].astype(jnp.int32)),
            [((batch, kv_heads, part, blocks, held), jnp.float32), ((batch, kv_heads, part, held), jnp.float32)],
            grid=(part, kv_heads, batch),
            name="block_mass",
            warps=config.warps,
            stages=config.stages,
            interpret=interpret,
        )
        return _mass(totals, sums, where, config.tiles, block_size, window)

    masses = lax.map(of_part, jnp.arange(parts, dtype=jnp.int32))  # [parts, B, Hkv, t, N]
    return jnp.moveaxis(masses, 0, 2).reshape(batch, kv_heads, tiles, blocks)[:, :, :blocks]


def _mass(
    totals: Float32[Array, "B Hkv p N held"],
    sums: Float32[Array, "B Hkv p held"],
    places: Int[Array, "B p rows"],  # -1: sees nothing
    tiles: int,
    block_size: int,
    window: int,
) -> Float32[Array, "B Hkv t N"]:
    """The share of each block in a row's softmax, the largest of the rows of a tile."""
    batch, kv_heads, part, blocks, _ = totals.shape
    begin = places // block_size * block_size - window  # of the window
    seen = (jnp.arange(blocks)[:, None] * block_size < begin[:, :, None])[:, None]  # [B, 1, p, N, rows]
    shares = jnp.where(seen, jnp.exp2(totals - sums[..., None, :])[..., : seen.shape[-1]], 0)
    mass = shares.reshape(batch, kv_heads, part, blocks, tiles, -1).max(axis=-1)
    return jnp.moveaxis(mass, 4, 3).reshape(batch, kv_heads, part * tiles, blocks)


def _totals(
    q_ref: Any,
    places_ref: Any,
    k_ref: Any,
    keys_ref: Any,
    bias_ref: Any,
    lengths_ref: Any,
    first_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    *,
    block_size: int,
    window_blocks: int,
    each: int,
    held: int,
    config: BlockMassConfig,
    interpret: bool,
) -> None:
    """The log-sum-exp of each row in each block, and that of all blocks and of its window, to base 2."""
    _, _, part, count, head_dim = q_ref.shape
    turn, head, row = (pl.program_id(axis) for axis in range(3))
    program = part - 1 - turn  # the last tiles, which see most, come first
    length, blocks = lengths_ref[row], out_ref.shape[3]
    first_tile = (first_ref[0] + program) * config.tiles
    end = jnp.minimum(first_tile + config.tiles, (length + block_size - 1) // block_size)
    alive = first_tile < end
    lanes = jnp.arange(held)
    own = lanes < count
    at, dims = jnp.where(own, lanes, 0), jnp.arange(head_dim)
    q = pltriton.load(q_ref.at[row, head, program, at[:, None], dims[None, :]], mask=own[:, None], other=0.0)
    place = pltriton.load(places_ref.at[row, program, at], mask=own, other=0)
    window = (jnp.maximum(place, 0) // block_size - window_blocks)[:, None]  # each row's first block of it
    scale, at_once = LOG2E / math.sqrt(head_dim), config.keys // each
    power = partial(scaled_exp2, interpret=interpret)

    def summed(scores: Float32[Array, "*s n"]) -> Float32[Array, "*s"]:
        peak = jnp.max(scores, axis=-1)
        powers = power(scores, scale, jnp.broadcast_to((-scale * peak)[..., None], scores.shape))
        return scale * peak + jnp.log2(jnp.sum(powers, axis=-1))

    def with_more(state: tuple[Array, Array], found: Float32[Array, "held n"]) -> tuple[Array, Array]:
        highest, total = state
        higher = jnp.maximum(highest, jnp.max(found, axis=1))
        powers = power(found, 1.0, jnp.broadcast_to(-higher[:, None], found.shape))
        return higher, total * power(highest, 1.0, -higher) + jnp.sum(powers, axis=1)

    def some_blocks(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        slots = jnp.minimum(step * config.keys + jnp.arange(config.keys), blocks * each - 1)
        k = keys_ref.at[row, head, slots[:, None], dims[None, :]][...]
        scores = dot(q, k, transposed=True) + bias_ref.at[row, head, slots][...][None, :]
        block = step * at_once + jnp.arange(at_once)[None, :]
        found = jnp.where(block < window, summed(scores.reshape(held, at_once, each)), _UNSEEN)
        out = out_ref.at[row, head, program, block, lanes[:, None]]
        pltriton.store(out, found, mask=jnp.broadcast_to(block < blocks, found.shape))
        return with_more(state, found)

    def some_tokens(step: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        token = step * near + jnp.arange(near)
        k = k_ref.at[row, jnp.minimum(token, length - 1)[:, None], head, dims[None, :]][...]
        seen = (token[None, :] <= place[:, None]) & (token[None, :] // block_size >= window)
        found = summed(jnp.where(seen, dot(q, k, transposed=True), _UNSEEN))
        return with_more(state, found[:, None])

    near = math.gcd(block_size, config.keys)  # tokens of a step
    first, last = (jnp.maximum(tile - window_blocks, 0) for tile in (first_tile, end - 1))  # blocks of windows
    state = jnp.full((held,), MASKED, jnp.float32), jnp.zeros((held,), jnp.float32)
    state = lax.fori_loop(0, jnp.where(alive, (last + at_once - 1) // at_once, 0), some_blocks, state)
    begin, stop = (jnp.where(alive, block, 0) * (block_size // near) for block in (first, end))
    highest, total = lax.fori_loop(begin, stop, some_tokens, state)
    pltriton.store(sums_ref.at[row, head, program, :], highest + jnp.log2(total))
