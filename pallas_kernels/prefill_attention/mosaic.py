"""Prefill attention on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper).

Two compute warpgroups own 64 query rows each; one memory warpgroup streams 128-token tiles of K and V: first the
diagonal tile, then the last tile of the head's region in the pool, then the rest of the region, then the window. Only
the first two need a mask. Listed blocks and means come last, with a bias per key. Programs of two heads that share K
and V fetch a half of each tile for both: power limits long prompts, so what moves less data is faster. A `Softmax` does
the arithmetic: that of 16 bits is here, that of eight in mosaic_fp8.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

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

ROWS = 64  # query rows of a warpgroup: one wgmma tile
TILE = 128  # query rows of a program, and tokens of a K or V tile
_WARPGROUPS = 2  # that compute; one more moves memory
ONES = 8  # rows of ones below values in eight bits, whose product sums probabilities: as few as a product takes
SCALES = 32  # copies of a tile's scale in eight bits: TMA writes 128 bytes of shared memory
_STAGES = 2  # K and V tiles in flight; each takes 512 d bytes of shared memory
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40
_IS_NEW = jax.__version_info__ >= (0, 11)  # deprecates functions and arguments that 0.10 needs


class Far(NamedTuple):
    """Far blocks; arrays, or refs within the kernel. Means and biases fill full tiles."""

    blocks: Any
    counts: Any
    mean_k: Any  # [B, N, Hkv, d]
    mean_v: Any
    mean_counts: Any
    token_bias: Any  # [B, Hkv, L], what products are added to
    mean_bias: Any  # [B, Hkv, N, N], in the units of `Softmax.scores`


class Operands(NamedTuple):
    """Inputs of the kernel; arrays, or refs within it. In eight bits values have their tokens last."""

    q: Any  # [B, L, Hq, d]
    k: Any  # [B, L, Hkv, d]
    v: Any
    pool_k: Any  # [P, d]
    pool_v: Any
    offsets: Any
    prefixes: Any
    lengths: Any  # [B, Hkv]
    order: Any
    far: Far | None
    rounding: Any = None  # scales of eight bits

    @property
    def pair(self) -> tuple[str, ...]:
        """The axis of two programs whose query heads share K and V: each fetches a half of a tile for both."""
        return () if self.q.shape[2] // self.k.shape[2] % 2 else ("pair",)


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
    sizes: Any = {"block_size": block_size, "window": window}
    operands = kernel_operands(q, k, v, pool, budgets, lengths, far, unit=q.shape[3] ** 0.5, **sizes)
    out = call_kernel(operands, Softmax, q.dtype, **sizes)
    return varying_like(out[:, : q.shape[1]], q, k, v, pool, budgets, lengths, far)


def kernel_operands(
    q: Array,
    k: Array,
    v: Array,
    pool: Pool,
    budgets: Array,
    lengths: Array,
    far: FarBlocks | None,
    *,
    unit: float,  # of the kernel's scores, in one of the logits
    base: float = 0.0,  # that they are added to
    block_size: int,
    window: int,
    backend: str = "mosaic",
) -> Operands:
    """The operands in 16 bits. NotImplementedError for a call that the kernel does not take; `backend` names it."""
    length, head_dim = q.shape[1], q.shape[3]
    takes = q.dtype in (jnp.bfloat16, jnp.float16) and block_size % TILE == 0 and head_dim in (64, 128)
    allowed = f"bfloat16 and float16, d 64 or 128 and block_size a multiple of {TILE}"
    given = f"{q.dtype}, d = {head_dim} and block_size = {block_size}"
    remedy = "use another backend, or no attention='fp8'"
    require(takes, f"prefill_attention on {backend} takes {allowed}, not {given}; {remedy}", Unsupported)
    padding = -length % block_size
    if padding:
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    far_work = 0.0 if far is None else far.work(block_size)
    prefixes, order = prefix_schedule(budgets, q.shape[1] // block_size, window // block_size, far_work)
    table = (pool.offsets, prefixes, lengths_by_head(lengths, k.shape[2]), order)
    return Operands(q, k, v, pool.k, pool.v, *table, None if far is None else _far_operands(far, padding, unit, base))


def _far_operands(far: FarBlocks, padding: int, unit: float, base: float) -> Far:
    blocks = far.counts.shape[-1]
    rest, counted = -blocks % TILE, jnp.arange(blocks) < far.mean_counts[..., None]
    mean_k, mean_v = (jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))) for x in (far.mean_k, far.mean_v))
    token_bias = jnp.pad(jnp.where(far.selected, MASKED, jnp.float32(base)), ((0, 0), (0, 0), (0, padding)))
    mean_bias = jnp.maximum(jnp.where(counted, far.mean_bias * unit, MASKED), MASKED)
    mean_bias = jnp.pad(mean_bias, ((0, 0), (0, 0), (0, 0), (0, rest)), constant_values=MASKED)
    return Far(far.blocks, far.counts, mean_k, mean_v, far.mean_counts, token_bias, mean_bias)


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


def _find_work(refs: Operands, block_size: int, window: int) -> _Work:
    # Heads of a group run side by side and regions one after another, since they share K and V in L2. The regions with
    # most to do come first, and within a region the last tiles, so that the last programs are short.
    kv_heads, tiles = refs.k.shape[2], refs.q.shape[1] // TILE
    group, work = refs.q.shape[2] // kv_heads, lax.axis_index("work")
    if refs.pair:
        work = 2 * work + lax.axis_index("pair")
    turn = lax.div(work, group)
    region = refs.order[lax.div(turn, tiles)]
    row, kv_head = lax.div(region, kv_heads), lax.rem(region, kv_heads)
    head, tile = kv_head * group + lax.rem(work, group), tiles - 1 - lax.rem(turn, tiles)
    block = lax.div(tile * TILE, block_size)
    prefix = refs.prefixes[row, kv_head, block]
    edge_tile = lax.div(jnp.maximum(block * block_size - window, 0), TILE)
    full_tiles, tail = lax.div(prefix, TILE), lax.rem(prefix, TILE)
    length = refs.lengths[row, kv_head]
    alive = tile * TILE < length
    masked_steps = jnp.where(alive, jnp.where(tail > 0, 2, 1), 0)
    listed_tiles = biased_steps = jnp.int32(0)
    if refs.far is not None:
        listed_tiles = jnp.where(alive, refs.far.counts[row, kv_head, block] * (block_size // TILE), 0)
        means = jnp.where(alive, refs.far.mean_counts[row, kv_head, block], 0)
        biased_steps = listed_tiles + lax.div(means + TILE - 1, TILE)
    place = row, head, kv_head, tile, block, length, refs.offsets[row, kv_head]
    steps = biased_steps + jnp.where(alive, masked_steps + full_tiles + tile - edge_tile, 0)
    return _Work(*place, full_tiles, tail, edge_tile, masked_steps, listed_tiles, biased_steps, steps)


class _Scoped(NamedTuple):
    """Shared memory and barriers of a program."""

    q: Any  # [warpgroups, ROWS, d]
    out: Any
    k: Any  # [stages, TILE, d]
    v: Any  # in eight bits `[stages, d + 8, TILE]`, the last rows are ones
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_read: Any
    v_read: Any
    turns: Any
    done: Any = None  # of pairs
    bias: Any = None  # [stages, TILE], of tiles that have one
    bias_ready: Any = None
    key_scales: Any = None  # [stages, SCALES], in eight bits
    ones_ready: Any = None


def _move(refs: Operands, scoped: _Scoped, work: _Work, block_size: int) -> None:
    """The memory warpgroup: fetches the tiles in the order of `_Work`."""
    far, rounding, head = refs.far, refs.rounding, (work.row, work.kv_head)
    plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")  # the others get them
    if rounding is not None:
        for slot in range(_STAGES):
            place = scoped.v.at[slot, pl.ds(refs.q.shape[3], ONES)]
            plgpu.copy_gmem_to_smem(rounding.ones, place, scoped.ones_ready)

    def fetch(step: Any, keys: Any, values: Any, scales: Any, place: tuple[Any, ...], tile: Any, bias: Any) -> None:
        """Fills the next free slot of K and V as soon as all compute warpgroups have read it."""
        tokens, slot, reused = _aligned(tile * TILE), lax.rem(step, jnp.int32(_STAGES)), step >= _STAGES
        rows, copy = (*place[:1], tokens, *place[1:]), plgpu.copy_gmem_to_smem
        pl.when(reused)(lambda: plgpu.barrier_wait(scoped.k_read.at[slot]))
        copy(keys.at[rows], scoped.k.at[slot], scoped.k_ready.at[slot], collective_axes=refs.pair or None)
        if rounding is not None:
            copy(scales.at[(*place, tile)], scoped.key_scales.at[slot], scoped.k_ready.at[slot])
        if bias is not None:  # read before K's slot is given back
            copy(bias, scoped.bias.at[slot], scoped.bias_ready.at[slot])
        pl.when(reused)(lambda: plgpu.barrier_wait(scoped.v_read.at[slot]))
        v_tile = values.at[rows if rounding is None else (*place, slice(None), tokens)]
        v_slot = scoped.v.at[slot, pl.ds(0, v_tile.shape[0])]  # in eight bits ones follow
        copy(v_tile, v_slot, scoped.v_ready.at[slot], collective_axes=refs.pair or None)

    def fetch_pool(step: Any, tile: Any) -> None:
        first = lax.div(work.offset, jnp.int32(TILE))  # regions start on multiples of 128
        fetch(step, refs.pool_k, refs.pool_v, rounding and rounding.pool, (), first + tile, None)

    def fetch_prompt(step: Any, tile: Any, bias_ref: Any = None) -> None:
        bias = None if bias_ref is None else bias_ref.at[(*head, _aligned(tile * TILE))]
        fetch(step, refs.k, refs.v, rounding and rounding.keys, head, tile, bias)

    @pl.when(work.steps > 0)
    def fetch_all() -> None:
        fetch_prompt(jnp.int32(0), work.tile)
        pl.when(work.tail > 0)(lambda: fetch_pool(jnp.int32(1), work.full_tiles))
        pl.loop(0, work.full_tiles)(lambda i: fetch_pool(work.masked_steps + i, i))
        unmasked = work.masked_steps + work.full_tiles
        window_tiles = work.tile - work.edge_tile
        pl.loop(0, window_tiles)(lambda i: fetch_prompt(unmasked + i, work.edge_tile + i))
        if far is None:
            return
        begin, parts = work.steps - work.biased_steps, block_size // TILE

        def listed(i: Any) -> Any:
            first = far.blocks[work.row, work.kv_head, work.block, lax.div(i, jnp.int32(parts))]
            return lax.div(first, jnp.int32(TILE)) + lax.rem(i, jnp.int32(parts))

        def fetch_listed(i: Any, tile: Any) -> Any:
            following = listed(jnp.minimum(i + 1, work.listed_tiles - 1))  # read before this tile waits for its slot
            fetch_prompt(begin + i, tile, far.token_bias)
            return following

        @pl.when(work.listed_tiles > 0)
        def fetch_blocks() -> None:
            lax.fori_loop(0, work.listed_tiles, fetch_listed, listed(jnp.int32(0)))

        @pl.loop(0, work.biased_steps - work.listed_tiles)
        def fetch_means(i: Any) -> None:
            bias, step = far.mean_bias.at[(*head, work.block, _aligned(i * TILE))], begin + work.listed_tiles + i
            fetch(step, far.mean_k, far.mean_v, rounding and rounding.means, head, i, bias)


def _mask(work: _Work, warpgroup: Any, step: Any, scores: Any) -> Any:
    """Step 0 is the diagonal tile (column <= row), step 1 the region's last tile (column < tail)."""
    layout = plgpu.Layout.WGMMA
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=layout) for axis in range(2))
    diagonal = (step == 0).astype(jnp.int32)
    bound = jnp.where(step == 0, warpgroup * ROWS + 1, work.tail)
    return jnp.where(columns < rows * diagonal + bound, scores, -jnp.inf)


