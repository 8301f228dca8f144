"""Block-sparse attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper), over aligned blocks.

Two compute warpgroups own 64 query rows each; one memory warpgroup streams 128-token tiles of K and V, those of the
nearest blocks first. Only blocks within the query tile need a mask, so one unmasked loop does nearly all the work. The
warpgroups take turns, as in `prefill_attention.mosaic`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tca_jax.errors import Unsupported
from tca_jax.pallas_kernels.block_sparse_attention.lists import BlockLists, Columns
from tca_jax.pallas_kernels.mosaic_softmax import ROWS, TILE, attend_tile, wait_turn
from tca_jax.pallas_kernels.mosaic_tiles import aligned as aligned_slice
from tca_jax.pallas_kernels.mosaic_tiles import iotas, swizzled
from tca_jax.pallas_kernels.numerics import varying_like

_WARPGROUPS = 2  # that compute; one more moves memory
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40
_LOWEST = -(2.0**96)  # where the largest score begins: finite, so that a row that sees nothing yet gives zeros, not NaN


@dataclasses.dataclass(frozen=True)
class MosaicBlockSparseConfig:
    """Tiling of the kernel.

    Attributes:
        stages: K and V tiles in flight; each takes 512 d bytes of shared memory.
    """

    stages: int = 2


# Under a jit of its own, all layers of a program share one kernel, as in `prefill_attention.mosaic`.
@functools.partial(jax.jit, static_argnames=("block_size", "tile_size", "aligned", "config"))
@jax.named_scope("block_sparse_attention")
def block_sparse_attention(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    blocks: BlockLists,
    lengths: Int[Array, " B"],
    *,
    columns: Columns | None = None,
    block_size: int,
    tile_size: int,
    aligned: bool = False,
    config: MosaicBlockSparseConfig | None = None,
) -> Float[Array, "B L Hq d"]:
    """See `block_sparse_attention.block_sparse_attention`. Values among the padding must be finite.

    Raises:
        NotImplementedError: there are columns, blocks that are not aligned, or other types or sizes than it takes.
    """
    batch, length, heads, head_dim = q.shape
    config = config or MosaicBlockSparseConfig()
    if columns is not None or not aligned:
        raise Unsupported("block_sparse_attention on mosaic takes aligned blocks, and no columns")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"block_sparse_attention on mosaic takes bfloat16 and float16, not {q.dtype}")
    if block_size % TILE or head_dim not in (64, 128):
        raise Unsupported(
            f"block_sparse_attention on mosaic takes d 64 or 128 and block_size a multiple of {TILE}, "
            f"not d = {head_dim} and block_size = {block_size}"
        )
    padding = -length % tile_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    work = blocks.counts.reshape(batch * k.shape[2], -1).sum(axis=-1)
    order = jnp.argsort(-work).astype(jnp.int32)
    out = plgpu.kernel(
        functools.partial(_entry, block_size=block_size, tile_size=tile_size, config=config),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(batch * heads * (q.shape[1] // TILE),),
        grid_names=("work",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="block_sparse_attention_kernel",  # what profiles show
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, blocks.distances, blocks.counts, lengths, order)
    return varying_like(out[:, :length], q, k, v, blocks, lengths)


def _entry(*refs: Any, block_size: int, tile_size: int, config: MosaicBlockSparseConfig) -> None:
    """Allocates the shared memory and barriers of a program."""
    dtype, head_dim = refs[0].dtype, refs[0].shape[3]
    tile = swizzled(dtype)
    pl.run_scoped(
        lambda *scoped: _program(refs, scoped, block_size=block_size, tile_size=tile_size, stages=config.stages),
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
    """One program's query rows of one head, and the K and V tiles that it reads, all traced int32 scalars.

    Step i takes part i % parts of block i // parts of the list; the first `masked_steps` need a mask.
    """

    row: Any
    head: Any
    kv_head: Any
    tile: Any
    first_row: Any
    end: Any
    length: Any
    masked_steps: Any
    steps: Any


def _find_work(refs: Any, *, block_size: int, tile_size: int) -> _Work:
    q_ref, k_ref, _, _, counts_ref, lengths_ref, order_ref, _ = refs
    num_kv_heads = k_ref.shape[2]
    group, programs = q_ref.shape[2] // num_kv_heads, q_ref.shape[1] // TILE
    # Heads of a group run side by side and regions one after another, since they share K and V in L2; within a region
    # the last tiles, which can see most, come first.
    work = lax.axis_index("work")
    turn = lax.div(work, group)
    first_row = (programs - 1 - lax.rem(turn, programs)) * TILE
    region = order_ref[lax.div(turn, programs)]
    row, kv_head = lax.div(region, num_kv_heads), lax.rem(region, num_kv_heads)
    head, tile = kv_head * group + lax.rem(work, group), lax.div(first_row, tile_size)
    length = lengths_ref[row]
    count = jnp.where(first_row < length, counts_ref[row, head, tile], 0)
    parts = block_size // TILE
    return _Work(
        row=row,
        head=head,
        kv_head=kv_head,
        tile=tile,
        first_row=first_row,
        end=(tile + 1) * tile_size,
        length=length,
        # Aligned blocks lie within the query tile or left of it: at most m / b, the nearest, are within.
        masked_steps=jnp.minimum(count, tile_size // block_size) * parts,
        steps=count * parts,
    )


def _begin(refs: Any, work: _Work, step: Any, block_size: int) -> Any:
    """First token of a step's tile of K and V."""
    distances_ref, parts = refs[3], block_size // TILE
    listed = work.tile if distances_ref.shape[2] > 1 else 0
    distance = distances_ref[work.row, work.head, listed, lax.div(step, jnp.int32(parts))]
    return work.end - distance + lax.rem(step, jnp.int32(parts)) * TILE


