"""Passes over a long sequence a tile at a time, so that what is computed of every token need not exist all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tca_jax.pallas_kernels.numerics import cdiv, varying_like

# Most tokens of a tile: what 32 query heads make of one, d float32 numbers each, takes 128 MiB then.
_TILE = 8192

#: Takes the positions of a tile `[t]` and the tile of every array, `[B, t, ...]`.
OfTile = Callable[..., Any]


def concatenate_tiles(of_tile: OfTile, *arrays: Array) -> Any:
    """What `of_tile` gives of every tile, joined along the last axis.

    Args:
        of_tile: Returns arrays `[..., t]`. Tiles may reach past the end; what is given there is cut off.
        *arrays: `[B, L, ...]`, to be read in tiles.
    """
    length = arrays[0].shape[1]
    tile = _tile(length)
    results = jax.lax.map(lambda i: _at(of_tile, arrays, i * tile, tile), jnp.arange(cdiv(length, tile)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)[..., :length], results)


def sum_tiles(of_tile: OfTile, *arrays: Array) -> Any:
    """The sum of what `of_tile` gives of every tile; positions past the end must add nothing.

    Args:
        of_tile: Returns arrays without an axis of tokens.
        *arrays: `[B, L, ...]`, to be read in tiles.
    """
    length = arrays[0].shape[1]
    tile = _tile(length)
    of_first = jax.eval_shape(lambda: _at(of_tile, arrays, jnp.int32(0), tile))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_first)

    def add(i: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, _at(of_tile, arrays, i * tile, tile))

    return jax.lax.fori_loop(0, cdiv(length, tile), add, varying_like(zeros, *arrays))


def _tile(length: int) -> int:
    """Tokens of a tile: equal ones, a power of two of them, as padded lengths divide by it."""
    tiles = 1 << (cdiv(length, _TILE) - 1).bit_length()
    return cdiv(length, tiles)


def _at(of_tile: OfTile, arrays: tuple[Array, ...], start: Int[Array, ""], tile: int) -> Any:
    """`of_tile` of one tile; the last one repeats the last token of a length that is no multiple."""
    positions = start + jnp.arange(tile)
    length = arrays[0].shape[1]
    if length % tile:
        cut = [x.at[:, jnp.minimum(positions, length - 1)].get(mode="promise_in_bounds") for x in arrays]
    else:
        cut = [jax.lax.dynamic_slice_in_dim(x, start, tile, axis=1) for x in arrays]
    return of_tile(positions, *cut)