def call_kernel(operands: Operands, softmax: type[Softmax], dtype: Any, *, block_size: int, window: int) -> Array:
    """Runs one program per query tile and head; the attention `[B, L, Hq, d]` in `dtype`."""
    arrays, tree = jax.tree.flatten(operands)

    def program(refs: Operands, out_ref: Any, scoped: _Scoped) -> None:
        work, warpgroup = _find_work(refs, block_size, window), lax.axis_index("wg")
        pl.when(warpgroup < _WARPGROUPS)(lambda: _attend(softmax, refs, out_ref, scoped, work, warpgroup))
        pl.when(warpgroup == _WARPGROUPS)(lambda: _move(refs, scoped, work, block_size))

    def tile(*shape: int, dtype: Any) -> Any:
        """Shared memory as TMA fills it and wgmma reads it: swizzled in rows of up to 128 bytes."""
        itemsize = jnp.dtype(dtype).itemsize
        width = min(128, shape[-1] * itemsize)
        swizzle = plgpu.TilingTransform((8, width // itemsize)), plgpu.SwizzleTransform(width)
        return plgpu.SMEM(shape, dtype, transforms=swizzle)

    def entry(*flat: Any) -> None:
        refs, out_ref = jax.tree.unflatten(tree, flat[:-1]), flat[-1]
        head_dim, barriers = refs.q.shape[3], partial(plgpu.Barrier, num_barriers=_STAGES)
        v_tile = (TILE, head_dim) if refs.rounding is None else (head_dim + ONES, TILE)
        read = partial(plgpu.ClusterBarrier, collective_axes=refs.pair) if refs.pair else plgpu.Barrier
        scoped = {
            "q": tile(_WARPGROUPS, ROWS, head_dim, dtype=refs.q.dtype),
            "out": tile(_WARPGROUPS, ROWS, head_dim, dtype=dtype),
            "k": tile(_STAGES, TILE, head_dim, dtype=refs.k.dtype),
            "v": tile(_STAGES, *v_tile, dtype=refs.v.dtype),
            "q_ready": plgpu.Barrier(num_barriers=_WARPGROUPS),
            "k_ready": barriers(num_arrivals=1 if refs.rounding is None else 2),  # with the scale
            "v_ready": barriers(),
            "k_read": read(num_barriers=_STAGES, num_arrivals=_WARPGROUPS),
            "v_read": read(num_barriers=_STAGES, num_arrivals=_WARPGROUPS),
            "turns": plgpu.Barrier(num_arrivals=_WARPGROUPS),
        }
        if refs.pair:
            scoped |= {"done": read(num_arrivals=_WARPGROUPS)}
        if refs.far is not None:
            scoped |= {"bias": plgpu.SMEM((_STAGES, TILE), jnp.float32), "bias_ready": barriers()}
        if refs.rounding is not None:
            key_scales = plgpu.SMEM((_STAGES, SCALES), jnp.float32)
            scoped |= {"key_scales": key_scales, "ones_ready": plgpu.Barrier(num_arrivals=_STAGES)}
        pl.run_scoped(lambda **held: program(refs, out_ref, _Scoped(**held)), collective_axes="wg", **scoped)

    (batch, length, heads, _), cluster = operands.q.shape, (2,) * len(operands.pair)
    out: Array = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(operands.q.shape, dtype),
        grid=(batch * heads * (length // TILE) // math.prod(cluster),),
        grid_names=("work",),
        cluster=cluster,
        cluster_names=operands.pair,
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="prefill_attention_kernel",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*arrays)
    return out


def _attend(
    softmax_type: type[Softmax], refs: Operands, out_ref: Any, scoped: _Scoped, work: _Work, warpgroup: Any
) -> None:
    """A compute warpgroup: online softmax of its 64 rows over all tiles."""
    plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
    first_row = pl.multiple_of(work.tile * TILE + warpgroup * ROWS, ROWS)
    place = (work.row, pl.ds(first_row, ROWS), work.head)
    q_smem, out_smem = scoped.q.at[warpgroup], scoped.out.at[warpgroup]
    plgpu.copy_gmem_to_smem(refs.q.at[place], q_smem, scoped.q_ready.at[warpgroup])
    plgpu.barrier_wait(scoped.q_ready.at[warpgroup])
    queries = load(q_smem, plgpu.Layout.WGMMA if refs.rounding is None else plgpu.Layout.WGMMA_8BIT)
    softmax = softmax_type(refs, scoped, work, first_row)

    carry = softmax.start()
    pl.when(work.steps > 0)(lambda: plgpu.barrier_wait(scoped.k_ready.at[0]))
    if softmax.turns:
        pl.when(warpgroup == 1)(lambda: _wait_turn(scoped.turns))
    step = partial(_attend_tile, softmax, queries, scoped, work.steps)
    carry = lax.fori_loop(0, work.masked_steps, partial(step, mask=partial(_mask, work, warpgroup)), carry)
    plain_end = work.steps if refs.far is None else work.steps - work.biased_steps
    carry = lax.fori_loop(work.masked_steps, plain_end, step, carry)
    if refs.far is not None:
        if refs.rounding is not None:  # in 16 bits one loop serves both and compiles faster
            listed_end = plain_end + work.listed_tiles
            carry = lax.fori_loop(plain_end, listed_end, partial(step, biased="tokens"), carry)
            plain_end = listed_end
        carry = lax.fori_loop(plain_end, work.steps, partial(step, biased="means"), carry)
    if softmax.turns:
        pl.when(warpgroup == 0)(lambda: _wait_turn(scoped.turns))

    out, state = carry
    out = softmax.finish(out, state)
    rows = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=plgpu.Layout.WGMMA)
    out_smem[...] = jnp.where(rows + first_row < work.length, out, 0.0).astype(out_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_ref.at[place])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if refs.pair:  # the other program may still arrive at this one's barriers
        plgpu.barrier_arrive(scoped.done)
        plgpu.barrier_wait(scoped.done)


def _wait_turn(turns: Any) -> None:
    """Until the other warpgroup has given up the tensor cores."""
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)


def _attend_tile(
    softmax: Softmax,
    queries: Any,
    scoped: _Scoped,
    steps: Any,
    step: Any,
    carry: tuple[Any, Any],
    *,
    mask: Callable[[Any, Any], Any] | None = None,
    biased: str | None = None,  # "tokens" or "means"
) -> tuple[Any, Any]:
    """Takes one tile of K and V through the online softmax; `carry` is the output and the softmax's state."""
    (out, state), turns = carry, scoped.turns
    slot, next_slot = (lax.rem(n, jnp.int32(_STAGES)) for n in (step, step + 1))

    def multiply_qk(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, queries, transposed(scoped.k.at[slot]))
        if softmax.turns:
            _wait_turn(turns)

    bias, scale = None, softmax.scale_of(slot)
    if biased is not None:
        plgpu.barrier_wait(scoped.bias_ready.at[slot])
        bias = plgpu.layout_cast(scoped.bias[slot], plgpu.Layout.WGMMA.reduce(0))
        bias = lax.broadcast_in_dim(bias, (ROWS, TILE), [1])
    token_bias, mean_bias = (bias if biased == keys else None for keys in ("tokens", "means"))
    products = plgpu.layout_cast(softmax.first_products(token_bias, mean_bias), plgpu.Layout.WGMMA)
    scores = softmax.scores(pl.run_state(multiply_qk)(plgpu.ACC.init(products)), mean_bias, scale)
    plgpu.barrier_arrive(scoped.k_read.at[slot])
    if mask is not None:
        scores = mask(step, scores)
    # Nothing of the softmax may sink below the barriers: the other warpgroup has the tensor cores meanwhile.
    out, state, operand = lax.optimization_barrier(softmax.update(scores, scale, out, state))
    if softmax.turns:
        plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(scoped.v_ready.at[slot])
    if softmax.turns:
        plgpu.barrier_wait(turns)

    def prefetch() -> None:
        pl.when(step + 1 < steps)(lambda: plgpu.barrier_wait(scoped.k_ready.at[next_slot]))

    out, state = softmax.multiply_pv(operand, scoped.v.at[slot], out, state, prefetch)
    plgpu.barrier_arrive(scoped.v_read.at[slot])
    return out, state


class Softmax:
    """Online softmax of a warpgroup's rows in float32. The state is peak (in powers of two) and weight of each row.

    The two warpgroups take turns (FlashAttention-3, arXiv 2407.08608): while one computes its softmax, the other has
    the tensor cores.
    """

    turns: ClassVar[bool] = True

    def __init__(self, refs: Operands, scoped: _Scoped, work: _Work, first_row: Any) -> None:
        self.dtype, self.head_dim = refs.q.dtype, refs.q.shape[3]
        self.scale = LOG2E * refs.q.shape[3] ** -0.5

    def start(self) -> tuple[Any, Any]:
        """Output and state before any tile."""
        return zeros(self.head_dim), (of_rows(-jnp.inf), of_rows(0))

    def scale_of(self, slot: Any) -> Any:
        """The factor of a tile's scores that gives powers of two, as a part of multiply-adds."""
        return self.scale

    def first_products(self, token_bias: Any, mean_bias: Any) -> Any:
        """The accumulator that products of queries and keys are added to."""
        return jnp.zeros((ROWS, TILE), jnp.float32) if mean_bias is None else mean_bias

    def scores(self, products: Any, mean_bias: Any, scale: Any) -> Any:
        """The tile's logits over the scale."""
        return products

    def update(self, scores: Any, scale: Any, out: Any, state: Any) -> tuple[Any, Any, Any]:
        """Output and state in units of the new peak, and probabilities as the operand of a product."""
        peak, weight = state
        new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
        decay = jnp.exp2(peak - new_peak)
        probabilities = jnp.exp2(scores * scale - across(new_peak, scores))
        weight = weight * decay + probabilities.sum(axis=1)
        return out * across(decay, out), (new_peak, weight), probabilities.astype(self.dtype)

    def multiply_pv(self, operand: Any, v_smem: Any, out: Any, state: Any, meanwhile: Callable[[], None]) -> Any:
        """Adds the product of probabilities and values to the output; `meanwhile` runs beside it."""

        def multiply(accumulator: Any) -> None:
            plgpu.wgmma(accumulator, operand, v_smem)
            meanwhile()

        return pl.run_state(multiply)(plgpu.ACC.init(out)), state

    def finish(self, out: Any, state: Any) -> Any:
        """The attention."""
        return out / across(state[1], out)


def zeros(columns: int) -> Any:
    """An accumulator's start."""
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


def of_rows(value: float) -> Any:
    """A value for each row of a warpgroup."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def across(of_rows: Any, like: Any) -> Any:
    """A value for each row, in all columns."""
    return lax.broadcast_in_dim(of_rows, like.shape, [0])


def _aligned(first: Any) -> Any:
    """A tile's slice: it starts on a multiple of its size, which the compiler cannot know."""
    return pl.ds(pl.multiple_of(first, TILE), TILE)


def transposed(ref: Any) -> Any:
    """A tile as the transposed operand of a product."""
    return ref.transpose((1, 0)) if _IS_NEW else plgpu.transpose_ref(ref, (1, 0))


def load(ref: Any, layout: Any) -> Any:
    """A ref, in registers."""
    return plgpu.load(ref, *() if _IS_NEW else ((),), layout=layout, optimized=False)
