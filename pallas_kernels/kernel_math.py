"""What kernels share: powers of two in two instructions (Triton), the order of prefill's work, indices, tiles."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float32, Int

#: Turns a logarithm to base e into one to base 2.
LOG2E = math.log2(math.e)


def scaled_exp2(
    x: Float32[Array, "*s"], scale: float, bias: Float32[Array, "*s"], *, interpret: bool
) -> Float32[Array, "*s"]:
    """2 ** (x * scale + bias), where results under 2**-126 may be 0.

    Softmax kernels spend half their time here. What XLA makes of the plain expression takes five instructions: it
    neither fuses the multiplication and addition nor flushes denormal numbers to zero, as the plain instruction does.

    Args:
        x: Exponents before scaling.
        scale: Factor known at compile time.
        bias: Summand, of the shape of `x`.
        interpret: Whether the kernel runs in interpret mode, which knows no assembly.

    Returns:
        The powers, of the shape of `x`.
    """
    if interpret:
        return jnp.exp2(x * scale + bias)
    factor = f"0f{np.float32(scale).view(np.uint32):08X}"
    [power] = pltriton.elementwise_inline_asm(
        f"fma.rn.ftz.f32 $0, $1, {factor}, $2; ex2.approx.ftz.f32 $0, $0;",
        args=[x, bias],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return power


def split(index: Any, size: int) -> tuple[Any, Any]:
    """Quotient and remainder of an integer that is not negative."""
    return lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))


def prefix_schedule(
    budgets: Int[Array, "B Hkv nb"], num_blocks: int, window_blocks: int
) -> tuple[Int[Array, "B Hkv N"], Int[Array, " regions"]]:
    """Selected tokens left of each block's window, and the regions, largest first."""
    ends = jnp.pad(jnp.cumsum(budgets, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    edges = jnp.clip(jnp.arange(num_blocks) - window_blocks, 0, budgets.shape[-1])
    return ends[..., edges], jnp.argsort(-ends[..., -1].ravel()).astype(jnp.int32)


def streamed_tile(head_dim: int, itemsize: int) -> int:
    """Tokens of a tile of 16 KiB, for kernels that do little but read."""
    return min(128, max(16, 16384 // (head_dim * itemsize)))


def full_precision_tile(head_dim: int) -> tuple[int, int]:
    """Largest side of a tile of float32 scores, and warps, at which registers do not run out.

    Products that are not rounded to TF32 do not run on the matrix units: their operands go through registers.
    """
    return (32 if head_dim <= 128 else 16), 8


def shared_memory() -> int:
    """Bytes of shared memory that a program of the default device may take; an H200's where there is no GPU."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "9.0")
    return {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}.get(capability, 99) * 1024
