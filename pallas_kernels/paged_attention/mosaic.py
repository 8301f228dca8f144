"""Paged attention of one query a row on Pallas Mosaic GPU: TMA and wgmma (Hopper).

The tiles of all regions (a region is a KV head of a row) stand in one list, which programs share equally, a contiguous
part each (Stream-K, arXiv 2301.03598): unequal heads and rows cost no program more than others. In a program one
warpgroup streams tiles of pages through a ring in shared memory, the other takes them through the online softmax. The
query heads of a region are rows of a wgmma tile of 64; the rest of it is zeros, for decoding waits for memory. A second
kernel merges what the programs found of a region.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import Unsupported
from tca_jax.pallas_kernels.kernel_math import LOG2E, divide_up, multiprocessors, quotient_and_remainder
from tca_jax.pallas_kernels.kv import EightBits, Pages
from tca_jax.pallas_kernels.mosaic_softmax import ROWS
from tca_jax.pallas_kernels.mosaic_tiles import aligned, iotas, swizzled, transposed
from tca_jax.pallas_kernels.numerics import MASKED, varying_like
from tca_jax.pallas_kernels.paged_attention.mosaic_shares import (
    MosaicPagedConfig,
    Plan,
    Run,
    Share,
    active_programs,
    fold_regions,
    runs_of,
    share_of,
)

_MOST_HEADS = ROWS - 8  # of a group: those of others lie beside them in the tiles that are copied
_LANES = 128  # threads of a warpgroup, and columns of a row of partial results, of which the last may be unused
_PART = 32  # columns of float32 that shared memory has between registers and global memory: one swizzled tile


@partial(jax.jit, static_argnames=("window", "config", "interpret"))
@jax.named_scope("paged_attention")
def paged_attention(
    q: Float[Array, "B m Hq d"],
    caches: tuple[Pages, ...],
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    *,
    window: int,
    config: MosaicPagedConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B m Hq d"], Float32[Array, "B m Hq"]]:
    """See `paged_attention.paged_attention`; `interpret` are parameters of Pallas' interpret mode.

    Raises:
        NotImplementedError: there are several queries a row, or other types or sizes than it takes.
    """
    batch, _, q_heads, head_dim = q.shape
    page, kv_heads = caches[0].page_size, caches[0].table.shape[1]
    config = config or default_config(page, head_dim)
    _check(q, caches, config)
    plan = Plan(
        batch=batch,
        kv_heads=kv_heads,
        group=q_heads // kv_heads,
        page=page,
        window=window,
        kept_columns=tuple(cache.kept_columns for cache in caches),
        config=config,
    )
    heads = q.reshape(batch * q_heads, head_dim)
    lacking = plan.first_row(plan.regions - 1) + plan.rows - len(heads)  # to the last region's tiles; mostly none
    if lacking > 0:
        heads = jnp.pad(heads, ((0, lacking), (0, 0)))
    arrays = [x for cache in caches for x in _CacheRefs.of(cache)]
    lengths = [x for cache in caches for x in _CacheRefs.of(cache)[-3:]]
    of = jax.ShapeDtypeStruct
    common = {"grid_names": ("work",), "thread_name": "wg", "interpret": interpret}
    slots = plan.config.programs + plan.regions
    parts, logs = plgpu.kernel(
        partial(_entry, plan),
        out_type=[of((slots, plan.rows, _LANES), jnp.float32), of((slots, plan.rows), jnp.float32)],
        grid=(plan.config.programs,),
        num_threads=2,
        kernel_name="paged_attention_parts",  # what profiles show
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
        **common,
    )(heads, first, newest, *arrays)
    out, lse = plgpu.kernel(
        partial(_merge, plan),
        out_type=[of((batch * q_heads, head_dim), q.dtype), of((batch * q_heads,), jnp.float32)],
        grid=(batch * q_heads,),
        num_threads=1,
        kernel_name="paged_attention_merge",
        **common,
    )(parts.reshape(-1, _LANES), logs.reshape(-1), first, newest, *lengths)
    return varying_like((out.reshape(q.shape), lse.reshape(q.shape[:3])), q, caches, first, newest)


def default_config(page: int, head_dim: int) -> MosaicPagedConfig:
    """As much in flight as shared memory holds; of six configurations on an H100 none was faster."""
    tile = 64 if page % 128 else 128
    return MosaicPagedConfig(tile, stages=3 * (128 // tile) * (128 // max(64, head_dim)), programs=multiprocessors())


def _check(q: Array, caches: tuple[Pages, ...], config: MosaicPagedConfig) -> None:
    page, kv_heads = caches[0].page_size, caches[0].table.shape[1]
    group, head_dim = q.shape[2] // kv_heads, q.shape[3]
    if q.shape[1] != 1:
        raise Unsupported(f"paged_attention on mosaic takes one query a row, not {q.shape[1]}")
    dtypes = {str(x.dtype) for x in (q, *(x for cache in caches for x in (cache.k, cache.v)))}
    if len(dtypes) > 1 or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"paged_attention on mosaic takes all in bfloat16 or in float16, not {sorted(dtypes)}")
    if head_dim not in (64, 128) or group > _MOST_HEADS or page % config.tile or config.tile % 64:
        raise Unsupported(
            f"paged_attention on mosaic takes d 64 or 128, {_MOST_HEADS} query heads a KV head at most and pages of a "
            f"multiple of 64, not d = {head_dim}, {group} query heads a KV head and pages of {page}"
        )


class _CacheRefs(NamedTuple):
    """A cache as the kernels address it; see `kv.Pages`."""

    k: Any
    v: Any
    table: Any
    kept: Any
    start: Any
    end: Any

    @classmethod
    def of(cls, cache: Pages) -> _CacheRefs:
        """A cache's arrays."""
        assert not isinstance(cache.k, EightBits)
        return cls(cache.k, cache.v, cache.table, cache.kept, cache.start, cache.end)


