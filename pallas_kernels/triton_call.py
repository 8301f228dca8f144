"""The one door to Pallas-Triton: calls of kernels, the arithmetic that is its own, and JAX 0.11's deprecation of it."""

from __future__ import annotations

import dataclasses
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

from tca_jax.errors import Unsupported, require
from tca_jax.pallas_kernels.kernel_math import LOG2E, full_precision_tile, shared_memory
from tca_jax.pallas_kernels.kv import LEAST_EXPONENT, UNPACKED, power_of_two, unpack
from tca_jax.pallas_kernels.numerics import MASKED, precision, varying_axes

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)  # that the kernels take; all their arithmetic is float32
MOST_BYTES = 2**31  # elements of one byte in an array
_WEIGHT_BITS = 12  # weights are at most 2 ** 12 where they are multiplied by values: float16 is exact down to 2 ** -14

PartedState = tuple[tuple[Array, ...], Array, Array]  # sums of weighted values in parts, largest score, sum of weights


def triton_call(
    kernel: Callable[..., None],
    operands: Sequence[Any],
    outputs: Sequence[tuple[tuple[int, ...], Any]],  # shapes and types; what the kernel leaves unwritten is undefined
    *,
    grid: tuple[int, ...],  # the first axis runs fastest
    name: str,  # in profiles
    warps: int,  # of a program
    stages: int,  # of the software pipeline of its loops
    interpret: bool,  # run in JAX on any device
) -> tuple[jax.Array, ...]:
    """Runs a kernel over a grid. It gets refs of full arrays, or trees of refs, and indexes them itself.

    Pallas-Triton computes the element offsets of an array past 4 GiB in int64 and of others in int32: kernels must
    index by row and column, never by a flat element number, and of one byte an element 2 to 4 GiB are refused.
    """
    for x in (*jax.tree.leaves(operands), *(jax.ShapeDtypeStruct(*output) for output in outputs)):
        fits = x.dtype.itemsize > 1 or x.size <= MOST_BYTES or x.size > 2 * MOST_BYTES
        given = f"{name} on Triton: {x.dtype} of shape {x.shape}"
        require(fits, f"{given}: 2 to 4 GiB of bytes cannot be indexed; use a smaller batch", Unsupported)
    # JAX 0.11 deprecates Pallas-Triton in favour of Mosaic GPU, which does not run on Ampere. Until JAX removes it,
    # users can do nothing about the warning of every compilation. JAX warns when it lowers, after the call was traced,
    # so a `catch_warnings` around the call would be over too early: the filter stays. It is set at every trace because
    # test runners restore the filters between tests; setting it again is free.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
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


@dataclasses.dataclass(frozen=True)
class AttentionTiles:
    """Tiling of an attention kernel."""

    queries: int  # query rows of a program, a power of two from 16 that divides the query block
    keys: int  # tokens of a tile of K and V, a power of two from 16 that divides the key block
    warps: int  # warps of a program
    stages: int  # tiles of K and V in flight in a program


def attention_tiles(query_block: int, key_block: int, head_dim: int, dtype: Any) -> AttentionTiles:
    """Tiles that let two programs share a multiprocessor: one has the matrix units while the other takes powers."""
    itemsize = jnp.dtype(dtype).itemsize
    queries, most_keys = math.gcd(query_block, 128), math.gcd(key_block, 128)
    if itemsize == 4:
        tile, warps = full_precision_tile(head_dim)
        return AttentionTiles(min(queries, tile), min(most_keys, tile), warps, stages=1)
    for programs, keys in ((2, 64), (1, 64), (1, 32), (1, 16)):
        if programs * (queries + 4 * keys) * head_dim * itemsize <= shared_memory():
            break
    # Of scores and output a thread of 4 warps holds a row: past d = 128 its registers run out.
    warps = 4 if programs == 2 or queries < 128 else 8
    # A tile of half the rows leaves room for a third stage, which pays.
    return AttentionTiles(queries, min(most_keys, keys), warps, stages=3 if queries < 128 and programs == 2 else 2)


def check_supported(operation: str, head_dim: int, *arrays: Any, block_size: int = 16) -> None:
    """Raises NotImplementedError for unsupported calls, so that backend "auto" moves on."""
    dtypes = {jnp.dtype(array.dtype) for array in arrays}
    is_one = len(dtypes) <= 1 and dtypes <= {jnp.dtype(dtype) for dtype in _DTYPES}
    for fits, given, must in (
        (head_dim in (16, 32, 64, 128, 256), f"head dimension {head_dim}", "a power of two from 16 to 256"),
        (is_one, f"types {sorted(map(str, dtypes))}", "one of bfloat16, float16 and float32"),
        (block_size % 16 == 0, f"block_size = {block_size}", "a multiple of 16, the least tile"),
    ):
        require(fits, f"{operation} on Triton: {given}: must be {must}", Unsupported)


