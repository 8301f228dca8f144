"""Lists of keys that the queries of a tile attend to: blocks and columns."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32


class BlockLists(NamedTuple):
    """Key blocks of every query tile and query head, nearest first.

    A block is named by how far left of its tile's end it begins: lists of diagonal lines are then the same for all
    tiles, which share one, T = 1, where a list a tile (T = N) would take as much memory as the area that it covers.
    """

    # From a block's first token to the first token past the tile `[B, Hq, T, C]`; C, the capacity, is static.
    distances: Int[Array, "B Hq T C"]
    counts: Int[Array, "B Hq N"]  # blocks of every tile `[B, Hq, N]`, at most C: the first of its list


class Columns(NamedTuple):
    """Single tokens that all later queries of a head attend to."""

    tokens: Int[Array, "B Hq V"]  # their positions `[B, Hq, V]`, ascending; the capacity V is static
    counts: Int[Array, "B Hq"]  # how many they are `[B, Hq]`, at most V


def lists_of_mask(mask: Bool[Array, "B Hq N nb"], block_size: int) -> BlockLists:
    """Lists of the aligned blocks that a mask marks for each tile of as many queries; those right of a tile are left
    out."""
    tiles, blocks = mask.shape[-2:]
    back = jnp.arange(tiles)[:, None] - jnp.arange(blocks)  # blocks from the tile's own to this one
    mask = mask & (back >= 0)
    ends = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    counts = ends[..., -1]
    places = jnp.where(mask, counts[..., None] - ends, blocks)  # the nearest first; out of range: dropped
    batch, heads = mask.shape[:2]
    where = (*jnp.ogrid[:batch, :heads, :tiles, :1][:3], places)
    distances = jnp.broadcast_to((back + 1) * block_size, mask.shape).astype(jnp.int32)
    listed = jnp.zeros(mask.shape, jnp.int32).at[where].set(distances, mode="drop", unique_indices=True)
    return BlockLists(listed, counts)


def columns_of_mask(mask: Bool[Array, "B Hq L"], capacity: int) -> Columns:
    """The marked tokens of each head; those past the capacity, the last ones, are left out."""
    batch, heads, length = mask.shape
    ends = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    places = jnp.where(mask, ends - 1, capacity)
    where = (*jnp.ogrid[:batch, :heads, :1][:2], places)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), mask.shape)
    tokens = jnp.zeros((batch, heads, capacity), jnp.int32).at[where].set(positions, mode="drop", unique_indices=True)
    return Columns(tokens, jnp.minimum(ends[..., -1], capacity))


def entries_by_distance(blocks: BlockLists, size: int, block_size: int) -> Int32[Array, "B Hq size"]:
    """Which block of a shared list has the token at each distance left of a tile's end; C where none has."""
    capacity = blocks.distances.shape[-1]
    most = jnp.max(blocks.counts, axis=-1, keepdims=True)
    never = size + block_size  # what no tile counts holds anything, in no order
    begins = jnp.where(jnp.arange(capacity) < most, blocks.distances[:, :, 0], never).astype(jnp.int32)
    distances = jnp.arange(size, dtype=jnp.int32)
    search = jnp.vectorize(lambda x: jnp.searchsorted(x, distances), signature="(c)->(n)")
    entries = search(begins).astype(jnp.int32)  # the first block that begins at least so far away
    begin = jnp.take_along_axis(begins, jnp.minimum(entries, capacity - 1), axis=-1)
    inside = (entries < capacity) & (begin - block_size < distances)
    return jnp.where(inside, entries, capacity)
