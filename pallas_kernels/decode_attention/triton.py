"""Decode attention through Pallas-Triton: flash-decoding over a balanced list of chunks of all regions and rings.

Two launches. The first splits every head's tokens, its region of the pool followed by its local tokens in the ring,
into chunks of nearly equal size, as many as fill the card whatever the heads hold; each program attends to one chunk.
The second merges the chunks of each query head. Both derive the list of chunks from the lengths on the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.integers import cdiv
from tca_jax.pallas_kernels.kernel_math import LOG2E, divide_up, streamed_tile
from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.numerics import MASKED
from tca_jax.pallas_kernels.triton_call import check_supported, dot, multiprocessors, triton_call

#: Largest score, sum of the weights and weighted sum of the values so far, the scores to base 2.
_State = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tiling of decode attention.

    Attributes:
        keys: Tokens of a tile, a power of two from 16.
        programs: Chunks that the tokens of all heads are split into, at most.
        warps: Warps of a program.
        stages: Depth of the software pipeline: `stages - 1` tiles are in flight in a program.
        merged: Chunks that the merging kernel reads at once, a power of two.
    """

    keys: int
    programs: int
    warps: int
    stages: int
    merged: int = 64


def default_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """Tiles of 16 KiB, and as many chunks as the multiprocessors hold at once; measured on an H200."""
    keys = streamed_tile(head_dim, itemsize)
    return DecodeConfig(keys=keys, programs=2 * multiprocessors(), warps=2, stages=3)


