"""Extend attention through Pallas-Triton: a program takes a tile of a region's queries over one chunk of its tokens.

Tiles of keys that all queries of the program see are taken without a mask: all of a pool's but its last, and the ring's
up to the queries themselves.
"""

from __future__ import annotations

import dataclasses
import operator
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
from tca_jax.pallas_kernels.kernel_math import (
    LOG2E,
    full_precision_tile,
    quotient_and_remainder,
    shared_memory,
    streamed_tile,
)
from tca_jax.pallas_kernels.kv import Pool, Ring, held_pools
from tca_jax.pallas_kernels.triton_call import check_supported, load_rows, multiprocessors, online_softmax_step
from tca_jax.pallas_kernels.triton_chunks import ChunkConfig, ChunkLayout, Lists, Regions, attend_chunks, split

#: Largest score before any: below all real ones, above masked ones, and exact however it is scaled.
_LOWEST = -(2.0**96)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtendConfig(ChunkConfig):
    """Tiling of extend attention.

    Attributes:
        queries: Query rows of a program (a query of each head of the group is a row), a power of two from 16.
    """

    queries: int


def default_config(rows: int, head_dim: int, dtype: Any) -> ExtendConfig:
    """Tiles for so many query rows a region; two programs share a multiprocessor.

    The few rows of short questions are read for, as in decoding; those of whole blocks are computed for, as in prefill.
    """
    itemsize, programs = jnp.dtype(dtype).itemsize, 2 * multiprocessors()
    queries, keys = min(128, max(16, pl.next_power_of_2(rows))), streamed_tile(head_dim, itemsize)
    if queries == 16:
        return ExtendConfig(keys=keys, programs=programs, warps=2, stages=3, queries=queries)
    if itemsize == 4:
        tile, warps = full_precision_tile(head_dim)
        return ExtendConfig(keys=tile, programs=programs, warps=warps, stages=1, queries=min(queries, tile))
    while keys > 16 and (queries + 4 * keys) * head_dim * itemsize > shared_memory():
        keys //= 2
    deep = queries < 128 and 2 * (queries + 6 * keys) * head_dim * itemsize <= shared_memory()
    # Of scores and output a thread of 4 warps holds a row: past d = 128 its registers run out.
    warps = 8 if queries == 128 and head_dim > 128 else 4
    return ExtendConfig(keys=keys, programs=programs, warps=warps, stages=3 if deep else 2, queries=queries)


