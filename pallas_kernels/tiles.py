"""Tile sizes and layouts of the tiled XLA implementations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tca_jax.pallas_kernels.numerics import cdiv

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of a loop nest over queries and keys."""

    queries: int  # query tokens of a tile, a multiple of the block size; a tile holds all heads of a group
    keys: int  # keys of a tile
    parallel: int  # tiles of the outer loop computed at once


def default_tiles(block_size: int, length: int) -> Tiles:
    """A CPU wants tiles that stay in its cache, one at a time (measured); a GPU wants many at once."""
    blocks = min(max(1, 256 // block_size), max(1, cdiv(length, block_size)))
    if jax.default_backend() == "cpu":
        return Tiles(blocks * block_size, keys=256, parallel=1)
    return Tiles(blocks * block_size, keys=512, parallel=32)


def tile_map(one_tile: Callable[[Array], T], count: int, parallel: int) -> T:
    """Maps a tile's index to its result for `count` tiles, `parallel` at once; results are stacked."""
    batch_size = parallel if parallel > 1 else None
    return jax.lax.map(one_tile, jnp.arange(count, dtype=jnp.int32), batch_size=batch_size)


def heads_first(tokens: Float[Array, "B L H d"], kv_heads: int, padded: int) -> Float[Array, "rows d"]:
    """Lays each KV head's rows one after another, so that a tile is one slice; pads L to `padded` with zeros.

    A token's rows of one group lie together. At a million tokens row numbers fit int32, element offsets do not.
    """
    batch, length, heads, dim = tokens.shape
    tokens = jnp.pad(tokens, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
    tokens = tokens.reshape(batch, padded, kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    return tokens.reshape(-1, dim)
