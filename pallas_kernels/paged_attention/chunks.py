"""How paged attention deals the tokens of unequal heads and rows to programs: chunks of nearly equal size.

A region is one KV head of one row. Its tokens are cut into tiles: for each of its caches those of the kept tokens, then
those of the window. The tiles of all regions are dealt to as many chunks as fill the card. Every program derives the
same chunks from the lengths on the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from tca_jax.pallas_kernels.kernel_math import divide_up, quotient_and_remainder
from tca_jax.pallas_kernels.kv import Pages
from tca_jax.pallas_kernels.numerics import cdiv


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """Tiling of paged attention."""

    queries: int  # query rows of a program (a query of each head of the group is a row), a power of two from 16
    keys: int  # tokens of a tile, a power of two from 16, at most a page
    programs: int  # programs that the tokens of all heads are dealt to, at most
    warps: int  # warps of a program
    stages: int  # depth of the software pipeline: `stages - 1` tiles are in flight in a program
    merged: int = 64  # chunks that the merging kernel reads at once, a power of two


class Span(NamedTuple):
    """A region's tokens in one cache: `kept` of them from anywhere, and `local` consecutive ones from `edge` on."""

    kept: Array
    local: Array
    edge: Array
    start: Array


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Static sizes of the problem."""

    regions: int  # regions of all rows
    kv_heads: int  # regions of a row
    group: int  # query heads of a KV head
    queries: int  # queries of a row, each of as many heads
    tiles_of_rows: int  # tiles that a region's query rows (a query of a head each) are cut into, each for a program
    page: int  # tokens of a page
    window: int  # least number of local tokens
    chunks: int  # chunks that all tokens are cut into, at most
    keys: int  # tokens of a tile

    @classmethod
    def make(
        cls, caches: tuple[Pages, ...], config: PagedConfig, *, batch: int, queries: int, group: int, window: int
    ) -> ChunkPlan:
        """The plan for `queries` queries in each of `batch` rows."""
        kv_heads, page = caches[0].table.shape[1], caches[0].page_size
        regions, tiles_of_rows = batch * kv_heads, cdiv(queries * group, config.queries)
        most_tiles = regions * sum(cache.table.shape[2] for cache in caches) * (page // config.keys)
        # One chunk a region at least and as many again for `split` to deal out; never more than there are tiles.
        chunks = min(max(config.programs // tiles_of_rows, 2 * regions), regions + most_tiles)
        return cls(regions, kv_heads, group, queries, tiles_of_rows, page, window, chunks, config.keys)

    @property
    def rows(self) -> int:
        """Query rows of a region; those of a query are adjacent."""
        return self.queries * self.group

    def place(self, row: Array) -> tuple[Array, Array]:
        """Region of a row of `[B m Hq, d]`, and which of the region's query rows it is."""
        index, member = quotient_and_remainder(row, self.group)
        if self.queries == 1:
            return index, member
        token, kv_head = quotient_and_remainder(index, self.kv_heads)
        batch, query = quotient_and_remainder(token, self.queries)
        return batch * self.kv_heads + kv_head, query * self.group + member

    def whereabouts(self, region: Array, numbers: Array) -> Array:
        """The inverse of `place`: places in `[B m Hq, d]` of a region's query rows `numbers`."""
        if self.queries == 1:
            return region * self.group + numbers
        batch, kv_head = quotient_and_remainder(region, self.kv_heads)
        query = lax.div(numbers, jnp.full_like(numbers, self.group))
        member = numbers - query * self.group
        return ((batch * self.queries + query) * self.kv_heads + kv_head) * self.group + member

    def tiles(self, tokens: Array) -> Array:
        """Tiles of `tokens` tokens."""
        return divide_up(tokens, self.keys)

    def rows_of(self, cache: Pages, rows: Array) -> tuple[Array, Array]:
        """Where a cache has rows of queries: in `start` and `end`, and in `table`, `kept` and `bias`."""
        own = lax.div(rows, jnp.full_like(rows, self.regions // self.kv_heads // cache.start.shape[0]))
        return own, own if cache.part is None else own + cache.part[0] * cache.start.shape[0]

    def column(self, cache: Pages, span: Span, is_kept: Array, tile: Array) -> Array:
        """Entry of a region's table that names the page of a tile: the n-th of its kept tokens or of its window."""
        pages = lax.div(tile, jnp.int32(self.page // self.keys))
        local = cache.kept_columns + lax.div(span.edge - span.start, jnp.int32(self.page)) + pages
        return jnp.clip(jnp.where(is_kept, pages, local), 0, cache.table.shape[2] - 1)


class Chunks(NamedTuple):
    """How every region is cut into chunks; one lane a region, the lanes past the last hold zeros."""

    tiles: Array  # tiles of a region
    counts: Array  # chunks of a region
    ends: Array  # number past its last chunk; chunks are numbered region after region
    spans: tuple[Span, ...]  # its tokens in each cache

    def region_of(self, chunk: Array) -> Array:
        """Region of a chunk."""
        return jnp.sum((self.ends <= chunk).astype(jnp.int32))

    def store(self, ends_ref: Any, counts_ref: Any) -> None:
        """Writes where the chunks of each region end, and how many there are, for merging."""
        for ref, values in ((ends_ref, self.ends), (counts_ref, self.counts)):
            pltriton.store(ref.at[self._lanes], values, mask=self._lanes < ref.shape[0])

    def of(self, region: Array, values: Array) -> Array:
        """A region's own of some values by lane, which were read before the region was known."""
        return jnp.sum(jnp.where(self._lanes == region, values, 0))

    def tiles_of(self, chunk: Array, region: Array) -> tuple[Array, Array]:
        """First and past-the-last tile of a region's chunk; its tiles are numbered cache after cache."""
        tiles, chunks = self.of(region, self.tiles), self.of(region, self.counts)
        part = chunk - self.of(region, self.ends) + chunks
        return lax.div(tiles * part, chunks), lax.div(tiles * (part + 1), chunks)

    @property
    def _lanes(self) -> Array:
        return jnp.arange(self.tiles.shape[0], dtype=jnp.int32)


def split(plan: ChunkPlan, caches: tuple[Any, ...], first: Any, newest: Any) -> Chunks:
    """Deals all tiles of `Pages` of refs to at most `plan.chunks` chunks, of one size but for the regions' remainders.

    Chunks of ceil(total / chunks) tiles would be the fewest that keep all programs busy; remainders can make them
    too many. Chunks of ceil(total / (chunks - regions)) tiles never are: a region brings one remainder at most.
    """
    lanes = jnp.arange(pl.next_power_of_2(plan.regions), dtype=jnp.int32)
    valid = lanes < plan.regions
    rows, heads = quotient_and_remainder(lanes, plan.kv_heads)
    latest = pltriton.load(newest.at[rows], mask=valid, other=-1)
    asked = pltriton.load(first.at[rows], mask=valid, other=0) <= latest
    # A division of numbers that are not negative; a row at -1 has no tokens.
    block = lax.div(jnp.maximum(latest, 0), jnp.full_like(latest, plan.page)) * plan.page
    spans, tiles = [], jnp.zeros_like(lanes)
    for cache in caches:
        own, place = plan.rows_of(cache, rows)
        start, end = (pltriton.load(x.at[own], mask=valid, other=0) for x in (cache.start, cache.end))
        edge = jnp.maximum(start, block - plan.window)
        local = jnp.where(asked, jnp.maximum(jnp.minimum(end, latest + 1) - edge, 0), 0)
        kept = pltriton.load(cache.kept.at[place, heads], mask=valid & asked, other=0)
        spans.append(Span(kept, local, edge, start))
        tiles += plan.tiles(kept) + plan.tiles(local)
    total = jnp.sum(tiles)
    tight, safe = (jnp.maximum(divide_up(total, n), 1) for n in (plan.chunks, plan.chunks - plan.regions))
    fits = jnp.sum(divide_up(tiles, tight)) <= plan.chunks
    counts = divide_up(tiles, jnp.where(fits, tight, safe))
    return Chunks(tiles, counts, jnp.cumsum(counts), tuple(spans))
