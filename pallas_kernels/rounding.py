"""Queries, keys and values of prompts in eight bits, for attention and the choice of blocks, through Pallas-Triton.

Of keys the mean over the prompt is taken off, which a softmax does not see, and queries and keys are rotated by a
Hadamard matrix, which products do not see and which spreads large channels over all. Then int8 has a scale for each
query and for each tile of keys, so that a large key spoils its own tile alone. Values are e4m3, with one for each head.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, Int8, Int32

from tca_jax.pallas_kernels.kernel_math import LOG2E
from tca_jax.pallas_kernels.numerics import cdiv, zero_padding
from tca_jax.pallas_kernels.triton_call import MOST_BYTES, dot, triton_call

HEAD_DIMS = 32, 64, 128  # from the least depth of a product of int8 to the largest matrix that a program holds
_ENTRY = 1 / 8  # of the Hadamard matrix, up to the sign: exact in bfloat16
_LEAST = 1e-15  # what the largest entry counts as at least, so that no scale is 0
_LARGEST = float(jnp.finfo(jnp.float8_e4m3fn).max)
_QUERIES, _IN_TURN = 64, 8  # queries of a tile, and tiles that a program takes in turn, with one copy of the matrix
_ROUND = 1.5 * 2**23  # added to a float32 it leaves the nearest integer in the low bits


class Tiles(NamedTuple):
    """Tiles of keys or values."""

    counts: Int32[Array, "B n H"]  # tokens that are there, from the tile's first one on
    owners: Int32[Array, "B n H"]  # row * heads + head of the prompt that they belong to


def tiles_of_prompt(lengths: Int[Array, "B H"], length: int, tile: int) -> Tiles:
    """The tiles of prompts that are padded to a length."""
    firsts = jnp.arange(cdiv(length, tile), dtype=jnp.int32)[:, None] * tile
    counts = jnp.clip(lengths[:, None].astype(jnp.int32) - firsts, 0, tile)
    owners = jnp.arange(lengths.size, dtype=jnp.int32).reshape(len(lengths), 1, -1)
    return Tiles(counts, jnp.broadcast_to(owners, counts.shape))


def mean_key(k: Float[Array, "B L H d"], lengths: Int[Array, "B H"]) -> Float32[Array, "BH d"]:
    """The mean over the prompt of each row and head."""
    sums = zero_padding(k.astype(jnp.float32), lengths).sum(axis=1)
    return (sums / jnp.maximum(lengths, 1)[..., None]).reshape(-1, k.shape[3])


def scales_of_values(v: Float[Array, "B L H d"], lengths: Int[Array, "B H"]) -> Float32[Array, "B H"]:
    """The scale of each head's values, by which the largest of the prompt has the largest code."""
    largest = jnp.abs(zero_padding(v, lengths)).max(axis=(1, 3)).astype(jnp.float32)
    return jnp.maximum(largest, _LEAST) / _LARGEST


def round_queries(
    q: Float[Array, "B L H d"], interpret: bool = False
) -> tuple[Int8[Array, "B L H d"], Float32[Array, "B L H"]]:
    """Queries in int8; and factors that make logits to base 2 of products with codes of keys, but for their scale."""
    batch, length, heads, head_dim = q.shape
    if q.size > MOST_BYTES:
        parts = [round_queries(part, interpret) for part in jnp.array_split(q, 2, axis=1)]
        return jnp.concatenate([x[0] for x in parts], axis=1), jnp.concatenate([x[1] for x in parts], axis=1)
    outputs: Any = [(q.shape, jnp.int8), (q.shape[:-1], jnp.float32)]
    grid = heads, cdiv(length, _QUERIES * _IN_TURN), batch
    call = partial(triton_call, name="round_queries", warps=4, stages=3, interpret=interpret)
    codes, scale = call(_round_queries, (q, _hadamard(head_dim)), outputs, grid=grid)
    return codes, scale * (LOG2E * head_dim**-0.5 / (head_dim * _ENTRY**2))


def round_keys(
    k: Float[Array, "B L H d"], tiles: Tiles, means: Float32[Array, "m d"], tile: int, interpret: bool = False
) -> tuple[Int8[Array, "B L H d"], Float32[Array, "B n H"]]:
    """Keys in int8, without their owner's mean, and the scale of each tile; undefined for tiles without tokens."""
    operands, (batch, count, heads) = (k, _hadamard(k.shape[3]), tiles, means), tiles.counts.shape
    outputs, grid = [(k.shape, jnp.int8), (tiles.counts.shape, jnp.float32)], (heads, count, batch)
    call = partial(triton_call, name="round_keys", warps=4, stages=1, interpret=interpret)
    codes, scales = call(partial(_round_keys, tile), operands, outputs, grid=grid)
    return codes, scales


