"""Column mass on Pallas Mosaic GPU: warp-specialised, TMA and wgmma (Hopper).

Two passes, as in `column_mass_triton`. In both, compute warpgroups hold 64 tokens each, queries in the first pass and
keys in the second, while a memory warpgroup streams tiles of 128 tokens of the other operand. Scores have a row for
every token held, so that norms and column sums are both sums of rows; eight partial sums per row stay in registers to
the end, since no thread then needs another's. Unlike those of prefill attention, the warpgroups take no turns: with no
output to accumulate, registers suffice for three of them, and three keep the tensor cores busy while some take powers
(on an H200 5 to 34% faster than two, with turns or without).
"""

from __future__ import annotations

import dataclasses
import math
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
from tca_jax.pallas_kernels.kernel_math import LOG2E, divide_up, quotient_and_remainder
from tca_jax.pallas_kernels.mosaic_tiles import aligned, iotas, swizzled, transposed
from tca_jax.pallas_kernels.numerics import MASKED, varying_like

_ROWS = 64  # tokens that a compute warpgroup holds: one wgmma tile
_TILE = 128  # tokens of a streamed tile
_LANES = 8  # partial sums of a row: the columns of a wgmma tile
_REGISTERS = {2: (232, 40), 3: (160, 32)}  # of compute and memory threads, by the number of compute warpgroups


@dataclasses.dataclass(frozen=True)
class MosaicPassConfig:
    """Tiling of one pass.

    Attributes:
        warpgroups: That compute, 2 or 3, with 64 tokens each.
        stages: Streamed tiles in flight, at most 5; each takes 256 d bytes of shared memory.
    """

    warpgroups: int = 3
    stages: int = 4

    @property
    def size(self) -> int:
        """Tokens that a program holds."""
        return _ROWS * self.warpgroups


@dataclasses.dataclass(frozen=True)
class MosaicColumnMassConfig:
    """Tiling of column mass; the defaults fit every head dimension that the kernels take.

    Attributes:
        norms: Of the pass over rows.
        columns: Of the pass over columns.
    """

    norms: MosaicPassConfig = MosaicPassConfig()
    columns: MosaicPassConfig = MosaicPassConfig()


