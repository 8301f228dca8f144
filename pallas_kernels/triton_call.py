"""The one door to Pallas-Triton: calls of kernels, the arithmetic that is its own, and JAX 0.11's deprecation of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float32

from tca_jax.errors import Unsupported
from tca_jax.pallas_kernels.eight_bits import LEAST_EXPONENT, EightBits, power_of_two
from tca_jax.pallas_kernels.kernel_math import LOG2E
from tca_jax.pallas_kernels.numerics import MASKED, precision, varying_axes

#: How the one warning begins that this module suppresses.
DEPRECATION = "The Pallas Triton backend is deprecated"
#: Element types that the kernels take; all their arithmetic is float32.
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_WEIGHT_BITS = 12  # weights are at most 2 ** 12 where they are multiplied by values: float16 is exact down to 2 ** -14


def triton_call(
    kernel: Callable[..., None],
    operands: Sequence[Any],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    grid: tuple[int, ...],
    name: str,
    warps: int,
    stages: int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Runs a kernel over a grid; it gets whole arrays and addresses them itself.

    Pallas-Triton computes the element offsets of an array past 4 GiB in int64 and of others in int32: kernels
    must index by row and column, never by a flat element number of their own.

    Args:
        kernel: Called with one ref an operand, then one an output.
        operands: Input arrays, or pytrees of such: the kernel gets trees of refs.
        outputs: Shape and type of every output; what the kernel leaves unwritten is undefined.
        grid: Programs; the first axis runs fastest.
        name: The kernel's name in profiles.
        warps: Warps of a program.
        stages: Depth of the software pipeline of its loops.
        interpret: Run in JAX on any device instead of compiling for the GPU.

    Returns:
        The outputs. Under `shard_map` they vary over the mesh axes that any operand varies over.
    """
    _ignore_deprecation()
    varying = jax.sharding.ManualAxisType(varying=varying_axes(operands))
    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype in outputs],
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )
    return tuple(call(*operands))


def check_supported(operation: str, head_dim: int, *arrays: Any) -> None:
    """Refuses what the kernels do not take, so that backend "auto" moves on.

    Raises:
        NotImplementedError: a head dimension that is no power of two from 16 to 256, a type that is not in
            `DTYPES`, or arrays of different types.
    """
    if head_dim not in (16, 32, 64, 128, 256):
        raise Unsupported(f"{operation} on Triton: head dimension {head_dim}: must be a power of two from 16 to 256")
    dtypes = {jnp.dtype(array.dtype) for array in arrays}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(dtype) for dtype in DTYPES}:
        raise Unsupported(
            f"{operation} on Triton: types {sorted(map(str, dtypes))}: must be one of bfloat16, float16 and float32"
        )


def multiprocessors() -> int:
    """Streaming multiprocessors of the default device; an H200's where there is no GPU (lowering on a CPU host)."""
    device = jax.local_devices()[0]
    return int(getattr(device, "core_count", 132)) if device.platform == "gpu" else 132


def dot(a: Array, b: Array, *, transposed: bool = False) -> Array:
    """a b, or a b^T, summed in float32, in a kernel; float32 operands are not rounded to TF32."""
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, contracted, precision=precision(a.dtype), preferred_element_type=jnp.float32)


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


def online_softmax_step(
    q: Array, state: tuple[Array, Array, Array], k: Array, v: Array, visible: Array | None = None, *, interpret: bool
) -> tuple[Array, Array, Array]:
    """Takes one tile into (sum of weighted values, largest score, sum of weights) of every row.

    A row must have a finite largest score when this returns: see a token of the tile, or have seen one before, or
    begin at one whose product with the scale is exact, a power of two, above MASKED.
    """
    out, peak, weight = state
    scale = LOG2E / math.sqrt(q.shape[1])
    power = partial(scaled_exp2, scale=scale, interpret=interpret)
    scores = dot(q, k, transposed=True)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    bias = -scale * new_peak
    decay = power(peak, bias=bias)
    weights = power(scores, bias=jnp.broadcast_to(bias[:, None], scores.shape))
    out = out * decay[:, None] + dot(weights.astype(v.dtype), v)
    return out, new_peak, weight * decay + jnp.sum(weights, axis=1)


def online_softmax_step_in_eight_bits(
    q: Array,
    state: tuple[Array, Array, Array],
    k: EightBits,
    v: EightBits,
    visible: Array | None = None,
    *,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """`online_softmax_step` over keys and values in eight bits.

    Codes become float16 for queries in 16 bits: that holds them exactly, and takes a third of the conversions that
    bfloat16 does. Their powers of two multiply scores and weights; those of the values less the largest in the tile, so
    that the weights stay within float16.
    """
    out, peak, weight = state
    scale, dtype = LOG2E / math.sqrt(q.shape[1]), jnp.float32 if q.dtype == jnp.float32 else jnp.float16
    power = partial(scaled_exp2, scale=scale, interpret=interpret)
    scores = dot(q.astype(dtype), k.codes.astype(dtype), transposed=True) * power_of_two(k.exponents)[None]
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    bias = -scale * new_peak
    decay = power(peak, bias=bias)
    weights = power(scores, bias=jnp.broadcast_to(bias[:, None], scores.shape))
    largest = jnp.max(v.exponents.astype(jnp.int32))
    relative = jnp.maximum(v.exponents.astype(jnp.int32) - largest, LEAST_EXPONENT)
    shares = weights * power_of_two(relative + _WEIGHT_BITS)[None]
    values = dot(shares.astype(dtype), v.codes.astype(dtype)) * power_of_two(largest - _WEIGHT_BITS)
    return out * decay[:, None] + values, new_peak, weight * decay + jnp.sum(weights, axis=1)


def load_rows(ref: Any, inside: Array | None) -> Array:
    """A tile; rows that are not `inside` are not read and give zeros, so that what they hold cannot spread."""
    return ref[...] if inside is None else pltriton.load(ref, mask=inside, other=0.0)


def _ignore_deprecation() -> None:
    # JAX 0.11 deprecates Pallas-Triton in favour of Mosaic GPU, which does not run on Ampere; until JAX removes
    # it, a warning at every compilation tells our users nothing that they could act on. JAX warns when it lowers,
    # after the call was traced, so a `catch_warnings` around the call would be over too early: the filter stays.
    # It is set at every trace because test runners restore the filters between tests; setting it again is free.
    warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)