class _Shared(NamedTuple):
    """What the two warpgroups of a program share: buffers, and barriers that say when they may be read or written."""

    q: Any
    k: Any
    v: Any
    parts: Any
    logs: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_read: Any
    v_read: Any


class _Refs(NamedTuple):
    """What a program reads and writes in global memory."""

    q: Any
    caches: list[_CacheRefs]
    runs: Callable[[Any], Any]
    parts: Any
    logs: Any


def _entry(plan: Plan, *refs: Any) -> None:
    """Allocates the shared memory and barriers of a program."""
    q_ref, first_ref, newest_ref, *arrays, parts_ref, logs_ref = refs
    caches = [_CacheRefs(*arrays[i : i + 6]) for i in range(0, len(arrays), 6)]
    runs = partial(runs_of, plan, [cache[-3:] for cache in caches], first_ref, newest_ref)
    head_dim, stages, tile = q_ref.shape[1], plan.config.stages, swizzled(q_ref.dtype)
    rounded = (plgpu.TilingTransform((8, _PART)), plgpu.SwizzleTransform(128))
    shared = _Shared(
        q=tile((ROWS, head_dim)),
        k=tile((stages, plan.config.tile, head_dim)),
        v=tile((stages, plan.config.tile, head_dim)),
        parts=plgpu.SMEM((2, ROWS, _PART), jnp.float32, transforms=rounded),
        logs=plgpu.SMEM((ROWS,), jnp.float32),
        q_ready=plgpu.Barrier(),
        k_ready=plgpu.Barrier(num_barriers=stages),
        v_ready=plgpu.Barrier(num_barriers=stages),
        k_read=plgpu.Barrier(num_barriers=stages),
        v_read=plgpu.Barrier(num_barriers=stages),
    )

    def program(shared: _Shared) -> None:
        work = _Refs(q_ref, caches, runs, parts_ref, logs_ref)
        share = share_of(plan, runs, lax.axis_index("work"))
        warpgroup = lax.axis_index("wg")
        pl.when(warpgroup == 0)(lambda: _compute(plan, work, shared, share))
        pl.when(warpgroup == 1)(lambda: _move(plan, work, shared, share))

    pl.run_scoped(program, shared, collective_axes="wg")


def _each_region(plan: Plan, share: Share, runs: Callable[[Any], Any], take: Callable[..., None]) -> None:
    """Calls `take(region, head, runs, base)` for every region of a share; `base` is the region's first tile."""

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        region, base = state
        row, head = quotient_and_remainder(region, plan.kv_heads)
        found = runs(row)(head)
        take(region, head, found, base)
        return region + 1, base + sum(plan.tiles(run.tokens) for run in found)

    lax.while_loop(lambda state: state[1] < share.end, step, (share.region, share.base))


