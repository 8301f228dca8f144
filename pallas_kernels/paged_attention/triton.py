"""Paged attention through Pallas-Triton: a program takes a tile of a region's queries over one chunk of its tokens.

Two launches: the first attends to chunks, the second merges the chunks of each query. Tiles of keys that all queries of
a program see come first, without a mask, then those that need one: the kept tokens' last, and the window's behind the
program's first query. A single query reads more than it computes, so all its tiles take the mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.kernel_math import (
    LOG2E,
    divide_up,
    full_precision_tile,
    multiprocessors,
    quotient_and_remainder,
    shared_memory,
)
from tca_jax.pallas_kernels.kv import LEAST_EXPONENT, EightBits, Pages
from tca_jax.pallas_kernels.numerics import MASKED
from tca_jax.pallas_kernels.paged_attention.chunks import ChunkPlan, PagedConfig, Span, split
from tca_jax.pallas_kernels.triton_call import (
    PartedState,
    check_supported,
    codes_as_float16,
    load_rows,
    online_softmax_step,
    triton_call,
)

_LEAST_EIGHT_BITS = 32  # head dimension: a product takes half of it, from 16 on
_LOWEST = -(2.0**96)  # largest score before any: below all real ones, above masked ones, exact however it is scaled
_SMALLEST_PAGE = 16  # what a matrix unit takes


def default_config(
    rows: int, head_dim: int, page: int, dtype: Any, batch: int = 1, *, eight_bits: bool = False
) -> PagedConfig:
    """Tiles for `rows` query rows of a region, in `batch` rows. Measured on an H200.

    The few rows of decoding and short questions are read for; those of whole blocks are computed for, as in prefill.
    Two programs share a multiprocessor. Where rows of a batch share pages, these come from the L2 cache: a third one
    hides its latency (402 instead of 566 microseconds for 16 questions of one document), and costs others 1%.

    Keys and values in eight bits have half the bytes and must be converted: four programs, each of four warps.
    """
    itemsize, programs = jnp.dtype(dtype).itemsize, (2 if batch == 1 else 3) * multiprocessors()
    queries, keys = min(128, max(16, pl.next_power_of_2(rows))), min(page, 128, max(16, 16384 // (head_dim * itemsize)))
    if queries == 16 and eight_bits and itemsize == 2:
        return PagedConfig(queries, keys, 4 * multiprocessors(), warps=4, stages=3)
    if queries == 16:
        return PagedConfig(queries, keys, programs, warps=2, stages=3)
    if itemsize == 4:
        tile, warps = full_precision_tile(head_dim)
        return PagedConfig(min(queries, tile), min(page, tile), programs, warps=warps, stages=1)
    while keys > 16 and (queries + 4 * keys) * head_dim * itemsize > shared_memory():
        keys //= 2
    deep = queries < 128 and 2 * (queries + 6 * keys) * head_dim * itemsize <= shared_memory()
    # Of scores and output a thread of 4 warps holds a row: past d = 128 its registers run out.
    warps = 8 if queries == 128 and head_dim > 128 else 4
    return PagedConfig(queries, keys, programs, warps=warps, stages=3 if deep else 2)


@partial(jax.jit, static_argnames=("window", "config", "interpret"))
@jax.named_scope("paged_attention")
def paged_attention(
    q: Array,
    caches: tuple[Pages, ...],
    first: Array,
    newest: Array,
    *,
    window: int,
    config: PagedConfig | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """One softmax over all pages, of which only attended tokens are read; see `paged_attention.paged_attention`."""
    batch, queries, q_heads, head_dim = q.shape
    stored = [x for cache in caches for x in (cache.k, cache.v) if not isinstance(x, EightBits)]
    check_supported("paged_attention", head_dim, q, *stored)
    eight_bits = any(isinstance(cache.k, EightBits) for cache in caches)
    page, group = caches[0].page_size, q_heads // caches[0].table.shape[1]
    on, is_power = "paged_attention on Triton", page >= _SMALLEST_PAGE and not page & (page - 1)
    is_wide = not eight_bits or head_dim >= _LEAST_EIGHT_BITS
    require(is_wide, f"{on}: head dimension {head_dim}: must be 32 or more in eight bits", Unsupported)
    require(is_power, f"{on}: pages of {page}: must be a power of two from {_SMALLEST_PAGE}", Unsupported)
    config = config or default_config(queries * group, head_dim, page, q.dtype, batch, eight_bits=eight_bits)
    plan = ChunkPlan.make(caches, config, batch=batch, queries=queries, group=group, window=window)
    rows, call = batch * queries * q_heads, partial(triton_call, interpret=interpret)
    attend, merge = partial(_attend_chunk, plan, config.queries, interpret), partial(_merge_chunks, plan, config.merged)
    operands = q.reshape(rows, head_dim), jax.tree.map(jnp.atleast_1d, caches), first, newest
    of_chunks, of_regions = (plan.chunks * plan.rows,), (plan.regions,)
    parts = [((*of_chunks, head_dim), jnp.float32), *[(of_chunks, jnp.float32)] * 2, *[(of_regions, jnp.int32)] * 2]
    sizes: Any = {"grid": (plan.tiles_of_rows * plan.chunks,), "warps": config.warps, "stages": config.stages}
    found = call(attend, operands, parts, **sizes, name="paged_attention_chunks")
    outputs = [((rows, head_dim), q.dtype), ((rows,), jnp.float32)]
    out, lse = call(merge, found, outputs, grid=(rows,), name="paged_attention_merge", warps=4, stages=1)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _attend_chunk(
    plan: ChunkPlan, rows: int, interpret: bool, q_ref: Any, caches: tuple[Pages, ...], *refs: Any
) -> None:
    """Attention of one tile of a region's query rows to one chunk of its tokens, not normalised."""
    first_ref, newest_ref, out_ref, peak_ref, weight_ref, ends_ref, counts_ref = refs
    # The tiles of rows of a chunk run side by side, since they share its tokens in the L2 cache.
    chunk, tile = quotient_and_remainder(pl.program_id(0), plan.tiles_of_rows)
    chunks = split(plan, caches, first_ref, newest_ref)
    region = chunks.region_of(chunk)
    pl.when(pl.program_id(0) == 0)(lambda: chunks.store(ends_ref, counts_ref))

    @pl.when(region < plan.regions)
    def _() -> None:
        row = lax.div(region, jnp.int32(plan.kv_heads))
        newest, first = newest_ref[row], first_ref[row]
        numbers = tile * rows + jnp.arange(rows, dtype=jnp.int32)
        positions = first + lax.div(numbers, jnp.full_like(numbers, plan.group))
        edges = tile * rows, (tile + 1) * rows - 1
        earliest, latest = (first + lax.div(number, jnp.int32(plan.group)) for number in edges)
        inside = numbers < plan.rows
        real = inside & (positions <= newest)
        # Queries and output are in two halves where a cache has words of two codes.
        parts = 1 + any(isinstance(cache.k, EightBits) for cache in caches)
        width = q_ref.shape[1] // parts
        columns = [part * width + jnp.arange(width, dtype=jnp.int32) for part in range(parts)]
        here = plan.whereabouts(region, numbers)[:, None]
        q = tuple(pltriton.load(q_ref.at[here, part[None]], mask=real[:, None], other=0.0) for part in columns)
        out = tuple(jnp.zeros(part.shape, jnp.float32) for part in q)
        state: PartedState = out, jnp.full(numbers.shape, _LOWEST, jnp.float32), jnp.zeros(numbers.shape, jnp.float32)
        begin, end = chunks.tiles_of(chunk, region)
        end = jnp.where(earliest <= newest, end, begin)  # a tile of nothing but padding
        for cache, spans in zip(caches, chunks.spans, strict=True):
            span = Span(*(chunks.of(region, values) for values in spans))
            tiles = plan.tiles(span.kept) + plan.tiles(span.local)
            attend = partial(_attend_span, plan, cache, span, region, interpret=interpret)
            between = jnp.minimum(begin, tiles), jnp.minimum(end, tiles)
            state = attend(q, positions, (earliest, jnp.minimum(latest, newest)), between, state)
            begin, end = (jnp.maximum(edge, tiles) - tiles for edge in (begin, end))
        out, peak, weight = state
        to = chunk * plan.rows + numbers
        pltriton.store(peak_ref.at[to], peak * (LOG2E / q_ref.shape[1] ** 0.5), mask=inside)
        pltriton.store(weight_ref.at[to], jnp.where(real, weight, 0), mask=inside)
        for part, values in zip(columns, out, strict=True):
            values = jnp.where(real[:, None], values, 0)
            pltriton.store(out_ref.at[to[:, None], part[None]], values, mask=inside[:, None])


