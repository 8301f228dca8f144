"""Prefill attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper).

Two compute warpgroups own 64 query rows each; one memory warpgroup streams 128-token tiles of K and V: first the
diagonal tile, then the last tile of the head's region in the pool, then the rest of the region, then the window. Only
the first two need a mask. Listed blocks and means come last, with a bias per key. The compute warpgroups take turns
(FlashAttention-3, arXiv 2407.08608): while one computes its softmax, the other has the tensor cores.
"""

from __future__ import annotations

import dataclasses
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
from tca_jax.pallas_kernels.kernel_math import LOG2E, lengths_by_head, prefix_schedule
from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.numerics import MASKED, varying_like
from tca_jax.pallas_kernels.prefill_attention import FarBlocks

_ROWS = 64  # query rows of a warpgroup: one wgmma tile
_TILE = 128  # query rows of a program, and tokens of a K or V tile
_WARPGROUPS = 2  # that compute; one more moves memory
_STAGES = 2  # K and V tiles in flight; each takes 512 d bytes of shared memory
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40


# Under a jit of its own, all layers of a program share one kernel. JAX 0.11 numbers Mosaic kernels as it lowers them,
# so two calls never lower to the same text, and each would take a second to compile.
@partial(jax.jit, static_argnames=("block_size", "window"))
@jax.named_scope("prefill_attention")
def prefill_attention(
    q: Array,
    k: Array,
    v: Array,
    pool: Pool,
    budgets: Array,
    lengths: Array,
    *,
    block_size: int,
    window: int,
    far: FarBlocks | None = None,
) -> Array:
    """See `prefill_attention.prefill_attention`. Values among the padding, and of all means, must be finite."""
    length, head_dim = q.shape[1], q.shape[3]
    takes = q.dtype in (jnp.bfloat16, jnp.float16) and block_size % _TILE == 0 and head_dim in (64, 128)
    allowed = f"bfloat16 and float16, d 64 or 128 and block_size a multiple of {_TILE}"
    given = f"{q.dtype}, d = {head_dim} and block_size = {block_size}"
    require(takes, f"prefill_attention on mosaic takes {allowed}, not {given}", Unsupported)
    padding = -length % block_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    far_work = 0.0 if far is None else far.work(block_size)
    prefixes, order = prefix_schedule(budgets, q.shape[1] // block_size, window // block_size, far_work)
    of_far = () if far is None else _far_operands(far, padding, head_dim)
    table = (pool.offsets, prefixes, lengths_by_head(lengths, k.shape[2]), order)
    out = _call_kernel((q, k, v, pool.k, pool.v, *table, *of_far), block_size, window, biased=far is not None)
    return varying_like(out[:, :length], q, k, v, pool, budgets, lengths, far)


def _far_operands(far: FarBlocks, padding: int, head_dim: int) -> tuple[Array, ...]:
    """Far blocks in the kernel's form: means and biases, in units of the products of q and k, fill full tiles."""
    blocks = far.counts.shape[-1]
    rest, counted = -blocks % _TILE, jnp.arange(blocks) < far.mean_counts[..., None]
    mean_k, mean_v = (jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) for x in (far.mean_k, far.mean_v))
    token_bias = jnp.pad(jnp.where(far.selected, jnp.float32(MASKED), 0), ((0, 0), (0, 0), (0, padding)))
    mean_bias = jnp.maximum(jnp.where(counted, far.mean_bias * head_dim**0.5, MASKED), MASKED)
    mean_bias = jnp.pad(mean_bias, ((0, 0), (0, 0), (0, 0), (0, rest)), constant_values=MASKED)
    return far.blocks, far.counts, mean_k, mean_v, far.mean_counts, token_bias, mean_bias


@dataclasses.dataclass(frozen=True)
class _Work:
    """One program's query tile of one head, and the K and V tiles that it reads, all traced int32 scalars.

    Steps run in this order: the diagonal tile, the region's last tile where only part of it counts (`tail` tokens),
    the region's `full_tiles`, the window's tiles from `edge_tile` to the diagonal, then the `biased_steps`, which are
    the `listed_tiles` of listed blocks, and means. No step for a tile past the length.
    """

    row: Any
    head: Any
    kv_head: Any
    tile: Any
    block: Any
    length: Any
    offset: Any
    full_tiles: Any
    tail: Any
    edge_tile: Any
    masked_steps: Any
    listed_tiles: Any
    biased_steps: Any
    steps: Any


