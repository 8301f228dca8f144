"""The online softmax of two warpgroups that take turns on the tensor cores, in Pallas Mosaic GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tca_jax.pallas_kernels.kernel_math import LOG2E
from tca_jax.pallas_kernels.mosaic_tiles import transposed

ROWS = 64  # query rows of a warpgroup: one wgmma tile
TILE = 128  # query rows of a program, and tokens of a K or V tile


def wait_turn(turns: Any) -> None:
    """Until the other warpgroup has given up the tensor cores."""
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)


def attend_tile(
    q_smem: Any,
    scoped: Any,
    steps: Any,
    stages: int,
    step: Any,
    carry: tuple[Any, Any, Any],
    *,
    mask: Callable[[Any, Any], Any] | None,
) -> tuple[Any, Any, Any]:
    """Takes one tile of K and V through the online softmax.

    Args:
        q_smem: The warpgroup's queries.
        scoped: Shared memory of Q, K and V, the barriers on which these are ready, those on which K and V have been
            read, and that of the warpgroups' turns.
        steps: Tiles in all.
        stages: Tiles of K and of V in shared memory.
        step: Number of the tile.
        carry: Output, peak (in powers of two) and weight so far.
        mask: Takes the step and the scores, and gives those that count; None where all do.
    """
    (_, k_smem, v_smem), (_, k_ready, v_ready), (k_read, v_read), turns = scoped
    out, peak, weight = carry
    slot, next_slot = lax.rem(step, jnp.int32(stages)), lax.rem(step + 1, jnp.int32(stages))

    def multiply_qk(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, q_smem, transposed(k_smem.at[slot]))
        wait_turn(turns)
        return accumulator[...]

    scores = pl.run_scoped(multiply_qk, plgpu.ACC((ROWS, TILE), jnp.float32))
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
