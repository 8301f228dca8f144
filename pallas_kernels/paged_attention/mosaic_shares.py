"""What each program of the Mosaic kernels has of the tiles of all regions: an equal, contiguous part of one list.

A region is a KV head of a row. Its tokens lie in runs: of every cache the kept ones, then those of the window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from tca_jax.pallas_kernels.kernel_math import divide_up, quotient_and_remainder
from tca_jax.pallas_kernels.numerics import cdiv

_UNROLLED = 64  # regions that a program looks at without a loop: their lengths are then read at once


@dataclasses.dataclass(frozen=True)
class MosaicPagedConfig:
    """Tiling of the kernels.

    Attributes:
        tile: Tokens of a tile, 64 or 128; divides the page.
        stages: Tiles of K and of V in flight; each takes 4 tile d bytes of shared memory, of 195 KiB.
        programs: Programs that the tiles of all heads are dealt to.
        merged: Partial results that the merging kernel reads at once.
    """

    tile: int
    stages: int
    programs: int
    merged: int = 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernels know of the problem at compile time."""

    batch: int
    kv_heads: int
    group: int
    page: int
    window: int
    kept_columns: tuple[int, ...]
    config: MosaicPagedConfig

    @property
    def regions(self) -> int:
        """Regions of all rows."""
        return self.batch * self.kv_heads

    @property
    def rows(self) -> int:
        """Rows that are copied for a region, of queries and of partial results: the tiles of 8 that hold its own."""
        return 8 * cdiv(8 - math.gcd(self.group, 8) + self.group, 8)

    def first_row(self, region: Any) -> Any:
        """First row of queries that is copied for a region."""
        row = region * self.group
        return row - row % 8

    def tiles(self, tokens: Any) -> Any:
        """Tiles that hold so many tokens."""
        return divide_up(tokens, self.config.tile)


class Run(NamedTuple):
    """Tokens of a region that lie one after another: where, their number, and the table's entry for the first page."""

    cache: int
    row: Any
    tokens: Any
    column: Any


class Share(NamedTuple):
    """A program's part of the list of tiles, and the first region that it has tiles of, with that one's first tile."""

    begin: Any
    end: Any
    region: Any
    base: Any


def runs_of(plan: Plan, lengths: Any, first_ref: Any, newest_ref: Any, row: Any) -> Callable[[Any], list[Run]]:
    """Takes a KV head to its tokens in every cache, of a row: kept ones, then those of the window up to the query.

    `lengths` are refs (kept, start, end) of each cache.
    """
    first, newest = first_ref[row], newest_ref[row]
    asked = first <= newest
    block = quotient_and_remainder(jnp.maximum(newest, 0), plan.page)[0] * plan.page
    found = []
    for (kept_ref, start_ref, end_ref), kept_columns in zip(lengths, plan.kept_columns, strict=True):
        own = quotient_and_remainder(row, plan.batch // kept_ref.shape[0])[0]
        start = start_ref[own]
        edge = jnp.maximum(start, block - plan.window)
        local = jnp.where(asked, jnp.maximum(jnp.minimum(end_ref[own], first + 1) - edge, 0), 0)
        found.append((own, local, kept_columns + quotient_and_remainder(edge - start, plan.page)[0]))

    def of_head(head: Any) -> list[Run]:
        runs = []
        for number, ((kept_ref, *_), (own, local, column)) in enumerate(zip(lengths, found, strict=True)):
            kept = jnp.where(asked, kept_ref[own, head], 0)
            runs += [Run(number, own, kept, jnp.int32(0)), Run(number, own, local, column)]
        return runs

    return of_head


def fold_regions(plan: Plan, runs: Callable[[Any], Any], step: Callable[..., Any], carry: Any) -> Any:
    """Takes every region's number and tiles, in order, to a carry."""
    unrolled = max(rows for rows in range(1, plan.batch + 1) if not plan.batch % rows and _fits(plan, rows))

    def take_rows(turn: Any, carry: Any) -> Any:
        for row in range(unrolled):
            row = turn * unrolled + row
            of_head = runs(row)
            for head in range(plan.kv_heads):
                tiles = sum(plan.tiles(run.tokens) for run in of_head(jnp.int32(head)))
                carry = step(row * plan.kv_heads + head, tiles, carry)
        return carry

    if unrolled == plan.batch:
        return take_rows(jnp.int32(0), carry)
    return lax.fori_loop(0, plan.batch // unrolled, take_rows, carry)


def _fits(plan: Plan, rows: int) -> bool:
    return rows == 1 or rows * plan.kv_heads <= _UNROLLED


def active_programs(plan: Plan, total: Any) -> Any:
    """Programs that have tiles: no more than there are."""
    return jnp.clip(total, 1, plan.config.programs)


def share_of(plan: Plan, runs: Callable[[Any], Any], program: Any) -> Share:
    """What a program has of the list: of `total` tiles and n programs, from floor(total p / n) on."""
    total = fold_regions(plan, runs, lambda _, tiles, total: total + tiles, jnp.int32(0))
    active = active_programs(plan, total)
    begin, end = (lax.div(total * number, active) for number in (program, program + 1))
    end = jnp.where(program < active, end, 0)

    def pass_over(_: Any, tiles: Any, carry: Any) -> Any:
        ends, region, base = carry
        ends += tiles
        passed = ends <= begin
        return ends, jnp.where(passed, region + 1, region), jnp.where(passed, ends, base)

    _, region, base = fold_regions(plan, runs, pass_over, (jnp.int32(0),) * 3)
    return Share(begin, end, region, base)