def _find_work(refs: Any, block_size: int, window: int) -> _Work:
    _, _, _, _, _, offsets_ref, prefixes_ref, lengths_ref, order_ref, *far, _ = refs
    # Heads of a group run side by side and regions one after another, since they share K and V in L2. The regions with
    # most to do come first, and within a region the last tiles, so that the last programs are short.
    q_ref, k_ref = refs[:2]
    kv_heads, tiles = k_ref.shape[2], q_ref.shape[1] // _TILE
    group, work = q_ref.shape[2] // kv_heads, lax.axis_index("work")
    turn = lax.div(work, group)
    region = order_ref[lax.div(turn, tiles)]
    row, kv_head = lax.div(region, kv_heads), lax.rem(region, kv_heads)
    head, tile = kv_head * group + lax.rem(work, group), tiles - 1 - lax.rem(turn, tiles)
    block = lax.div(tile * _TILE, block_size)
    prefix = prefixes_ref[row, kv_head, block]
    edge_tile = lax.div(jnp.maximum(block * block_size - window, 0), _TILE)
    full_tiles, tail = lax.div(prefix, _TILE), lax.rem(prefix, _TILE)
    length = lengths_ref[row, kv_head]
    alive = tile * _TILE < length
    masked_steps = jnp.where(alive, jnp.where(tail > 0, 2, 1), 0)
    listed_tiles = biased_steps = jnp.int32(0)
    if far:
        _, counts_ref, _, _, mean_counts_ref, *_ = far
        listed_tiles = counts_ref[row, kv_head, block] * (block_size // _TILE)
        biased_steps = listed_tiles + lax.div(mean_counts_ref[row, kv_head, block] + _TILE - 1, _TILE)
    place = row, head, kv_head, tile, block, length, offsets_ref[row, kv_head]
    biased = jnp.where(alive, biased_steps, 0)
    steps = jnp.where(alive, masked_steps + full_tiles + tile - edge_tile + biased_steps, 0)
    return _Work(*place, full_tiles, tail, edge_tile, masked_steps, listed_tiles, biased, steps)


def _move(refs: Any, scoped: Any, work: _Work, block_size: int) -> None:
    """The memory warpgroup: fetches the tiles in the order of `_Work`."""
    _, k_ref, v_ref, k_pool_ref, v_pool_ref, _, _, _, _, *far, _ = refs
    plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")  # the others get them

    def fetch_pool(step: Any, tile: Any) -> None:
        index = _aligned(work.offset + tile * _TILE)  # regions start on multiples of 128
        _fetch(scoped, step, k_pool_ref.at[index], v_pool_ref.at[index])

    def fetch_prompt(step: Any, tile: Any, bias_ref: Any = None) -> None:
        tokens = _aligned(tile * _TILE)
        index = (work.row, tokens, work.kv_head)
        bias = None if bias_ref is None else bias_ref.at[work.row, work.kv_head, tokens]
        _fetch(scoped, step, k_ref.at[index], v_ref.at[index], bias)

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        fetch_prompt(jnp.int32(0), work.tile)
        pl.when(work.tail > 0)(lambda: fetch_pool(jnp.int32(1), work.full_tiles))
        pl.loop(0, work.full_tiles)(lambda i: fetch_pool(work.masked_steps + i, i))
        unmasked = work.masked_steps + work.full_tiles
        window_tiles = work.tile - work.edge_tile
        pl.loop(0, window_tiles)(lambda i: fetch_prompt(unmasked + i, work.edge_tile + i))
        if not far:
            return
        blocks_ref, _, mean_k_ref, mean_v_ref, _, token_bias_ref, mean_bias_ref = far
        begin, parts = work.steps - work.biased_steps, block_size // _TILE

        def listed(i: Any) -> Any:
            first = blocks_ref[work.row, work.kv_head, work.block, lax.div(i, jnp.int32(parts))]
            return lax.div(first, jnp.int32(_TILE)) + lax.rem(i, jnp.int32(parts))

        def fetch_listed(i: Any, tile: Any) -> Any:
            following = listed(jnp.minimum(i + 1, work.listed_tiles - 1))  # read before this tile waits for its slot
            fetch_prompt(begin + i, tile, token_bias_ref)
            return following

        @pl.when(work.listed_tiles > 0)
        def fetch_blocks() -> None:
            lax.fori_loop(0, work.listed_tiles, fetch_listed, listed(jnp.int32(0)))

        @pl.loop(0, work.biased_steps - work.listed_tiles)
        def fetch_means(i: Any) -> None:
            index = (work.row, _aligned(i * _TILE), work.kv_head)
            bias = mean_bias_ref.at[work.row, work.kv_head, work.block, index[1]]
            step = begin + work.listed_tiles + i
            _fetch(scoped, step, mean_k_ref.at[index], mean_v_ref.at[index], bias)


def _mask(work: _Work, warpgroup: Any, step: Any, scores: Any) -> Any:
    """Step 0 is the diagonal tile (column <= row), step 1 the region's last tile (column < tail)."""
    layout = plgpu.Layout.WGMMA
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=layout) for axis in range(2))
    diagonal = (step == 0).astype(jnp.int32)
    bound = jnp.where(step == 0, warpgroup * _ROWS + 1, work.tail)
    return jnp.where(columns < rows * diagonal + bound, scores, -jnp.inf)