@partial(jax.jit, static_argnames=("block_size", "window", "config"))
@jax.named_scope("column_mass")
def column_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    config: MosaicColumnMassConfig | None = None,
) -> tuple[Float32[Array, "B Hkv L"], Float32[Array, "B Hkv L"]]:
    """(near, far); see `column_mass.column_mass`. What lies past a row's length does not matter.

    Raises:
        NotImplementedError: the head dimension, the types, or a block size that is no multiple of 128.
    """
    (length, kv_heads, head_dim), config = k.shape[1:], config or MosaicColumnMassConfig()
    known = q.dtype == k.dtype and q.dtype in (jnp.bfloat16, jnp.float16)
    if not known or head_dim not in (64, 128) or block_size % _TILE:
        raise Unsupported(
            f"column_mass on mosaic takes q and k both bfloat16 or both float16, d 64 or 128 and block_size a multiple "
            f"of {_TILE}, not {q.dtype} and {k.dtype}, d = {head_dim} and block_size = {block_size}"
        )
    # Three warpgroups hold 192 tokens, so most lengths are padded. At 131,072 tokens that moves 3 GB, 0.7 of 270 ms.
    padding = -length % math.lcm(_TILE, config.norms.size, config.columns.size)
    if padding:
        q, k = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k))
    inside = (jnp.arange(q.shape[1]) < lengths[:, None])[:, None]
    (norms,) = _call("column_mass_norms", _find_norms, (q, lengths, k), outputs=1, config=config.norms)
    norms = jnp.where(inside, norms, -jnp.inf)
    program = partial(_sum_columns, block_size=block_size, window_blocks=window // block_size)
    sums = _call("column_mass_columns", program, (k, lengths, q, norms), outputs=2, config=config.columns)
    near, far = (jnp.where(inside, x * (kv_heads / q.shape[2]), 0)[..., :length] for x in sums)
    return near, far


class _Shared(NamedTuple):
    """What the warpgroups of a program share: buffers, and barriers that say when they may be read or written."""

    held: Any
    ring: Any
    norms: Any
    outputs: Any
    held_ready: Any
    ready: Any
    read: Any


def _call(
    name: str, program: Callable[..., None], operands: tuple[Array, ...], *, outputs: int, config: MosaicPassConfig
) -> tuple[Array, ...]:
    """Runs a pass, with a program for every tile of the first operand; its outputs are float32, by head and token."""
    held, _, *streamed = operands
    batch, length, heads, head_dim = held.shape
    tiles = swizzled(held.dtype)
    shared = _Shared(
        held=tiles((config.warpgroups, _ROWS, head_dim)),
        ring=tiles((config.stages, _TILE, head_dim)),
        norms=plgpu.SMEM((config.stages, _TILE), jnp.float32),
        outputs=plgpu.SMEM((outputs, config.warpgroups, _ROWS), jnp.float32),
        held_ready=plgpu.Barrier(num_barriers=config.warpgroups),
        ready=plgpu.Barrier(num_barriers=config.stages, num_arrivals=len(streamed)),
        read=plgpu.Barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
    )

    def entry(*refs: Any) -> None:
        pl.run_scoped(lambda scoped: program(refs, scoped, config=config), shared, collective_axes="wg")

    results = plgpu.kernel(
        entry,
        out_type=[jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)] * outputs,
        grid=(batch * heads * (length // config.size),),
        grid_names=("work",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        kernel_name=name,  # what profiles show
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
    return varying_like(tuple(results), *operands)


def _find_norms(refs: Any, shared: _Shared, *, config: MosaicPassConfig) -> None:
    """First pass: the negated logarithm, to base 2, of the sum of exponentials of every query of a tile."""
    q_ref, lengths_ref, k_ref, norms_ref = refs
    kv_heads = k_ref.shape[2]
    group, tiles = q_ref.shape[2] // kv_heads, q_ref.shape[1] // config.size
    # Heads of a group run side by side, for they share K; the longest tiles come first.
    turn, member = quotient_and_remainder(lax.axis_index("work"), group)
    turn, tile = quotient_and_remainder(turn, tiles)
    row, kv_head = quotient_and_remainder(turn, kv_heads)
    head, first = kv_head * group + member, (tiles - 1 - tile) * config.size
    length = lengths_ref[row]
    end = jnp.where(first < length, _tiles(jnp.minimum(first + config.size, length)), 0)
    diagonal = jnp.minimum(quotient_and_remainder(first, _TILE)[0], end)

    def fetch(step: Any, slot: Any) -> None:
        tokens = aligned(step * _TILE, _TILE)
        plgpu.copy_gmem_to_smem(k_ref.at[row, tokens, kv_head], shared.ring.at[slot], shared.ready.at[slot])

    def compute(warpgroup: Any) -> None:
        first_row = first + warpgroup * _ROWS
        place = aligned(first_row, _ROWS)

        def take(step: Any, slot: Any, scores: Any, carry: tuple[Any, Any], masked: bool) -> tuple[Any, Any]:
            peak, weight = carry
            plgpu.barrier_arrive(shared.read.at[slot])
            if masked:
                rows, columns = iotas(scores.shape)
                scores = jnp.where(columns - rows <= first_row - step * _TILE, scores, -jnp.inf)
            scale, parts = _scale(q_ref), _parts(scores)
            new_peak = jnp.maximum(peak, _fold(jnp.maximum, parts) * scale)
            powers = [jnp.exp2(part * scale - new_peak) for part in parts]
            return new_peak, weight * jnp.exp2(peak - new_peak) + _fold(jnp.add, powers)

        # `MASKED`, for it is finite: differences of peaks are no NaN.
        loops = ((0, diagonal, False), (diagonal, end, True))
        peak, weight = _stream(q_ref.at[row, place, head], take, loops, MASKED, shared, warpgroup, config)
        top = peak.max(axis=1)
        total = (weight * jnp.exp2(peak - lax.broadcast_in_dim(top, peak.shape, [0]))).sum(axis=1)
        _store([-(top + jnp.log(total) * LOG2E)], [norms_ref.at[row, head, place]], shared, warpgroup)

    _run(fetch, compute, 0, end, shared, config)


def _sum_columns(refs: Any, shared: _Shared, *, config: MosaicPassConfig, block_size: int, window_blocks: int) -> None:
    """Second pass: near and far sums of a tile of keys, over all heads of its group."""
    k_ref, lengths_ref, q_ref, norms_ref, near_ref, far_ref = refs
    batch, _, kv_heads, _ = k_ref.shape
    group = q_ref.shape[2] // kv_heads
    # The first key tiles are seen by the most queries.
    tile, region = quotient_and_remainder(lax.axis_index("work"), batch * kv_heads)
    row, kv_head = quotient_and_remainder(region, kv_heads)
    length, start = lengths_ref[row], tile * config.size
    # Query tiles: the diagonal ends at `clear`, and those without padding at `whole`. A step is one head of a tile.
    diagonal, end = quotient_and_remainder(start, _TILE)[0], _tiles(length)
    clear = jnp.minimum(_tiles(start + config.size), end)
    whole = jnp.maximum(quotient_and_remainder(length, _TILE)[0], clear)
    diagonal, clear, whole, end = (x * group for x in (diagonal, clear, whole, end))

    def fetch(step: Any, slot: Any) -> None:
        number, member = quotient_and_remainder(step, group)
        head, tokens, ready = kv_head * group + member, aligned(number * _TILE, _TILE), shared.ready.at[slot]
        plgpu.copy_gmem_to_smem(norms_ref.at[row, head, tokens], shared.norms.at[slot], ready)
        plgpu.copy_gmem_to_smem(q_ref.at[row, tokens, head], shared.ring.at[slot], ready)

    def compute(warpgroup: Any) -> None:
        first_key = start + warpgroup * _ROWS
        last_near = quotient_and_remainder(first_key, block_size)[0] + window_blocks  # block of queries
        place = aligned(first_key, _ROWS)

        def take(step: Any, slot: Any, scores: Any, carry: tuple[Any, Any], masked: bool) -> tuple[Any, Any]:
            near, far = carry
            norms = lax.broadcast_in_dim(_load_by_column(shared.norms.at[slot]), scores.shape, [1])
            plgpu.barrier_arrive(shared.read.at[slot])
            weights = jnp.exp2(scores * _scale(k_ref) + norms)
            first = quotient_and_remainder(step, group)[0] * _TILE
            if masked:
                rows, columns = iotas(scores.shape)
                seen = (rows - columns <= first - first_key) & (columns < length - first)
                weights = jnp.where(seen, weights, 0.0)
            mass = _fold(jnp.add, _parts(weights))
            # Warpgroups hold tokens of one block, and so do streamed tiles: all pairs are near, or all far.
            share = (quotient_and_remainder(first, block_size)[0] <= last_near).astype(jnp.float32)
            return near + mass * share, far + mass * (1 - share)

        loops = ((diagonal, clear, True), (clear, whole, False), (whole, end, True))
        sums = _stream(k_ref.at[row, place, kv_head], take, loops, 0.0, shared, warpgroup, config)
        places = [ref.at[row, kv_head, place] for ref in (near_ref, far_ref)]
        _store([x.sum(axis=1) for x in sums], places, shared, warpgroup)

    _run(fetch, compute, diagonal, end, shared, config)


def _run(
    fetch: Callable[..., None],
    compute: Callable[..., None],
    begin: Any,
    end: Any,
    shared: _Shared,
    config: MosaicPassConfig,
) -> None:
    """Splits the warpgroups: the last fills the ring's next slot once the others have read it; they compute."""
    warpgroup = lax.axis_index("wg")
    compute_registers, memory_registers = _REGISTERS[config.warpgroups]

    @pl.when(warpgroup < config.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == config.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(memory_registers, action="decrease")

        @pl.loop(begin, end)
        def _(step: Any) -> None:
            slot = quotient_and_remainder(step, config.stages)[1]
            pl.when(step - begin >= config.stages)(lambda: plgpu.barrier_wait(shared.read.at[slot]))
            fetch(step, slot)


def _stream(
    held_ref: Any,
    take: Callable[..., tuple[Any, Any]],
    loops: tuple[tuple[Any, Any, bool], ...],
    start: float,
    shared: _Shared,
    warpgroup: Any,
    config: MosaicPassConfig,
) -> tuple[Any, Any]:
    """Fetches the tile that a compute warpgroup holds, and takes its scores with all streamed tiles.

    Args:
        held_ref: The tile in global memory.
        take: Takes a step's scores and two arrays of partial sums to the next two, and gives the ring's slot back.
        loops: First step, end, and whether a mask is needed, of each loop.
        start: What the first array starts with; the second starts with zeros.
        shared: Buffers and barriers.
        warpgroup: The warpgroup's number.
        config: Tiling.
    """
    held = shared.held.at[warpgroup]
    plgpu.copy_gmem_to_smem(held_ref, held, shared.held_ready.at[warpgroup])
    plgpu.barrier_wait(shared.held_ready.at[warpgroup])

    def step(i: Any, carry: tuple[Any, Any], masked: bool) -> tuple[Any, Any]:
        slot = quotient_and_remainder(i, config.stages)[1]
        plgpu.barrier_wait(shared.ready.at[slot])

        def multiply(accumulator: Any) -> Any:
            plgpu.wgmma(accumulator, held, transposed(shared.ring.at[slot]))
            return accumulator[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((_ROWS, _TILE), jnp.float32))
        return take(i, slot, scores, carry, masked)

    def partial_sums(value: float) -> Any:
        return plgpu.layout_cast(jnp.full((_ROWS, _LANES), value, jnp.float32), plgpu.Layout.WGMMA)

    carry = (partial_sums(start), partial_sums(0.0))
    for begin, end, masked in loops:
        carry = lax.fori_loop(begin, end, partial(step, masked=masked), carry)
    return carry


def _store(values: list[Any], refs: list[Any], shared: _Shared, warpgroup: Any) -> None:
    for i, (value, ref) in enumerate(zip(values, refs, strict=True)):
        output = shared.outputs.at[i, warpgroup]
        output[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(output, ref)
    plgpu.wait_smem_to_gmem(0)


def _parts(x: Any) -> list[Any]:
    """Slices [rows, 8] of all columns: a thread has the same places of each."""
    return [lax.slice(x, (0, i), (x.shape[0], i + _LANES)) for i in range(0, x.shape[1], _LANES)]


def _fold(operation: Callable[[Any, Any], Any], parts: list[Any]) -> Any:
    """The parts combined, in pairs, so that no operation waits long for another."""
    while len(parts) > 1:
        parts = [operation(*parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]


def _tiles(tokens: Any) -> Any:
    """How many streamed tiles hold so many tokens."""
    return divide_up(tokens, _TILE)


def _scale(ref: Any) -> float:
    """Turns products into scores to base 2."""
    return LOG2E * ref.shape[-1] ** -0.5


def _load_by_column(ref: Any) -> Any:
    """A value for every column of a product."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    # JAX 0.11 deprecates the index, which 0.10 wants.
    return plgpu.load(ref, *(() if jax.__version_info__ >= (0, 11) else ((),)), layout=layout)