def _move(plan: Plan, work: _Refs, shared: _Shared, share: Share) -> None:
    """The memory warpgroup: fills the ring's next slot as soon as the other one has read it."""
    config = plan.config

    def fetch_run(run: Run, head: Any, begin: Any, end: Any, before: Any) -> None:
        """Fetches tiles [begin, end) of a run; its first one would be tile `before` of the program."""
        cache = work.caches[run.cache]

        def page_of(tile: Any) -> Any:
            column = run.column + quotient_and_remainder(tile, plan.page // config.tile)[0]
            return cache.table[run.row, head, jnp.clip(column, 0, cache.table.shape[2] - 1)]

        # The page of a tile is looked up a step ahead, so that its latency is not that of the copies.
        def fetch(tile: Any, page: Any) -> Any:
            following = page_of(tile + 1)
            step = before + tile
            slot = quotient_and_remainder(step, config.stages)[1]
            reused = step >= config.stages
            tokens = aligned(quotient_and_remainder(tile, plan.page // config.tile)[1] * config.tile, config.tile)
            pl.when(reused)(lambda: plgpu.barrier_wait(shared.k_read.at[slot]))
            plgpu.copy_gmem_to_smem(cache.k.at[page, tokens], shared.k.at[slot], shared.k_ready.at[slot])
            pl.when(reused)(lambda: plgpu.barrier_wait(shared.v_read.at[slot]))
            plgpu.copy_gmem_to_smem(cache.v.at[page, tokens], shared.v.at[slot], shared.v_ready.at[slot])
            return following

        lax.fori_loop(begin, end, fetch, page_of(begin))

    def take_region(region: Any, head: Any, runs: list[Run], base: Any) -> None:
        for run in runs:
            tiles = plan.tiles(run.tokens)
            begin, end = (jnp.clip(edge - base, 0, tiles) for edge in (share.begin, share.end))
            fetch_run(run, head, begin, end, base - share.begin)
            base += tiles

    _each_region(plan, share, work.runs, take_region)


def _compute(plan: Plan, work: _Refs, shared: _Shared, share: Share) -> None:
    """The compute warpgroup: the online softmax of each region of the share."""
    shared.q[...] = plgpu.layout_cast(jnp.zeros(shared.q.shape, shared.q.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()

    def take_region(region: Any, head: Any, runs: list[Run], base: Any) -> None:
        edges = [base - share.begin]  # of runs, in tiles of the program
        for run in runs:
            edges.append(edges[-1] + plan.tiles(run.tokens))
        begin, end = (jnp.clip(edge, 0, share.end - share.begin) for edge in (edges[0], edges[-1]))

        @pl.when(begin < end)
        def _() -> None:
            queries = pl.ds(pl.multiple_of(plan.first_row(region), 8), plan.rows)
            plgpu.copy_gmem_to_smem(work.q.at[queries], shared.q.at[pl.ds(0, plan.rows)], shared.q_ready)
            plgpu.barrier_wait(shared.q_ready)

            def take(step: Any, state: Any) -> Any:
                seen = runs[0].tokens - (step - edges[0]) * plan.config.tile
                for run, edge in zip(runs[1:], edges[1:], strict=False):
                    seen = jnp.where(step < edge, seen, run.tokens - (step - edge) * plan.config.tile)
                return _attend_tile(
                    shared, plan.config, step, step + plan.config.stages < share.end - share.begin, seen, state
                )

            state = lax.fori_loop(begin, end, take, _nothing(shared.q.shape[1]))
            _store(plan, work, shared, lax.axis_index("work") + region, state)

    _each_region(plan, share, work.runs, take_region)


def _nothing(head_dim: int) -> tuple[Any, Any, Any]:
    """Output, peak (in powers of two) and weight before any token."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
    )


def _attend_tile(
    shared: _Shared, config: MosaicPagedConfig, step: Any, reused: Any, seen: Any, state: tuple[Any, Any, Any]
) -> tuple[Any, Any, Any]:
    """Takes the first `seen` tokens of a tile, one at least, through the online softmax.

    `reused` says whether the memory warpgroup waits for the tile's slots.
    """
    out, peak, weight = state
    slot = quotient_and_remainder(step, config.stages)[1]
    plgpu.barrier_wait(shared.k_ready.at[slot])
    scores = _multiply(shared.q, transposed(shared.k.at[slot]), config.tile)
    pl.when(reused)(lambda: plgpu.barrier_arrive(shared.k_read.at[slot]))
    _, columns = iotas(scores.shape)
    scores = jnp.where(columns < seen, scores, MASKED)
    scale = LOG2E * shared.q.shape[1] ** -0.5  # powers of two, so that scaling is part of a multiply-add
    new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
    decay = jnp.exp2(peak - new_peak)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    weight = weight * decay + weights.sum(axis=1)
    operand = weights.astype(shared.v.dtype)
    plgpu.barrier_wait(shared.v_ready.at[slot])
    added = _multiply(operand, shared.v.at[slot], out.shape[1])
    pl.when(reused)(lambda: plgpu.barrier_arrive(shared.v_read.at[slot]))
    return out * lax.broadcast_in_dim(decay, out.shape, [0]) + added, new_peak, weight


def _multiply(a: Any, b: Any, columns: int) -> Any:
    """a b, which has so many columns, in float32; a lies in shared memory or in registers."""

    def multiply(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, columns), jnp.float32))


def _store(plan: Plan, work: _Refs, shared: _Shared, slot: Any, state: Any) -> None:
    """Stores a share's attention of a region, and its log-sum-exp to base 2.

    A program and a region have slot `program + region`: from one pair to the next in the list, either or both grow.
    """
    out, peak, weight = state
    shared.logs[...] = peak + jnp.log(weight) * LOG2E
    plgpu.commit_smem()
    rows = pl.ds(0, plan.rows)
    plgpu.copy_smem_to_gmem(shared.logs.at[rows], work.logs.at[slot])
    out /= lax.broadcast_in_dim(weight, out.shape, [0])
    for i, column in enumerate(range(0, out.shape[1], _PART)):
        if i >= 2:  # the part before the last has left its buffer
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer = shared.parts.at[i % 2]
        buffer[...] = lax.slice(out, (0, column), (ROWS, column + _PART))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[rows], work.parts.at[slot, :, pl.ds(column, _PART)])
    plgpu.wait_smem_to_gmem(0)


def _merge(plan: Plan, *refs: Any) -> None:
    """Merges what programs found of a region, for one query head."""
    parts_ref, logs_ref, first_ref, newest_ref, *arrays, out_ref, lse_ref = refs
    runs = partial(runs_of, plan, [arrays[i : i + 3] for i in range(0, len(arrays), 3)], first_ref, newest_ref)
    head = lax.axis_index("work")
    region = quotient_and_remainder(head, plan.group)[0]
    own_row = head - plan.first_row(region)

    def add(number: Any, tiles: Any, carry: Any) -> Any:
        total, base, own = carry
        mine = jnp.where(number == region, tiles, own)
        return total + tiles, jnp.where(number < region, base + tiles, base), mine

    total, base, own = fold_regions(plan, runs, add, (jnp.int32(0),) * 3)
    # Program p begins at tile floor(total p / n): tile t is that of program ceil((t + 1) n / total) - 1.
    first, last = (
        lax.div((tile + 1) * active_programs(plan, total) - 1, jnp.maximum(total, 1)) for tile in (base, base + own - 1)
    )
    count = jnp.where(own > 0, last - first + 1, 0)
    merged = plan.config.merged

    def step(turn: Any, state: Any) -> Any:
        out, peak, weight = state
        parts, logs = [], []
        for i in range(merged):
            number = turn * merged + i
            row = (first + region + jnp.minimum(number, count - 1)) * plan.rows + own_row
            parts.append(parts_ref[row])
            logs.append(jnp.where(number < count, logs_ref[row], MASKED))
        new_peak = peak
        for log in logs:
            new_peak = jnp.maximum(new_peak, log)
        decay = jnp.exp2(peak - new_peak)
        out, weight = out * decay, weight * decay
        for part, log in zip(parts, logs, strict=True):
            share = jnp.exp2(log - new_peak)
            out, weight = out + part * share, weight + share
        return out, new_peak, weight

    empty = plgpu.layout_cast(jnp.zeros((_LANES,), jnp.float32), plgpu.Layout.WG_STRIDED((_LANES,), vec_size=1))
    nothing = empty, jnp.float32(MASKED), jnp.float32(0)
    out, peak, weight = lax.fori_loop(0, divide_up(count, merged), step, nothing)
    some = jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)  # a head without tokens gives zeros

    def finish(row: Any) -> None:
        row[...] = (out / some).astype(row.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row.at[pl.ds(0, out_ref.shape[1])], out_ref.at[head])
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(finish, plgpu.SMEM((_LANES,), out_ref.dtype), collective_axes="wg")
    lse_ref[head] = jnp.where(weight > 0, peak / LOG2E + jnp.log(some), MASKED)