@partial(jax.jit, static_argnames=("block_size", "window", "capacity", "growth_capacity", "config", "interpret"))
@jax.named_scope("extend_attention")
def extend_attention(
    q: Float[Array, "B m Hq d"],
    pool: Pool,
    ring: Ring,
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    *,
    growth: Pool | None = None,
    block_size: int,
    window: int,
    capacity: int,
    growth_capacity: int = 0,
    config: ExtendConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B m Hq d"], Float32[Array, "B m Hq"]]:
    """One softmax over ring and regions; see `extend_attention.extend_attention`.

    Tokens that no query attends to are never read.
    """
    _, queries, q_heads, head_dim = q.shape
    group = q_heads // ring.k.shape[1]
    asked = first <= newest  # a row without a query gets no chunk
    pools = tuple(
        held._replace(lengths=jnp.where(asked[:, None], held.lengths, 0))
        for held in held_pools(pool, capacity, growth, growth_capacity)
    )
    check_supported("extend_attention", head_dim, q, *ring, *(x for held in pools for x in (held.k, held.v)))
    config = config or default_config(queries * group, head_dim, q.dtype)
    layout = ChunkLayout.plan(
        ring,
        config,
        group=group,
        queries=queries,
        tiles_of_rows=cdiv(queries * group, config.queries),
        block_size=block_size,
        window=window,
        capacities=(capacity, growth_capacity),
    )
    out, lse = attend_chunks(
        partial(_attend_chunk, rows=config.queries, interpret=interpret),
        layout,
        q.reshape(-1, head_dim),
        pools,
        ring,
        jnp.where(asked, newest, -1),
        first,
        config=config,
        name="extend_attention",
        interpret=interpret,
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _attend_chunk(
    layout: ChunkLayout,
    q_ref: Any,
    pools: tuple[Regions, ...],
    ring: Ring,
    lists: Lists,
    first_ref: Any,
    out_ref: Any,
    peak_ref: Any,
    weight_ref: Any,
    *,
    rows: int,
    interpret: bool,
) -> None:
    """Attention of one tile of a region's query rows to one chunk of its tokens, not normalised."""
    # The tiles of rows of a chunk run side by side, since they share its tokens in the L2 cache.
    chunk, tile = quotient_and_remainder(pl.program_id(0), layout.tiles_of_rows)
    chunks = split(layout, lists)
    region = chunks.region_of(chunk)

    @pl.when(region < layout.regions)
    def _() -> None:
        newest, first_query = chunks.of(region, chunks.positions), first_ref[lax.div(region, layout.kv_heads)]
        numbers = tile * rows + jnp.arange(rows, dtype=jnp.int32)
        positions = first_query + lax.div(numbers, jnp.full_like(numbers, layout.group))
        earliest, latest = (
            first_query + lax.div(number, layout.group) for number in (tile * rows, (tile + 1) * rows - 1)
        )
        inside = numbers < layout.rows
        real = inside & (positions <= newest)
        columns = jnp.arange(q_ref.shape[1], dtype=jnp.int32)
        where = (layout.whereabouts(region, numbers)[:, None], columns[None])
        q = pltriton.load(q_ref.at[where], mask=real[:, None], other=0.0)
        attend = partial(_attend_part, layout.keys, partial(online_softmax_step, q, interpret=interpret))
        state = (
            jnp.zeros(q.shape, jnp.float32),
            jnp.full(numbers.shape, _LOWEST, jnp.float32),
            jnp.zeros(numbers.shape, jnp.float32),
        )
        begin, end = chunks.tiles_of(chunk, region)
        end = jnp.where(earliest <= newest, end, begin)  # a tile of nothing but padding
        for pool, pooled in zip(pools, chunks.pooled, strict=True):
            offset, length = pool.offsets[region], chunks.of(region, pooled)
            tiles = layout.tiles(length)
            part = _Part(pool.k, pool.v, partial(operator.add, offset), length, length, length)
            state = attend(part, jnp.minimum(begin, tiles), jnp.minimum(end, tiles), state)
            begin, end = (jnp.maximum(edge, tiles) - tiles for edge in (begin, end))
        first, length = layout.local_tokens(newest)
        before = positions[:, None] + 1 - first
        part = _Part(ring.k, ring.v, layout.slots(region, first), length, earliest + 1 - first, before)
        last = layout.tiles(jnp.maximum(jnp.minimum(latest, newest) + 1 - first, 0))
        out, peak, weight = attend(part, begin, jnp.minimum(end, last), state)

        to = chunk * layout.rows + numbers
        pltriton.store(peak_ref.at[to], peak * (LOG2E / q.shape[1] ** 0.5), mask=inside)
        pltriton.store(weight_ref.at[to], jnp.where(real, weight, 0), mask=inside)
        pltriton.store(out_ref.at[to[:, None], columns[None]], jnp.where(real[:, None], out, 0), mask=inside[:, None])


class _Part(NamedTuple):
    """A region's tokens in one pool or in the ring.

    Attributes:
        k: Ref of the keys.
        v: Ref of the values.
        row_of: Finds their rows by the tokens' numbers.
        length: How many there are.
        shared: How many of them, from the first on, all queries see.
        seen: How many each query sees, of a shape that broadcasts against [queries, keys].
    """

    k: Any
    v: Any
    row_of: Callable[[Array], Array]
    length: Array
    shared: Array
    seen: Array


def _attend_part(
    keys: int, step: Callable[..., Any], part: _Part, begin: Array, end: Array, state: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Takes tiles of a part, of so many keys, from `begin` to `end`; those that not all queries see have a mask."""
    columns = jnp.arange(part.k.shape[1], dtype=jnp.int32)

    def body(masked: bool, tile: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        index = tile * keys + jnp.arange(keys, dtype=jnp.int32)
        where = (part.row_of(index)[:, None], columns[None])
        inside = (index < part.length)[:, None] if masked else None
        k, v = (load_rows(ref.at[where], inside) for ref in (part.k, part.v))
        return step(state, k, v, index[None] < part.seen) if masked else step(state, k, v)

    whole = lax.div(part.shared, keys)
    state = lax.fori_loop(begin, jnp.minimum(end, whole), partial(body, False), state)
    return lax.fori_loop(jnp.maximum(begin, whole), end, partial(body, True), state)
