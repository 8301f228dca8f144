"""Calls of attention kernels on Pallas Mosaic GPU: warpgroups, tiles in shared memory, the online softmax (Hopper).

Two compute warpgroups own 64 query rows each; one memory warpgroup streams 128-token tiles of K and V. The warpgroups
take turns (FlashAttention-3, arXiv 2407.08608): while one computes its softmax, the other has the tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.kernel_math import LOG2E

ROWS = 64  # query rows of a warpgroup: one wgmma tile
TILE = 128  # query rows of a program, and tokens of a K or V tile
_WARPGROUPS = 2  # that compute; one more moves memory
_STAGES = 2  # K and V tiles in flight; each takes 512 d bytes of shared memory
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40


def check_supported(operation: str, dtype: Any, head_dim: int, block_size: int) -> None:
    """Raises NotImplementedError for unsupported calls, so that backend "auto" moves on."""
    takes = dtype in (jnp.bfloat16, jnp.float16) and block_size % TILE == 0 and head_dim in (64, 128)
    allowed = f"bfloat16 and float16, d 64 or 128 and block_size a multiple of {TILE}"
    given = f"{dtype}, d = {head_dim} and block_size = {block_size}"
    require(takes, f"{operation} on mosaic takes {allowed}, not {given}", Unsupported)


def mosaic_call(
    find_work: Callable[[Any], Any],
    compute: Callable[..., None],
    move: Callable[..., None],
    operands: tuple[Array, ...],
    *,
    name: str,
    biased: bool = False,  # whether some tiles have a bias for each key
) -> Array:
    """Runs one program per query tile and head; the output has the shape of the queries, the first operand.

    `find_work` maps the refs to the program's work. `compute` runs in each compute warpgroup with the refs, the shared
    memory, the work and the warpgroup's number; `move` runs in the memory warpgroup without the number.
    """

    def program(refs: Any, scoped: Any) -> None:
        work, warpgroup = find_work(refs), lax.axis_index("wg")
        pl.when(warpgroup < _WARPGROUPS)(lambda: compute(refs, scoped, work, warpgroup))
        pl.when(warpgroup == _WARPGROUPS)(lambda: move(refs, scoped, work))

    def entry(*refs: Any) -> None:
        tile, head_dim = swizzled(refs[0].dtype), refs[0].shape[3]
        pl.run_scoped(
            lambda *scoped: program(refs, scoped),
            (tile((_WARPGROUPS, ROWS, head_dim)), *(tile((_STAGES, TILE, head_dim)),) * 2),
            (plgpu.Barrier(num_barriers=_WARPGROUPS), *(plgpu.Barrier(num_barriers=_STAGES),) * 2),
            (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),) * 2,
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
            (plgpu.SMEM((_STAGES, TILE), jnp.float32), plgpu.Barrier(num_barriers=_STAGES)) if biased else (),
            collective_axes="wg",
        )

    batch, length, heads, _ = operands[0].shape
    out: Array = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        grid=(batch * heads * (length // TILE),),
        grid_names=("work",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
    return out


def start_moving() -> None:
    """Gives registers of the memory warpgroup to the others."""
    plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")


def fetch(scoped: Any, step: Any, k_tile: Any, v_tile: Any, bias_tile: Any = None) -> None:
    """Fills the next free slot of K and V as soon as both compute warpgroups have read it."""
    (_, k_smem, v_smem), (_, k_ready, v_ready), (k_read, v_read), _, biases = scoped
    slot = lax.rem(step, jnp.int32(_STAGES))
    reused = step >= _STAGES
    pl.when(reused)(lambda: plgpu.barrier_wait(k_read.at[slot]))
    plgpu.copy_gmem_to_smem(k_tile, k_smem.at[slot], k_ready.at[slot])
    if bias_tile is not None:  # read with K, before K's slot is free
        bias_smem, bias_ready = biases
        plgpu.copy_gmem_to_smem(bias_tile, bias_smem.at[slot], bias_ready.at[slot])
    pl.when(reused)(lambda: plgpu.barrier_wait(v_read.at[slot]))
    plgpu.copy_gmem_to_smem(v_tile, v_smem.at[slot], v_ready.at[slot])


def attend(
    refs: Any,
    scoped: Any,
    work: Any,
    warpgroup: Any,
    *,
    first: Any,
    mask: Callable[[Any, Any, Any], Any],
) -> None:
    """A compute warpgroup: online softmax of its 64 rows over all tiles.

    `work` has the `row`, `head` and `length` of the queries, and the number of `steps`: first the `masked_steps`, last,
    in calls with biases, the `biased_steps`. `first` is the query tile's first row. `mask` takes the warpgroup's
    first row, the step and the scores, and gives those that count.
    """
    q_ref, out_ref = refs[0], refs[-1]
    (qo_smem, _, _), (q_ready, k_ready, _), _, turns, biases = scoped
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    head_dim = q_ref.shape[3]
    first_row = pl.multiple_of(first + warpgroup * ROWS, ROWS)
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
    step = partial(attend_tile, qo, scoped, work.steps)
    carry = lax.fori_loop(0, work.masked_steps, partial(step, mask=partial(mask, first_row)), carry)
    plain_end = work.steps - work.biased_steps if biases else work.steps
    carry = lax.fori_loop(work.masked_steps, plain_end, step, carry)
    if biases:
        carry = lax.fori_loop(plain_end, work.steps, partial(step, biased=True), carry)
    out, _, weight = carry
    pl.when(warpgroup == 0)(lambda: wait_turn(turns))

    rows = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=plgpu.Layout.WGMMA)
    out = jnp.where(rows + first_row < work.length, out / lax.broadcast_in_dim(weight, out.shape, [0]), 0.0)
    qo[...] = out.astype(q_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(qo, out_ref.at[place])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def wait_turn(turns: Any) -> None:
    """Until the other warpgroup has given up the tensor cores."""
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)


def attend_tile(
    q_smem: Any,
    scoped: Any,
    steps: Any,
    step: Any,
    carry: tuple[Any, Any, Any],
    *,
    mask: Callable[[Any, Any], Any] | None = None,
    biased: bool = False,
) -> tuple[Any, Any, Any]:
    """Takes one tile of K and V through the online softmax; `carry` is output, peak (in powers of two) and weight.

    `scoped` has the shared memory of Q, K and V, the barriers on which these are ready, those on which K and V have
    been read, that of the warpgroups' turns, and shared memory and barriers of biases.
    """
    (_, k_smem, v_smem), (_, k_ready, v_ready), (k_read, v_read), turns, biases = scoped
    out, peak, weight = carry
    slot, next_slot = (lax.rem(n, jnp.int32(_STAGES)) for n in (step, step + 1))

    def multiply_qk(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, q_smem, transposed(k_smem.at[slot]))
        wait_turn(turns)

    scores: Any = plgpu.layout_cast(jnp.zeros((ROWS, TILE), jnp.float32), plgpu.Layout.WGMMA)
    if biased:
        bias_smem, bias_ready = biases
        plgpu.barrier_wait(bias_ready.at[slot])
        bias = plgpu.layout_cast(bias_smem[slot], plgpu.Layout.WGMMA.reduce(0))
        scores = lax.broadcast_in_dim(bias, scores.shape, [1])
    scores = pl.run_state(multiply_qk)(plgpu.ACC.init(scores))
    plgpu.barrier_arrive(k_read.at[slot])
    if mask is not None:
        scores = mask(step, scores)
    scale = LOG2E * q_smem.shape[-1] ** -0.5  # powers of two, so that scaling is part of a multiply-add
    new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
    decay = jnp.exp2(peak - new_peak)
    probabilities = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
    out *= lax.broadcast_in_dim(decay, out.shape, [0])
    weight = weight * decay + probabilities.sum(axis=1)
    operand = probabilities.astype(q_smem.dtype)
    # Nothing of the softmax may sink below the barriers: the other warpgroup has the tensor cores meanwhile.
    out, weight, new_peak, operand = lax.optimization_barrier((out, weight, new_peak, operand))
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(v_ready.at[slot])
    plgpu.barrier_wait(turns)

    def multiply_pv(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, operand, v_smem.at[slot])
        pl.when(step + 1 < steps)(lambda: plgpu.barrier_wait(k_ready.at[next_slot]))

    out = pl.run_state(multiply_pv)(plgpu.ACC.init(out))
    plgpu.barrier_arrive(v_read.at[slot])
    return out, new_peak, weight


def swizzled(dtype: Any) -> Callable[[tuple[int, ...]], Any]:
    """Shared memory of a shape, laid out as TMA fills it and wgmma reads it."""
    return partial(plgpu.SMEM, dtype=dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def query_tile(refs: Any, order_ref: Any) -> tuple[Any, Any, Any, Any]:
    """Row, KV head, query head and tile of a program.

    Heads of a group run side by side and regions one after another, since they share K and V in L2; the regions come in
    `order`, the one with most to do first, and within a region the last tiles, so that the last programs are short.
    """
    q_ref, k_ref = refs[:2]
    kv_heads, tiles = k_ref.shape[2], q_ref.shape[1] // TILE
    group, work = q_ref.shape[2] // kv_heads, lax.axis_index("work")
    turn = lax.div(work, group)
    region = order_ref[lax.div(turn, tiles)]
    row, kv_head = lax.div(region, kv_heads), lax.rem(region, kv_heads)
    return row, kv_head, kv_head * group + lax.rem(work, group), tiles - 1 - lax.rem(turn, tiles)


def aligned(first: Any, count: int) -> Any:
    """A slice that starts on a multiple of its size, which the compiler cannot know."""
    return pl.ds(pl.multiple_of(first, count), count)


def iotas(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Row and column of every place of a product."""
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=plgpu.Layout.WGMMA) for i in range(2))
    return rows, columns


def transposed(ref: Any) -> Any:
    """A tile as the transposed operand of a product."""
    # JAX 0.10 has only the function, 0.11 deprecates it for the method.
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))