def dot(a: Array, b: Array, *, transposed: bool = False) -> Array:
    """a b, or a b^T, summed in float32 or, of int8, in int32, in a kernel; float32 is not rounded to TF32."""
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    summed = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(a, b, contracted, precision=precision(a.dtype), preferred_element_type=summed)


def scaled_exp2(
    x: Float32[Array, "*s"], scale: float, bias: Float32[Array, "*s"], *, interpret: bool
) -> Float32[Array, "*s"]:
    """2 ** (x * scale + bias), where results under 2**-126 may be 0.

    Softmax kernels spend half their time here. What XLA makes of the plain expression takes five instructions: it
    neither fuses the multiplication and addition nor flushes denormal numbers to zero, as the plain instruction does.
    """
    if interpret:
        return jnp.exp2(x * scale + bias)
    factor, results = f"0f{np.float32(scale).view(np.uint32):08X}", [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    code = f"fma.rn.ftz.f32 $0, $1, {factor}, $2; ex2.approx.ftz.f32 $0, $0;"
    options: Any = {"constraints": "=f,f,f", "pack": 1, "result_shape_dtypes": results}
    return pltriton.elementwise_inline_asm(code, args=[x, bias], **options)[0]


def online_softmax_step(
    q: tuple[Array, ...],
    state: PartedState,
    k: tuple[Array, ...],
    v: tuple[Array, ...],
    visible: Array | None = None,  # which scores count; None for all
    exponents: tuple[Array, Array] | None = None,  # powers of two to multiply each key and each value by
    *,
    bias: Array | None = None,  # finite additions to the logits of each key
    interpret: bool,
) -> PartedState:
    """Takes one tile into the state of every row; the last axis of queries, keys, values and output is cut into parts.

    A row must have a finite largest score when this returns: see a token of the tile, or have seen one before, or
    begin at one whose product with the scale is exact, a power of two, above MASKED.
    """
    out, peak, weight = state
    scale = LOG2E / math.sqrt(sum(part.shape[1] for part in q))
    power = partial(scaled_exp2, scale=scale, interpret=interpret)
    products = [dot(*parts, transposed=True) for parts in zip(q, k, strict=True)]
    scores = sum(products[1:], products[0])
    if exponents is not None:
        scores = scores * power_of_two(exponents[0])[None]
    if bias is not None:
        scores = scores + (bias * (LOG2E / scale))[None]
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
    shift = -scale * new_peak
    decay = power(peak, bias=shift)
    weights = power(scores, bias=jnp.broadcast_to(shift[:, None], scores.shape))
    shares, factor = (weights, None) if exponents is None else _within_float16(weights, exponents[1])
    added = [dot(shares.astype(part.dtype), part) for part in v]
    if factor is not None:
        added = [part * factor for part in added]
    out = tuple(part * decay[:, None] + more for part, more in zip(out, added, strict=True))
    return out, new_peak, weight * decay + jnp.sum(weights, axis=1)


def _within_float16(weights: Array, exponents: Array) -> tuple[Array, Array]:
    """Weights times 2^(exponents - their maximum), in float16's range; and the factor that remains."""
    largest = jnp.max(exponents)
    relative = jnp.maximum(exponents - largest, LEAST_EXPONENT)
    return weights * power_of_two(relative + _WEIGHT_BITS)[None], power_of_two(largest - _WEIGHT_BITS)


def codes_as_float16(words: Array, *, interpret: bool) -> tuple[Array, Array]:
    """Both halves of the e4m3 codes in words (`kv.EightBits`) as float16 numbers.

    One instruction converts both codes of a word, one puts the same halves of two words side by side. What XLA makes of
    `unpack` takes four times as many.
    """
    if interpret:
        low, high = (half * jnp.float16(2**UNPACKED) for half in unpack(words))
        return low, high
    convert = ".reg .b16 a, b; .reg .b32 c, d; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 c, a; cvt.rn.f16x2.e4m3x2 d, b;"
    codes = [f"{{ {convert} prmt.b32 $0, c, d, {halves}; }}" for halves in ("0x5410", "0x7632")]
    results = [jax.ShapeDtypeStruct(words.shape, jnp.float16)]
    options: Any = {"constraints": "=r,r", "pack": 2, "result_shape_dtypes": results}
    low, high = (pltriton.elementwise_inline_asm(code, args=[words], **options)[0] for code in codes)
    return low, high


def load_rows(ref: Any, inside: Array | None) -> Array:
    """A tile; rows that are not `inside` are not read and give zeros, so that NaNs cannot spread."""
    return ref[...] if inside is None else pltriton.load(ref, mask=inside, other=jnp.zeros((), ref.dtype))