def round_values(
    v: Float[Array, "B L H d"], tiles: Tiles, scale: Float32[Array, " m"], tile: int, interpret: bool = False
) -> Float8e4m3fn[Array, "B H d L"]:
    """Codes of values over their owner's scale, as an operand of probabilities in their registers.

    A thread has the probabilities of tokens 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, and as an operand 4t to 4t + 3.
    """
    batch, length, heads, head_dim = v.shape
    outputs, grid = [((batch, heads, head_dim, length), jnp.float8_e4m3fn)], (heads, tiles.counts.shape[1], batch)
    call = partial(triton_call, name="round_values", warps=4, stages=1, interpret=interpret)
    return call(partial(_round_values, tile), (v, tiles, 1 / scale), outputs, grid=grid)[0]


def _hadamard(size: int) -> Array:
    """The Hadamard matrix times sqrt(d) / 8."""
    matrix = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (size.bit_length() - 1))
    return jnp.asarray(matrix * _ENTRY, jnp.bfloat16)


def _codes(x: Array, largest: Array) -> Array:
    """The nearest codes, where `largest` becomes 127."""
    return lax.bitcast_convert_type(x * (127 / largest)[:, None] + _ROUND, jnp.int32).astype(jnp.int8)


def _round_queries(q_ref: Any, hadamard_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    head, program, row = (pl.program_id(axis) for axis in range(3))
    hadamard, dims = hadamard_ref[...], jnp.arange(q_ref.shape[3])

    def one_tile(number: Array, _: None) -> None:
        token = number * _QUERIES + jnp.arange(_QUERIES)
        at, inside = (row, token[:, None], head, dims[None, :]), token < q_ref.shape[1]
        q = pltriton.load(q_ref.at[at], mask=inside[:, None], other=jnp.zeros((), q_ref.dtype))
        rotated = dot(q.astype(jnp.bfloat16), hadamard)
        largest = jnp.maximum(jnp.max(jnp.abs(rotated), axis=1), _LEAST)
        pltriton.store(scales_ref.at[row, token, head], largest / 127, mask=inside)
        pltriton.store(codes_ref.at[at], _codes(rotated, largest), mask=inside[:, None])

    lax.fori_loop(program * _IN_TURN, (program + 1) * _IN_TURN, one_tile, None)


def _round_keys(
    tile: int, k_ref: Any, hadamard_ref: Any, tiles: Tiles, means_ref: Any, codes_ref: Any, scales_ref: Any
) -> None:
    head, number, row = (pl.program_id(axis) for axis in range(3))
    count = tiles.counts[row, number, head]

    @pl.when(count > 0)
    def round_tile() -> None:
        token = number * tile + jnp.arange(tile)
        inside, there = (token < k_ref.shape[1])[:, None], (jnp.arange(tile) < count)[:, None]
        at = row, token[:, None], head, jnp.arange(k_ref.shape[3])[None, :]
        k = pltriton.load(k_ref.at[at], mask=inside, other=jnp.zeros((), k_ref.dtype))
        centred = k.astype(jnp.float32) - means_ref[tiles.owners[row, number, head], :][None, :]
        rotated = dot(jnp.where(there, centred, 0).astype(jnp.bfloat16), hadamard_ref[...])
        largest = jnp.maximum(jnp.max(jnp.abs(rotated)), _LEAST)
        scales_ref[row, number, head] = largest / 127
        pltriton.store(codes_ref.at[at], _codes(rotated, jnp.broadcast_to(largest, (tile,))), mask=inside)


def _round_values(tile: int, v_ref: Any, tiles: Tiles, inverse_ref: Any, codes_ref: Any) -> None:
    head, number, row = (pl.program_id(axis) for axis in range(3))
    _, tokens, _, head_dim = v_ref.shape
    count = tiles.counts[row, number, head]

    @pl.when(count > 0)
    def round_tile() -> None:
        lanes, dims = jnp.arange(tile), jnp.arange(head_dim)
        # The token of each lane: of 16 the bits 8, 4, 2, 1 of a lane are those of 4, 2, 8, 1 of its token.
        source = (lanes & -16) | (lanes & 2) << 2 | (lanes & 12) >> 1 | (lanes & 1)
        there = ((source < count) & (number * tile + source < tokens))[:, None]
        at = row, (number * tile + source)[:, None], head, dims[None, :]
        v = pltriton.load(v_ref.at[at], mask=there, other=jnp.zeros((), v_ref.dtype)).astype(jnp.float32)
        codes = jnp.clip(v * inverse_ref[tiles.owners[row, number, head]], -_LARGEST, _LARGEST).astype(codes_ref.dtype)
        target = (number * tile + lanes)[:, None]
        pltriton.store(codes_ref.at[row, head, dims[None, :], target], codes, mask=target < tokens)