def _call_kernel(operands: tuple[Array, ...], block_size: int, window: int, *, biased: bool) -> Array:
    """Runs one program per query tile and head; `biased`: some tiles have a bias for each key."""

    def program(refs: Any, scoped: Any) -> None:
        work, warpgroup = _find_work(refs, block_size, window), lax.axis_index("wg")
        pl.when(warpgroup < _WARPGROUPS)(lambda: _attend(refs, scoped, work, warpgroup))
        pl.when(warpgroup == _WARPGROUPS)(lambda: _move(refs, scoped, work, block_size))

    def entry(*refs: Any) -> None:
        head_dim = refs[0].shape[3]
        swizzle = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # as TMA fills it and wgmma reads it
        tile = partial(plgpu.SMEM, dtype=refs[0].dtype, transforms=swizzle)
        pl.run_scoped(
            lambda *scoped: program(refs, scoped),
            (tile((_WARPGROUPS, _ROWS, head_dim)), *(tile((_STAGES, _TILE, head_dim)),) * 2),
            (plgpu.Barrier(num_barriers=_WARPGROUPS), *(plgpu.Barrier(num_barriers=_STAGES),) * 2),
            (plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),) * 2,
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
            (plgpu.SMEM((_STAGES, _TILE), jnp.float32), plgpu.Barrier(num_barriers=_STAGES)) if biased else (),
            collective_axes="wg",
        )

    batch, length, heads, _ = operands[0].shape
    out: Array = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),
        grid=(batch * heads * (length // _TILE),),
        grid_names=("work",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="prefill_attention_kernel",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
    return out


def _fetch(scoped: Any, step: Any, k_tile: Any, v_tile: Any, bias_tile: Any = None) -> None:
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


def _attend(refs: Any, scoped: Any, work: _Work, warpgroup: Any) -> None:
    """A compute warpgroup: online softmax of its 64 rows over all tiles."""
    q_ref, out_ref = refs[0], refs[-1]
    (qo_smem, _, _), (q_ready, k_ready, _), _, turns, biases = scoped
    head_dim, first = q_ref.shape[3], work.tile * _TILE
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    first_row = pl.multiple_of(first + warpgroup * _ROWS, _ROWS)
    place = (work.row, pl.ds(first_row, _ROWS), work.head)
    qo = qo_smem.at[warpgroup]
    plgpu.copy_gmem_to_smem(q_ref.at[place], qo, q_ready.at[warpgroup])
    plgpu.barrier_wait(q_ready.at[warpgroup])

    by_row = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        plgpu.layout_cast(jnp.zeros((_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((_ROWS,), -jnp.inf, jnp.float32), by_row),
        plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), by_row),
    )
    pl.when(work.steps > 0)(lambda: plgpu.barrier_wait(k_ready.at[0]))
    pl.when(warpgroup == 1)(lambda: _wait_turn(turns))
    step = partial(_attend_tile, qo, scoped, work.steps)
    carry = lax.fori_loop(0, work.masked_steps, partial(step, mask=partial(_mask, work, warpgroup)), carry)
    plain_end = work.steps - work.biased_steps if biases else work.steps
    carry = lax.fori_loop(work.masked_steps, plain_end, step, carry)
    if biases:
        carry = lax.fori_loop(plain_end, work.steps, partial(step, biased=True), carry)
    out, _, weight = carry
    pl.when(warpgroup == 0)(lambda: _wait_turn(turns))

    rows = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=plgpu.Layout.WGMMA)
    out = jnp.where(rows + first_row < work.length, out / lax.broadcast_in_dim(weight, out.shape, [0]), 0.0)
    qo[...] = out.astype(q_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(qo, out_ref.at[place])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _wait_turn(turns: Any) -> None:
    """Until the other warpgroup has given up the tensor cores."""
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)


def _attend_tile(
    q_smem: Any,
    scoped: Any,
    steps: Any,
    step: Any,
    carry: tuple[Any, Any, Any],
    *,
    mask: Callable[[Any, Any], Any] | None = None,
    biased: bool = False,
) -> tuple[Any, Any, Any]:
    """Takes one tile of K and V through the online softmax; `carry` is output, peak (in powers of two) and weight."""
    (_, k_smem, v_smem), (_, k_ready, v_ready), (k_read, v_read), turns, biases = scoped
    out, peak, weight = carry
    slot, next_slot = (lax.rem(n, jnp.int32(_STAGES)) for n in (step, step + 1))

    def multiply_qk(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, q_smem, _transposed(k_smem.at[slot]))
        _wait_turn(turns)

    scores: Any = plgpu.layout_cast(jnp.zeros((_ROWS, _TILE), jnp.float32), plgpu.Layout.WGMMA)
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


def _aligned(first: Any) -> Any:
    """A tile's slice: it starts on a multiple of its size, which the compiler cannot know."""
    return pl.ds(pl.multiple_of(first, _TILE), _TILE)


def _transposed(ref: Any) -> Any:
    """A tile as the transposed operand of a product."""
    # JAX 0.10 has only the function, 0.11 deprecates it for the method.
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))