@partial(jax.jit, static_argnames=("block_size", "window", "capacity", "config", "interpret"))
@jax.named_scope("decode_attention")
def decode_attention(
    q: Float[Array, "B Hq d"],
    pool: Pool,
    ring: Ring,
    positions: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    capacity: int,
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq d"], Float32[Array, "B Hq"]]:
    """One softmax over ring and region; see `decode_attention.decode_attention`.

    Tokens that are not attended to are never read.
    """
    batch, kv_heads, slots, head_dim = ring.k.shape
    check_supported("decode_attention", head_dim, q, pool.k, pool.v, ring.k, ring.v)
    config = config or default_config(head_dim, ring.k.dtype.itemsize)
    group, regions = q.shape[1] // kv_heads, batch * kv_heads
    most_tiles = regions * (cdiv(capacity, config.keys) + cdiv(slots, config.keys))
    layout = _Layout(
        regions=regions,
        kv_heads=kv_heads,
        group=group,
        ring=slots,
        block_size=block_size,
        window=window,
        has_pool=capacity > 0,
        # One chunk a region at least and as many again for `_split` to deal out; never more than there are tiles.
        programs=min(max(config.programs, 2 * regions), regions + most_tiles),
        keys=config.keys,
    )
    lists = (pool.lengths.reshape(-1), positions)
    rows = batch * q.shape[1]
    parts = triton_call(
        partial(_attend_chunk, layout),
        (
            q.reshape(rows, head_dim),
            pool.k,
            pool.v,
            pool.offsets.reshape(-1),
            ring.k.reshape(regions * slots, head_dim),
            ring.v.reshape(regions * slots, head_dim),
            *lists,
        ),
        [
            ((layout.programs * group, head_dim), jnp.float32),
            ((layout.programs * group,), jnp.float32),
            ((layout.programs * group,), jnp.float32),
        ],
        grid=(layout.programs,),
        name="decode_attention_chunks",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    out, lse = triton_call(
        partial(_merge_chunks, layout, config.merged),
        (*parts, *lists),
        [((rows, head_dim), q.dtype), ((rows,), jnp.float32)],
        grid=(rows,),
        name="decode_attention_merge",
        warps=4,
        stages=1,
        interpret=interpret,
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What both kernels know of the problem at compile time; a region is one KV head of one row."""

    regions: int
    kv_heads: int
    group: int
    ring: int
    block_size: int
    window: int
    has_pool: bool
    programs: int
    keys: int

    def local_tokens(self, positions: Array) -> tuple[Array, Array]:
        """First local position of rows whose queries are at `positions`, and how many local tokens there are.

        The first is max(0, (pos // b) b - w), or what the ring still holds.
        """
        # A division of numbers that are not negative; a row at -1 has no tokens.
        block_start = lax.div(jnp.maximum(positions, 0), jnp.full_like(positions, self.block_size)) * self.block_size
        first = jnp.maximum(jnp.maximum(block_start - self.window, positions - self.ring + 1), 0)
        return first, jnp.maximum(positions - first + 1, 0)

    def tiles(self, tokens: Array) -> Array:
        """Tiles that hold so many tokens."""
        return divide_up(tokens, self.keys)


class _Split(NamedTuple):
    """How every region is cut into chunks; one lane a region, the lanes past the last hold zeros.

    Attributes:
        tiles: Tiles of a region.
        counts: Chunks of a region.
        pooled: Tokens of a region in the pool.
        positions: Position of the query.
    """

    tiles: Array
    counts: Array
    pooled: Array
    positions: Array

    def region_of(self, chunk: Array) -> Array:
        """Region of a chunk; chunks are numbered region after region."""
        return jnp.sum((jnp.cumsum(self.counts) <= chunk).astype(jnp.int32))

    def first_chunk(self, region: Array) -> Array:
        """Number of a region's first chunk."""
        return jnp.sum(jnp.where(self.lanes < region, self.counts, 0))

    def of(self, region: Array, values: Array) -> Array:
        """A region's own of some values by lane, which were read before the region was known."""
        return jnp.sum(jnp.where(self.lanes == region, values, 0))

    @property
    def lanes(self) -> Array:
        return jnp.arange(self.tiles.shape[0], dtype=jnp.int32)


def _split(layout: _Layout, lengths_ref: Any, positions_ref: Any) -> _Split:
    """Deals all tiles to at most `layout.programs` chunks, of one size but for the regions' remainders.

    Chunks of ceil(total / programs) tiles would be the fewest that keep all programs busy; remainders can make them
    too many. Chunks of ceil(total / (programs - regions)) tiles never are: a region brings one remainder at most.
    """
    lanes = jnp.arange(pl.next_power_of_2(layout.regions), dtype=jnp.int32)
    valid = lanes < layout.regions
    rows = lax.div(lanes, jnp.full_like(lanes, layout.kv_heads))
    positions = pltriton.load(positions_ref.at[rows], mask=valid, other=-1)
    tiles = layout.tiles(layout.local_tokens(positions)[1])
    pooled = jnp.zeros_like(tiles)
    if layout.has_pool:
        pooled = pltriton.load(lengths_ref.at[lanes], mask=valid, other=0)
        tiles += layout.tiles(pooled)
    total = jnp.sum(tiles)
    tight, safe = (jnp.maximum(divide_up(total, n), 1) for n in (layout.programs, layout.programs - layout.regions))
    fits = jnp.sum(divide_up(tiles, tight)) <= layout.programs
    return _Split(tiles, divide_up(tiles, jnp.where(fits, tight, safe)), pooled, positions)


def _attend_chunk(
    layout: _Layout,
    q_ref: Any,
    k_pool_ref: Any,
    v_pool_ref: Any,
    offsets_ref: Any,
    k_ring_ref: Any,
    v_ring_ref: Any,
    lengths_ref: Any,
    positions_ref: Any,
    out_ref: Any,
    peak_ref: Any,
    weight_ref: Any,
) -> None:
    """Attention of one region's query heads to one chunk of its tokens, not normalised."""
    chunk = pl.program_id(0)
    split = _split(layout, lengths_ref, positions_ref)
    region = split.region_of(chunk)

    @pl.when(region < layout.regions)
    def _() -> None:
        tiles, chunks = split.of(region, split.tiles), split.of(region, split.counts)
        part = chunk - split.first_chunk(region)
        begin, end = lax.div(tiles * part, chunks), lax.div(tiles * (part + 1), chunks)
        heads = jnp.arange(max(16, pl.next_power_of_2(layout.group)), dtype=jnp.int32)  # a matrix unit takes 16
        columns = jnp.arange(q_ref.shape[1], dtype=jnp.int32)
        seen = heads < layout.group
        q = pltriton.load(
            q_ref.at[(region * layout.group + heads)[:, None], columns[None]], mask=seen[:, None], other=0.0
        )
        state = (
            jnp.full(heads.shape, MASKED, jnp.float32),
            jnp.zeros(heads.shape, jnp.float32),
            jnp.zeros(q.shape, jnp.float32),
        )

        pool_tiles = jnp.zeros_like(begin)
        if layout.has_pool:
            offset, length = offsets_ref[region], split.of(region, split.pooled)
            pool_tiles = layout.tiles(length)
            state = lax.fori_loop(
                jnp.minimum(begin, pool_tiles),
                jnp.minimum(end, pool_tiles),
                _tile_step(layout, q, k_pool_ref, v_pool_ref, length, lambda index: offset + index),
                state,
            )

        first, length = layout.local_tokens(split.of(region, split.positions))
        start = lax.rem(first, layout.ring)

        def slot(index: Array) -> Array:
            # The local tokens are one run of slots, or two when it passes the ring's end.
            slots = start + index
            return region * layout.ring + jnp.where(slots >= layout.ring, slots - layout.ring, slots)

        peak, weight, out = lax.fori_loop(
            jnp.maximum(begin, pool_tiles) - pool_tiles,
            jnp.maximum(end, pool_tiles) - pool_tiles,
            _tile_step(layout, q, k_ring_ref, v_ring_ref, length, slot),
            state,
        )
        rows = chunk * layout.group + heads
        pltriton.store(peak_ref.at[rows], peak, mask=seen)
        pltriton.store(weight_ref.at[rows], weight, mask=seen)
        pltriton.store(out_ref.at[rows[:, None], columns[None]], out, mask=seen[:, None])


def _tile_step(
    layout: _Layout, q: Array, k_ref: Any, v_ref: Any, length: Array, row_of: Callable[[Array], Array]
) -> Callable[[Array, _State], _State]:
    """The step of an online softmax, to base 2, over tiles of `length` tokens; `row_of` finds their rows."""
    scale = LOG2E / math.sqrt(q.shape[1])
    columns = jnp.arange(q.shape[1], dtype=jnp.int32)

    def step(tile: Array, state: _State) -> _State:
        peak, weight, out = state
        index = tile * layout.keys + jnp.arange(layout.keys, dtype=jnp.int32)
        seen = index < length
        where = (row_of(index)[:, None], columns[None])
        # Rows that are not attended to are not read: what they hold, NaN even, cannot reach the sums.
        k = pltriton.load(k_ref.at[where], mask=seen[:, None], other=0.0)
        v = pltriton.load(v_ref.at[where], mask=seen[:, None], other=0.0)
        scores = jnp.where(seen[None], dot(q, k, transposed=True) * scale, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights, decay = jnp.exp2(scores - new_peak[:, None]), jnp.exp2(peak - new_peak)
        out = out * decay[:, None] + dot(weights.astype(v.dtype), v)
        return new_peak, weight * decay + jnp.sum(weights, axis=1), out

    return step


def _merge_chunks(
    layout: _Layout,
    merged: int,
    parts_ref: Any,
    peak_ref: Any,
    weight_ref: Any,
    lengths_ref: Any,
    positions_ref: Any,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    """Merges the chunks of one query head."""
    row = pl.program_id(0)
    region = lax.div(row, layout.group)
    split = _split(layout, lengths_ref, positions_ref)
    first, count = split.first_chunk(region), split.of(region, split.counts)
    head = row - region * layout.group
    columns = jnp.arange(parts_ref.shape[1], dtype=jnp.int32)

    def step(i: Array, state: _State) -> _State:
        peak, weight, out = state
        index = i * merged + jnp.arange(merged, dtype=jnp.int32)
        valid = index < count
        rows = (first + index) * layout.group + head
        peaks = pltriton.load(peak_ref.at[rows], mask=valid, other=MASKED)
        weights = pltriton.load(weight_ref.at[rows], mask=valid, other=0.0)
        parts = pltriton.load(parts_ref.at[rows[:, None], columns[None]], mask=valid[:, None], other=0.0)
        new_peak = jnp.maximum(peak, jnp.max(peaks))
        shares, decay = jnp.exp2(peaks - new_peak), jnp.exp2(peak - new_peak)
        out = out * decay + jnp.sum(parts * shares[:, None], axis=0)
        return new_peak, weight * decay + jnp.sum(weights * shares), out

    empty = (jnp.float32(MASKED), jnp.float32(0), jnp.zeros(columns.shape, jnp.float32))
    peak, weight, out = lax.fori_loop(0, divide_up(count, merged), step, empty)
    some = jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)  # a head without tokens gives zeros
    out_ref[row, :] = (out / some).astype(out_ref.dtype)
    lse_ref[row] = jnp.where(weight > 0, peak / LOG2E + jnp.log(some), MASKED)
