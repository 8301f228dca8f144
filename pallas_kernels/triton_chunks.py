"""Flash-decoding through Pallas-Triton: few queries per head, over a balanced list of chunks of all that is cached.

Two launches. The first splits every region's tokens, its part of each pool followed by its local tokens in the ring,
into chunks of nearly equal size, as many as fill the card whatever the heads hold; each program attends to one chunk.
The second merges the chunks of each query. Both derive the list of chunks from the lengths on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.integers import cdiv
from tca_jax.pallas_kernels.kernel_math import LOG2E, divide_up, quotient_and_remainder
from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.numerics import MASKED
from tca_jax.pallas_kernels.triton_call import triton_call

#: Largest score, sum of the weights and weighted sum of the values so far, the scores to base 2.
State = tuple[Array, Array, Array]


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Tiling of attention in chunks.

    Attributes:
        keys: Tokens of a tile, a power of two from 16.
        programs: Programs that the tokens of all heads are dealt to, at most.
        warps: Warps of a program.
        stages: Depth of the software pipeline: `stages - 1` tiles are in flight in a program.
        merged: Chunks that the merging kernel reads at once, a power of two.
    """

    keys: int
    programs: int
    warps: int
    stages: int
    merged: int = 64


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """What both kernels know of the problem at compile time; a region is one KV head of one row.

    Attributes:
        regions: Regions of all rows.
        kv_heads: Regions of a row.
        group: Query heads of a KV head.
        queries: Queries of a row, each of as many heads.
        tiles_of_rows: Tiles that a region's query rows (a query of a head each) are cut into, each for a program.
        ring: Slots of a ring.
        block_size: Tokens in a block.
        window: Least number of local tokens.
        chunks: Chunks that all tokens are cut into, at most.
        keys: Tokens of a tile.
    """

    regions: int
    kv_heads: int
    group: int
    queries: int
    tiles_of_rows: int
    ring: int
    block_size: int
    window: int
    chunks: int
    keys: int

    @classmethod
    def plan(
        cls,
        ring: Ring,
        config: ChunkConfig,
        *,
        group: int,
        queries: int,
        tiles_of_rows: int,
        block_size: int,
        window: int,
        capacities: tuple[int, ...],
    ) -> ChunkLayout:
        """The layout of a ring, and of pools whose regions hold at most `capacities`."""
        batch, kv_heads, slots, _ = ring.k.shape
        regions = batch * kv_heads
        most_tiles = regions * sum(cdiv(tokens, config.keys) for tokens in (*capacities, slots))
        # One chunk a region at least and as many again for `split` to deal out; never more than there are tiles.
        chunks = min(max(config.programs // tiles_of_rows, 2 * regions), regions + most_tiles)
        return cls(
            regions, kv_heads, group, queries, tiles_of_rows, slots, block_size, window, chunks, keys=config.keys
        )

    @property
    def rows(self) -> int:
        """Query rows of a region: those of a query lie together."""
        return self.queries * self.group

    def place(self, row: Array) -> tuple[Array, Array]:
        """Region of a row of `[B m Hq, d]`, and which of the region's query rows it is."""
        index = lax.div(row, self.group)
        member = row - index * self.group
        if self.queries == 1:
            return index, member
        token, kv_head = quotient_and_remainder(index, self.kv_heads)
        batch, query = quotient_and_remainder(token, self.queries)
        return batch * self.kv_heads + kv_head, query * self.group + member

    def whereabouts(self, region: Array, numbers: Array) -> Array:
        """The inverse of `place`: where in `[B m Hq, d]` a region's query rows of such numbers are."""
        if self.queries == 1:
            return region * self.group + numbers
        batch, kv_head = quotient_and_remainder(region, self.kv_heads)
        query = lax.div(numbers, jnp.full_like(numbers, self.group))
        member = numbers - query * self.group
        return ((batch * self.queries + query) * self.kv_heads + kv_head) * self.group + member

    def local_tokens(self, positions: Array) -> tuple[Array, Array]:
        """First local position of rows whose latest tokens are at `positions`, and how many local tokens there are.

        The first is max(0, (pos // b) b - w), or what the ring still holds.
        """
        # A division of numbers that are not negative; a row at -1 has no tokens.
        block_start = lax.div(jnp.maximum(positions, 0), jnp.full_like(positions, self.block_size)) * self.block_size
        first = jnp.maximum(jnp.maximum(block_start - self.window, positions - self.ring + 1), 0)
        return first, jnp.maximum(positions - first + 1, 0)

    def slots(self, region: Array, first: Array) -> Callable[[Array], Array]:
        """Finds the rows, in all rings, of a region's local tokens by number; the first is at position `first`."""
        start = lax.rem(first, self.ring)

        def slot(index: Array) -> Array:
            # The local tokens are one run of slots, or two when it passes the ring's end.
            slots = start + index
            return region * self.ring + jnp.where(slots >= self.ring, slots - self.ring, slots)

        return slot

    def tiles(self, tokens: Array) -> Array:
        """Tiles that hold so many tokens."""
        return divide_up(tokens, self.keys)


class Regions(NamedTuple):
    """A pool as the kernels address it; arrays, or refs of such.

    Attributes:
        k: Keys `[P, d]`.
        v: Values `[P, d]`.
        offsets: First row of every region `[B Hkv]`.
    """

    k: Any
    v: Any
    offsets: Any


class Lists(NamedTuple):
    """What the list of chunks follows from; arrays, or refs of such.

    Attributes:
        lengths: Tokens of every region `[B Hkv]`, for each pool.
        positions: Position of every row's latest token `[B]`, -1 for a row without any.
    """

    lengths: tuple[Any, ...]
    positions: Any


class Split(NamedTuple):
    """How every region is cut into chunks; one lane a region, the lanes past the last hold zeros.

    Attributes:
        tiles: Tiles of a region.
        counts: Chunks of a region.
        pooled: Tokens of a region in each pool.
        positions: Position of the latest token.
    """

    tiles: Array
    counts: Array
    pooled: tuple[Array, ...]
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

    def tiles_of(self, chunk: Array, region: Array) -> tuple[Array, Array]:
        """First and past-the-last tile of a region's chunk; the region's tiles are numbered part after part."""
        tiles, chunks = self.of(region, self.tiles), self.of(region, self.counts)
        part = chunk - self.first_chunk(region)
        return lax.div(tiles * part, chunks), lax.div(tiles * (part + 1), chunks)

    @property
    def lanes(self) -> Array:
        return jnp.arange(self.tiles.shape[0], dtype=jnp.int32)


def split(layout: ChunkLayout, lists: Lists) -> Split:
    """Deals all tiles to at most `layout.chunks` chunks, of one size but for the regions' remainders.

    Chunks of ceil(total / chunks) tiles would be the fewest that keep all programs busy; remainders can make them
    too many. Chunks of ceil(total / (chunks - regions)) tiles never are: a region brings one remainder at most.
    """
    lanes = jnp.arange(pl.next_power_of_2(layout.regions), dtype=jnp.int32)
    valid = lanes < layout.regions
    rows = lax.div(lanes, jnp.full_like(lanes, layout.kv_heads))
    positions = pltriton.load(lists.positions.at[rows], mask=valid, other=-1)
    tiles = layout.tiles(layout.local_tokens(positions)[1])
    pooled = tuple(pltriton.load(lengths.at[lanes], mask=valid, other=0) for lengths in lists.lengths)
    for tokens in pooled:
        tiles += layout.tiles(tokens)
    total = jnp.sum(tiles)
    tight, safe = (jnp.maximum(divide_up(total, n), 1) for n in (layout.chunks, layout.chunks - layout.regions))
    fits = jnp.sum(divide_up(tiles, tight)) <= layout.chunks
    return Split(tiles, divide_up(tiles, jnp.where(fits, tight, safe)), pooled, positions)


def attend_chunks(
    kernel: Callable[..., None],
    layout: ChunkLayout,
    q: Float[Array, "rows d"],
    pools: tuple[Pool, ...],
    ring: Ring,
    positions: Int[Array, " B"],
    *more: Array,
    config: ChunkConfig,
    name: str,
    interpret: bool,
) -> tuple[Float[Array, "rows d"], Float32[Array, " rows"]]:
    """Both launches, for queries `[B m Hq, d]`.

    Args:
        kernel: Attends to one chunk, not normalised. It is called with refs: `q`, the `Regions` of every pool, keys
            and values of all rings [B Hkv R, d], the `Lists`, `more`; then the weighted sums of the values
            [chunks rows, d], the largest scores to base 2 and the sums of the weights [chunks rows], which it writes.
        layout: The problem.
        q: All queries.
        pools: The pools that are attended to.
        ring: The latest tokens.
        positions: Position of every row's latest token, -1 for a row without any.
        more: What else the kernel takes.
        config: The tiling.
        name: What the kernels' names in profiles begin with.
        interpret: See `triton_call`.

    Returns:
        Output in the type of `q`, and the log-sum-exp of the scores; zeros and MASKED for rows of no weight.
    """
    rows, head_dim = q.shape
    lists = Lists(tuple(pool.lengths.reshape(-1) for pool in pools), positions)
    parts = triton_call(
        partial(kernel, layout),
        (
            q,
            tuple(Regions(pool.k, pool.v, pool.offsets.reshape(-1)) for pool in pools),
            Ring(*(x.reshape(layout.regions * layout.ring, head_dim) for x in ring)),
            lists,
            *more,
        ),
        [
            ((layout.chunks * layout.rows, head_dim), jnp.float32),
            ((layout.chunks * layout.rows,), jnp.float32),
            ((layout.chunks * layout.rows,), jnp.float32),
        ],
        grid=(layout.tiles_of_rows * layout.chunks,),
        name=f"{name}_chunks",
        warps=config.warps,
        stages=config.stages,
        interpret=interpret,
    )
    out, lse = triton_call(
        partial(_merge_chunks, layout, config.merged),
        (*parts, lists),
        [((rows, head_dim), q.dtype), ((rows,), jnp.float32)],
        grid=(rows,),
        name=f"{name}_merge",
        warps=4,
        stages=1,
        interpret=interpret,
    )
    return out, lse


def _merge_chunks(
    layout: ChunkLayout,
    merged: int,
    parts_ref: Any,
    peak_ref: Any,
    weight_ref: Any,
    lists: Lists,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    """Merges the chunks of one query head."""
    row = pl.program_id(0)
    region, number = layout.place(row)
    chunks = split(layout, lists)
    first, count = chunks.first_chunk(region), chunks.of(region, chunks.counts)
    columns = jnp.arange(parts_ref.shape[1], dtype=jnp.int32)

    def step(i: Array, state: State) -> State:
        peak, weight, out = state
        index = i * merged + jnp.arange(merged, dtype=jnp.int32)
        valid = index < count
        rows = (first + index) * layout.rows + number
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