def _program(refs: Any, scoped: Any, *, block_size: int, tile_size: int, stages: int) -> None:
    work = _find_work(refs, block_size=block_size, tile_size=tile_size)
    begin = functools.partial(_begin, refs, work, block_size=block_size)
    warpgroup = lax.axis_index("wg")
    pl.when(warpgroup < _WARPGROUPS)(lambda: _compute(refs, scoped, work, begin, warpgroup, stages))
    pl.when(warpgroup == _WARPGROUPS)(lambda: _move(refs, scoped, work, begin, stages))


def _move(refs: Any, scoped: Any, work: _Work, begin: Callable[..., Any], stages: int) -> None:
    """The memory warpgroup: fills the next free slot as soon as both compute warpgroups have read it."""
    _, k_ref, v_ref, *_ = refs
    (_, k_smem, v_smem), (_, k_ready, v_ready), (k_read, v_read), _ = scoped
    plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

    def fetch(step: Any, first: Any) -> Any:
        # Where the next tile begins is read before this one waits for its slot.
        following = begin(jnp.minimum(step + 1, work.steps - 1))
        slot = lax.rem(step, jnp.int32(stages))
        reused = step >= stages
        place = (work.row, aligned_slice(first, TILE), work.kv_head)
        pl.when(reused)(lambda: plgpu.barrier_wait(k_read.at[slot]))
        plgpu.copy_gmem_to_smem(k_ref.at[place], k_smem.at[slot], k_ready.at[slot])
        pl.when(reused)(lambda: plgpu.barrier_wait(v_read.at[slot]))
        plgpu.copy_gmem_to_smem(v_ref.at[place], v_smem.at[slot], v_ready.at[slot])
        return following

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        lax.fori_loop(0, work.steps, fetch, begin(jnp.int32(0)))


def _compute(refs: Any, scoped: Any, work: _Work, begin: Callable[..., Any], warpgroup: Any, stages: int) -> None:
    """A compute warpgroup: online softmax of its 64 rows over all tiles."""
    q_ref, out_ref = refs[0], refs[-1]
    (qo_smem, _, _), (q_ready, k_ready, _), _, turns = scoped
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    head_dim = q_ref.shape[3]
    first_row = pl.multiple_of(work.first_row + warpgroup * ROWS, ROWS)
    place = (work.row, pl.ds(first_row, ROWS), work.head)
    qo = qo_smem.at[warpgroup]
    plgpu.copy_gmem_to_smem(q_ref.at[place], qo, q_ready.at[warpgroup])
    plgpu.barrier_wait(q_ready.at[warpgroup])

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
    )
    pl.when(work.steps > 0)(lambda: plgpu.barrier_wait(k_ready.at[0]))
    pl.when(warpgroup == 1)(lambda: wait_turn(turns))

    def mask(step: Any, scores: Any) -> Any:
        rows, columns = iotas(scores.shape)
        return jnp.where(columns <= rows + (first_row - begin(step)), scores, -jnp.inf)

    step = functools.partial(attend_tile, qo, scoped, work.steps, stages)
    carry = lax.fori_loop(0, work.masked_steps, functools.partial(step, mask=mask), carry)
    out, _, weight = lax.fori_loop(work.masked_steps, work.steps, functools.partial(step, mask=None), carry)
    pl.when(warpgroup == 0)(lambda: wait_turn(turns))

    rows = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=plgpu.Layout.WGMMA)
    out /= lax.broadcast_in_dim(jnp.where(weight > 0, weight, 1.0), out.shape, [0])
    out = jnp.where(rows + first_row < work.length, out, 0.0)
    qo[...] = out.astype(q_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(qo, out_ref.at[place])
    plgpu.wait_smem_to_gmem(0)
