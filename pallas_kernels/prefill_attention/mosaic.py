"""Prefill attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper).

Two compute warpgroups own 64 query rows each; one memory warpgroup streams 128-token tiles of K and V: first the
diagonal tile, then the last tile of the head's region in the pool, then the rest of the region, then the window. Only
the first two need a mask, so one unmasked loop does nearly all the work. The warpgroups take turns (FlashAttention-3,
arXiv 2407.08608): while one computes its softmax, the other has the tensor cores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tca_jax.errors import Unsupported
from tca_jax.pallas_kernels.kernel_math import lengths_by_head, prefix_schedule
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.mosaic_softmax import ROWS, TILE, attend_tile, wait_turn
from tca_jax.pallas_kernels.mosaic_tiles import aligned, iotas, swizzled
from tca_jax.pallas_kernels.numerics import varying_like

_WARPGROUPS = 2  # that compute; one more moves memory
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40


@dataclasses.dataclass(frozen=True)
class MosaicPrefillConfig:
    """Tiling of the kernel.

    Attributes:
        stages: K and V tiles in flight; each takes 512 d bytes of shared memory.
    """

    stages: int = 2


# Under a jit of its own, all layers of a program share one kernel. JAX 0.11 numbers Mosaic kernels as it lowers them,
# so two calls never lower to the same text, and each would take a second to compile.
@functools.partial(jax.jit, static_argnames=("block_size", "window", "config"))
@jax.named_scope("prefill_attention")
def prefill_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    pool: Pool,
    budgets: Int[Array, "B Hkv nb"],
    lengths: Int[Array, " B"] | Int[Array, "B Hkv"],
    *,
    block_size: int,
    window: int,
    config: MosaicPrefillConfig | None = None,
) -> Float[Array, "B L Hq d"]:
    """See `prefill_attention.prefill_attention`. Values among the padding must be finite."""
    length, head_dim = q.shape[1], q.shape[3]
    config = config or MosaicPrefillConfig()
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"prefill_attention on mosaic takes bfloat16 and float16, not {q.dtype}")
    if block_size % TILE or head_dim not in (64, 128):
        raise Unsupported(
            f"prefill_attention on mosaic takes d 64 or 128 and block_size a multiple of {TILE}, "
            f"not d = {head_dim} and block_size = {block_size}"
        )
    padding = -length % block_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    prefixes, order = prefix_schedule(budgets, q.shape[1] // block_size, window // block_size)
    out = plgpu.kernel(
        functools.partial(_entry, block_size=block_size, window=window, config=config),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0] * q.shape[2] * (q.shape[1] // TILE),),
        grid_names=("work",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="prefill_attention_kernel",  # what profiles show
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, pool.k, pool.v, pool.offsets, prefixes, lengths_by_head(lengths, k.shape[2]), order)
    return varying_like(out[:, :length], q, k, v, pool, budgets, lengths)


def _entry(*refs: Any, block_size: int, window: int, config: MosaicPrefillConfig) -> None:
    """Allocates the shared memory and barriers of a program."""
    dtype, head_dim = refs[0].dtype, refs[0].shape[3]
    tile = swizzled(dtype)
    pl.run_scoped(
        lambda *scoped: _program(refs, scoped, block_size=block_size, window=window, stages=config.stages),
        (
            tile((_WARPGROUPS, ROWS, head_dim)),
            tile((config.stages, TILE, head_dim)),
            tile((config.stages, TILE, head_dim)),
        ),
        (
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_barriers=config.stages),
        ),
        (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.stages),) * 2,
        plgpu.Barrier(num_arrivals=_WARPGROUPS),
        collective_axes="wg",
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """One program's query tile of one head, and the K and V tiles that it reads, all traced int32 scalars.

    Steps run in this order: the diagonal tile, the region's last tile where only part of it counts (`tail` tokens),
    the region's `full_tiles`, the window's tiles from `edge_tile` to the diagonal. No step for a tile past the length.
    """

    row: Any
    head: Any
    kv_head: Any
    tile: Any
    length: Any
    offset: Any
    full_tiles: Any
    tail: Any
    edge_tile: Any
    masked_steps: Any
    steps: Any


def _find_work(refs: Any, *, block_size: int, window: int) -> _Work:
    q_ref, k_ref, _, _, _, offsets_ref, prefixes_ref, lengths_ref, order_ref, _ = refs
    num_kv_heads = k_ref.shape[2]
    group, tiles = q_ref.shape[2] // num_kv_heads, q_ref.shape[1] // TILE
    # Heads of a group run side by side and regions one after another, since they share K and V in L2; within a region
    # the longest tiles come first, and the largest regions first, so that the last programs to run are short ones.
    work = lax.axis_index("work")
    turn = lax.div(work, group)
    tile = tiles - 1 - lax.rem(turn, tiles)
    region = order_ref[lax.div(turn, tiles)]
    row, kv_head = lax.div(region, num_kv_heads), lax.rem(region, num_kv_heads)
    block = lax.div(tile * TILE, block_size)
    prefix = prefixes_ref[row, kv_head, block]
    edge_tile = lax.div(jnp.maximum(block * block_size - window, 0), TILE)
    full_tiles, tail = lax.div(prefix, TILE), lax.rem(prefix, TILE)
    length = lengths_ref[row, kv_head]
    alive = tile * TILE < length
    masked_steps = jnp.where(alive, jnp.where(tail > 0, 2, 1), 0)
    return _Work(
        row=row,
        head=kv_head * group + lax.rem(work, group),
        kv_head=kv_head,
        tile=tile,
        length=length,
        offset=offsets_ref[row, kv_head],
        full_tiles=full_tiles,
        tail=tail,
        edge_tile=edge_tile,
        masked_steps=masked_steps,
        steps=jnp.where(alive, masked_steps + full_tiles + tile - edge_tile, 0),
    )


def _program(refs: Any, scoped: Any, *, block_size: int, window: int, stages: int) -> None:
    work = _find_work(refs, block_size=block_size, window=window)
    warpgroup = lax.axis_index("wg")
    pl.when(warpgroup < _WARPGROUPS)(lambda: _compute(refs, scoped, work, warpgroup, stages))
    pl.when(warpgroup == _WARPGROUPS)(lambda: _move(refs, scoped, work, stages))


def _move(refs: Any, scoped: Any, work: _Work, stages: int) -> None:
    """The memory warpgroup: fills the next free slot as soon as both compute warpgroups have read it."""
    _, k_ref, v_ref, k_pool_ref, v_pool_ref, *_ = refs
    (_, k_smem, v_smem), (_, k_ready, v_ready), (k_read, v_read), _ = scoped
    plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

    def fetch(step: Any, k_tile: Any, v_tile: Any) -> None:
        slot = lax.rem(step, jnp.int32(stages))
        reused = step >= stages
        pl.when(reused)(lambda: plgpu.barrier_wait(k_read.at[slot]))
        plgpu.copy_gmem_to_smem(k_tile, k_smem.at[slot], k_ready.at[slot])
        pl.when(reused)(lambda: plgpu.barrier_wait(v_read.at[slot]))
        plgpu.copy_gmem_to_smem(v_tile, v_smem.at[slot], v_ready.at[slot])

    def fetch_pool(step: Any, tile: Any) -> None:
        index = aligned(work.offset + tile * TILE, TILE)  # regions start on multiples of 128
        fetch(step, k_pool_ref.at[index], v_pool_ref.at[index])

    def fetch_prompt(step: Any, tile: Any) -> None:
        index = (work.row, aligned(tile * TILE, TILE), work.kv_head)
        fetch(step, k_ref.at[index], v_ref.at[index])

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        fetch_prompt(jnp.int32(0), work.tile)
        pl.when(work.tail > 0)(lambda: fetch_pool(jnp.int32(1), work.full_tiles))
        pl.loop(0, work.full_tiles)(lambda i: fetch_pool(work.masked_steps + i, i))
        unmasked = work.masked_steps + work.full_tiles
        window_tiles = work.tile - work.edge_tile
        pl.loop(0, window_tiles)(lambda i: fetch_prompt(unmasked + i, work.edge_tile + i))


def _compute(refs: Any, scoped: Any, work: _Work, warpgroup: Any, stages: int) -> None:
    """A compute warpgroup: online softmax of its 64 rows over all tiles."""
    q_ref, out_ref = refs[0], refs[-1]
    (qo_smem, _, _), (q_ready, k_ready, _), _, turns = scoped
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    head_dim = q_ref.shape[3]
    first_row = pl.multiple_of(work.tile * TILE + warpgroup * ROWS, ROWS)
    place = (work.row, pl.ds(first_row, ROWS), work.head)
    qo = qo_smem.at[warpgroup]
    plgpu.copy_gmem_to_smem(q_ref.at[place], qo, q_ready.at[warpgroup])
    plgpu.barrier_wait(q_ready.at[warpgroup])

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
    )
    pl.when(work.steps > 0)(lambda: plgpu.barrier_wait(k_ready.at[0]))
    pl.when(warpgroup == 1)(lambda: wait_turn(turns))
    step = functools.partial(attend_tile, qo, scoped, work.steps, stages)
    mask = functools.partial(_mask, work, warpgroup)
    carry = lax.fori_loop(0, work.masked_steps, functools.partial(step, mask=mask), carry)
    out, _, weight = lax.fori_loop(work.masked_steps, work.steps, functools.partial(step, mask=None), carry)
    pl.when(warpgroup == 0)(lambda: wait_turn(turns))

    rows = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=plgpu.Layout.WGMMA)
    out = jnp.where(rows + first_row < work.length, out / lax.broadcast_in_dim(weight, out.shape, [0]), 0.0)
    qo[...] = out.astype(q_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(qo, out_ref.at[place])
    plgpu.wait_smem_to_gmem(0)


def _mask(work: _Work, warpgroup: Any, step: Any, scores: Any) -> Any:
    """Step 0 is the diagonal tile (column <= row), step 1 the region's last tile (column < tail)."""
    rows, columns = iotas(scores.shape)
    diagonal = (step == 0).astype(jnp.int32)
    bound = jnp.where(step == 0, warpgroup * ROWS + 1, work.tail)
    return jnp.where(columns < rows * diagonal + bound, scores, -jnp.inf)
