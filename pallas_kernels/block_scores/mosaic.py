"""Block scores on Pallas Mosaic GPU (Hopper): largest logits of sampled queries and blocks, of products in int8.

Two compute warpgroups have 64 rows of sampled queries each; one memory warpgroup streams the blocks of keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.block_scores.parts import by_parts
from tca_jax.pallas_kernels.int8 import BASE, BASE_BITS, round_keys, round_queries
from tca_jax.pallas_kernels.mosaic_tiles import ROWS, TILE, across, aligned, load_rows, of_rows, swizzled, transposed
from tca_jax.pallas_kernels.numerics import MASKED, varying_like

_WARPGROUPS = 2  # that compute; one more moves memory
_STAGES = 4  # tiles of keys in flight
_COMPUTE_REGISTERS, _MEMORY_REGISTERS = 232, 40
_HELD = _WARPGROUPS * ROWS  # rows of a program


@partial(jax.jit, static_argnames=("block_size", "stride"))
@jax.named_scope("block_scores")
def block_scores(q: Array, k: Array, lengths: Array, *, block_size: int, stride: int) -> Array:
    """See `block_scores.block_scores`; queries and keys are rounded to int8."""
    batch, length, kv_heads, head_dim = k.shape
    rows = block_size // stride * (q.shape[2] // kv_heads)
    takes = block_size == TILE and head_dim in (64, 128) and k.dtype in (jnp.bfloat16, jnp.float16)
    allowed = f"bfloat16 and float16, d 64 or 128, block_size = {TILE}, at most {_HELD} rows of a tile and a token"
    given = f"{k.dtype}, d = {head_dim}, block_size = {block_size}, {rows} rows and {length} tokens"
    require(takes and rows <= _HELD and length, f"block_scores on mosaic takes {allowed}, not {given}", Unsupported)
    keys = round_keys(k, jnp.broadcast_to(lengths[:, None], (batch, kv_heads)))
    codes = jnp.pad(keys.codes, ((0, 0), (0, -length % TILE), (0, 0), (0, 0)))

    def peaks_of(own: Array, places: Array, first: Array) -> tuple[Array, ...]:
        rest = _HELD - places.shape[-1]
        queries, unit = round_queries(own)
        unit = jnp.pad(unit * keys.scale[:, 0, :, None], ((0, 0), (0, 0), (0, 0), (0, rest)))
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, rest), (0, 0)))
        places = jnp.pad(places, ((0, 0), (0, 0), (0, rest)), constant_values=-1)
        return _call_kernel(queries, unit, places, codes, lengths, first, tiles=tiles)

    tiles = _HELD // rows
    sizes: Any = {"block_size": block_size, "stride": stride, "program_tiles": tiles, "held": _HELD}
    return varying_like(by_parts(peaks_of, q, kv_heads, lengths, **sizes), q, k, lengths)


def _call_kernel(queries: Array, *operands: Array, tiles: int) -> tuple[Array, ...]:
    batch, kv_heads, part, held, head_dim = queries.shape
    blocks = operands[2].shape[1] // TILE

    def entry(*refs: Any) -> None:
        pl.run_scoped(
            partial(_program, *refs, tiles=tiles),
            swizzled(_WARPGROUPS, ROWS, head_dim, dtype=jnp.int8),
            swizzled(_STAGES, TILE, head_dim, dtype=jnp.int8),
            plgpu.SMEM((_WARPGROUPS, 2, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
            collective_axes="wg",
        )

    shapes = (batch, kv_heads, part, blocks, held), (batch, kv_heads, part, held)
    kernel: Any = plgpu.kernel(
        entry,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid=(part * kv_heads * batch,),
        grid_names=("work",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="block_scores_kernel",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return tuple(kernel(queries, *operands))


def _program(
    q_ref: Any,
    unit_ref: Any,
    places_ref: Any,
    k_ref: Any,
    lengths_ref: Any,
    first_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    q_smem: Any,
    k_smem: Any,
    out_smem: Any,
    q_ready: Any,
    k_ready: Any,
    k_read: Any,
    *,
    tiles: int,
) -> None:
    part, kv_heads = q_ref.shape[2], q_ref.shape[1]
    work, warpgroup = lax.axis_index("work"), lax.axis_index("wg")
    number = part - 1 - lax.rem(work, jnp.int32(part))  # the last tiles, which see most, come first
    region = lax.div(work, jnp.int32(part))
    row, head = lax.div(region, jnp.int32(kv_heads)), lax.rem(region, jnp.int32(kv_heads))
    length, first_tile = lengths_ref[row], (first_ref[0] + number) * tiles
    all_blocks = lax.div(length + TILE - 1, jnp.int32(TILE))
    end = jnp.where(first_tile * TILE < length, jnp.minimum(first_tile + tiles, all_blocks), 0)

    @pl.when(warpgroup == _WARPGROUPS)
    def move() -> None:
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

        @pl.loop(0, end)
        def fetch(block: Any) -> None:
            slot = lax.rem(block, jnp.int32(_STAGES))
            pl.when(block >= _STAGES)(lambda: plgpu.barrier_wait(k_read.at[slot]))
            plgpu.copy_gmem_to_smem(k_ref.at[row, aligned(block * TILE), head], k_smem.at[slot], k_ready.at[slot])

    @pl.when(warpgroup < _WARPGROUPS)
    def score() -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        mine = (row, head, number, pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS))
        plgpu.copy_gmem_to_smem(q_ref.at[mine], q_smem.at[warpgroup], q_ready.at[warpgroup])
        unit = load_rows(unit_ref.at[mine])
        plgpu.barrier_wait(q_ready.at[warpgroup])

        def store(values: Any, slot: Any, ref: Any) -> None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            out_smem[warpgroup, slot] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup, slot], ref)

        def one_block(block: Any, state: tuple[Any, Any], *, masked: bool) -> tuple[Any, Any]:
            highest, summed = state
            slot = lax.rem(block, jnp.int32(_STAGES))
            plgpu.barrier_wait(k_ready.at[slot])
            start = plgpu.layout_cast(jnp.full((ROWS, TILE), BASE_BITS, jnp.int32), plgpu.Layout.WGMMA)

            def multiply(accumulator: Any) -> None:
                plgpu.wgmma(accumulator, q_smem.at[warpgroup], transposed(k_smem.at[slot]))

            products = lax.bitcast_convert_type(pl.run_state(multiply)(plgpu.ACC.init(start)), jnp.float32)
            plgpu.barrier_arrive(k_read.at[slot])
            if masked:
                place = load_rows(places_ref.at[row, number, mine[-1]])
                token = plgpu.broadcasted_iota(jnp.int32, products.shape, 1, layout=plgpu.Layout.WGMMA) + block * TILE
                products = jnp.where(token <= across(place, products), products, MASKED)
            found = (products.max(axis=1) - BASE) * unit
            higher = jnp.maximum(highest, found)
            summed = summed * jnp.exp2(highest - higher) + jnp.exp2(found - higher)
            found, higher, summed = lax.optimization_barrier((found, higher, summed))
            store(found, lax.rem(block, jnp.int32(2)), out_ref.at[row, head, number, block, mine[-1]])
            return higher, summed

        whole = jnp.minimum(first_tile, end)
        state = lax.fori_loop(0, whole, partial(one_block, masked=False), (of_rows(MASKED), of_rows(0)))
        highest, summed = lax.fori_loop(whole, end, partial(one_block, masked=True), state)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store(highest + jnp.log2(summed), 0, sums_ref.at[mine])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