def _attend_span(
    plan: ChunkPlan,
    cache: Any,  # `Pages` of refs
    span: Span,
    region: Array,
    q: tuple[Array, ...],
    positions: Array,
    asked: tuple[Array, Array],  # positions of the first query and the last; tiles past it have no number
    between: tuple[Array, Array],  # first and past-the-last number
    state: PartedState,
    *,
    interpret: bool,
) -> PartedState:
    """Takes the tiles of a region's tokens in one cache with some numbers; those without a mask have the first ones."""
    keys, in_eight_bits = plan.keys, isinstance(cache.k, EightBits)
    if in_eight_bits and q[0].dtype != jnp.float32:
        q = tuple(part.astype(jnp.float16) for part in q)  # which holds codes, too
    row, head = quotient_and_remainder(region, plan.kv_heads)
    _, row = plan.rows_of(cache, row)
    step = partial(online_softmax_step, q, interpret=interpret)
    seen_by = [jnp.clip(position + 1 - span.edge, 0, span.local) for position in (*asked, positions)]
    if plan.queries == 1:
        whole_kept = whole_local = jnp.int32(0)
    else:
        whole_kept, whole_local = (lax.div(tokens, jnp.int32(keys)) for tokens in (span.kept, seen_by[0]))
    whole, partly_kept = whole_kept + whole_local, plan.tiles(span.kept) - whole_kept

    def tile_of(number: Array, masked: bool) -> tuple[Array, Array]:
        if masked:
            is_kept = number - whole < partly_kept
            return is_kept, number - whole + jnp.where(is_kept, whole_kept, whole_local - partly_kept)
        is_kept = number < whole_kept
        return is_kept, number - jnp.where(is_kept, 0, whole_kept)

    # A step of the loop looks up the next tile's page: keys are loaded stages ahead, where their page must be known.
    # Where there is no such tile, any entry of the table will do.
    def page_of(number: Array, masked: bool, last: Array) -> Array:
        return cache.table[row, head, plan.column(cache, span, *tile_of(jnp.minimum(number, last), masked))]

    def take(number: Array, carried: Any, masked: bool, last: Array) -> Any:
        state, page = carried
        is_kept, tile = tile_of(number, masked)
        following = page_of(number + 1, masked, last)
        index = jnp.arange(keys, dtype=jnp.int32)
        slots = lax.rem(tile, jnp.int32(plan.page // keys)) * keys + index
        index = tile * keys + index
        inside = index < jnp.where(is_kept, span.kept, seen_by[1]) if masked else None
        visible = index[None] < jnp.where(is_kept, span.kept, seen_by[2])[:, None] if masked else None
        k, v = (_load(refs, page, slots, q, inside, interpret=interpret) for refs in (cache.k, cache.v))
        exponents = None
        if in_eight_bits:
            exponents = _load_exponents(cache.k, page, slots, inside), _load_exponents(cache.v, page, slots, inside)
        bias = None
        if cache.bias is not None:
            counted = is_kept & (index < span.kept)
            bias = pltriton.load(cache.bias.at[row, head, index], mask=counted, other=0.0)
        return step(state, k, v, visible, exponents, bias=bias), following

    def run(begin: Array, end: Array, state: PartedState, masked: bool) -> PartedState:
        last = jnp.maximum(end - 1, 0)
        first_page = page_of(begin, masked, last)
        return lax.fori_loop(begin, end, partial(take, masked=masked, last=last), (state, first_page))[0]

    begin, end = between
    end = jnp.minimum(end, whole + partly_kept + plan.tiles(seen_by[1]) - whole_local)
    if plan.queries > 1:
        state = run(begin, jnp.minimum(end, whole), state, False)
    return run(jnp.maximum(begin, whole), end, state, True)


def _load(
    refs: Any, page: Array, slots: Array, q: tuple[Array, ...], inside: Array | None, *, interpret: bool
) -> tuple[Array, ...]:
    """Some keys or values of a page, in parts as queries are; those not `inside` give zeros."""
    rows, width = None if inside is None else inside[:, None], q[0].shape[1]
    column = jnp.arange(width, dtype=jnp.int32)[None]
    if isinstance(refs, EightBits):
        words = load_rows(refs.words.at[page, slots[:, None], column], rows)
        return tuple(half.astype(q[0].dtype) for half in codes_as_float16(words, interpret=interpret))
    return tuple(load_rows(refs.at[page, slots[:, None], part * width + column], rows) for part in range(len(q)))


def _load_exponents(refs: Any, page: Array, slots: Array, inside: Array | None) -> Array:
    """The powers of two of keys or values; those not `inside` have the least."""
    where = refs.exponents.at[page, slots]
    found = where[...] if inside is None else pltriton.load(where, mask=inside, other=LEAST_EXPONENT)
    return found.astype(jnp.int32)


def _merge_chunks(plan: ChunkPlan, merged: int, *refs: Any) -> None:
    """Merges the chunks of one query head."""
    parts_ref, peak_ref, weight_ref, ends_ref, counts_ref, out_ref, lse_ref = refs
    row = pl.program_id(0)
    region, number = plan.place(row)
    count, columns = counts_ref[region], jnp.arange(parts_ref.shape[1], dtype=jnp.int32)
    first = ends_ref[region] - count

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, peak, weight = state
        index = i * merged + jnp.arange(merged, dtype=jnp.int32)
        valid = index < count
        rows = (first + index) * plan.rows + number
        peaks = pltriton.load(peak_ref.at[rows], mask=valid, other=MASKED)
        weights = pltriton.load(weight_ref.at[rows], mask=valid, other=0.0)
        parts = pltriton.load(parts_ref.at[rows[:, None], columns[None]], mask=valid[:, None], other=0.0)
        new_peak = jnp.maximum(peak, jnp.max(peaks))
        shares, decay = jnp.exp2(peaks - new_peak), jnp.exp2(peak - new_peak)
        out = out * decay + jnp.sum(parts * shares[:, None], axis=0)
        return out, new_peak, weight * decay + jnp.sum(weights * shares)

    empty = (jnp.zeros(columns.shape, jnp.float32), jnp.float32(MASKED), jnp.float32(0))
    out, peak, weight = lax.fori_loop(0, divide_up(count, merged), step, empty)
    some = jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)  # a head without tokens gives zeros
    out_ref[row, :] = (out / some).astype(out_ref.dtype)
    lse_ref[row] = jnp.where(weight > 0, peak / LOG2E + jnp.log(some), MASKED)
