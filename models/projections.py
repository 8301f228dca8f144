"""How projections are computed: those of long prompts in chunks of tokens, in preallocated buffers; a token as two.

FP8 weights are stored as e4m3 codes `[*out, in]` and a float32 scale `[*out]`: W = codes * scale. Products have two
forms. Products of few tokens take the time of reading the weights, which are converted exactly inside the product.
Products of many tokens are bound by compute: each token is quantized with its own scale, and the product is one of e4m3
numbers, which on Hopper takes half the time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST_CODE = float(jnp.finfo(E4M3).max)  # 448
WEIGHTS = MappingProxyType({"fp8": E4M3})  # what weights are quantized to, by the user's names

# Tokens up to which weights are converted inside of a product. On an H200 a product of e4m3 numbers overtakes it there.
_FEW_TOKENS = 64
# What XLA does by default, but by name: it then asks cuBLASLt alone, and does not compile slower kernels for 50 s.
_CUBLASLT = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
_LEAST_SCALE = 1e-30  # of vectors of zeros, too: its inverse is finite


def by_chunks(function: Any, sizes: tuple[int, ...], *inputs: Array, in_place: bool = False, room: int = 0) -> Any:
    """`function(*inputs)`, where the function treats every token independently, a chunk of tokens at a time.

    At 128K tokens the intermediates of the MLP would outweigh the weights. The function takes and returns arrays with
    any leading token axes. `sizes` are the tokens of the chunks in one step of the loop: none depends on another, so
    the compiler may overlap them. With `in_place`, results overwrite the first input. `room` zeros follow one row's.
    """
    batch, length = inputs[0].shape[:2]
    tokens, step = batch * length, sum(sizes)
    if tokens <= max(sizes):
        out = function(*inputs)
        return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, room), *[(0, 0)] * (x.ndim - 2)]), out) if room else out
    flat_inputs = [x.reshape(-1, *x.shape[2:]) for x in inputs]

    def of_chunk(start: Any, size: int, results: Any = None) -> Any:
        given = [results, *flat_inputs[1:]] if in_place and results is not None else flat_inputs
        return function(*(jax.lax.dynamic_slice_in_dim(x, start, size) for x in given))

    def write(start: Any, sizes: Sequence[int], results: Any) -> Any:
        """The results with those of the chunks of one step, which begins at token `start`."""
        starts = list(itertools.accumulate(sizes[:-1], initial=start))
        chunks = [of_chunk(*each, results) for each in zip(starts, sizes, strict=True)]
        for start, chunk in zip(starts, chunks, strict=True):
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
            results = jax.tree.map(put, results, chunk)
        return results

    def unwritten(x: Array) -> Array:
        """Memory for all tokens' results like x: under `jax.shard_map` a loop's state varies over its mesh axes."""
        axes = jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(jax.lax.empty((tokens + room, *x.shape[1:]), x.dtype), tuple(axes), to="varying")

    # The first token's results are dead code: only their types count.
    results: Any = flat_inputs[0] if in_place else jax.tree.map(unwritten, of_chunk(0, 1))
    steps = tokens // step
    results = jax.lax.fori_loop(0, steps, lambda i, results: write(i * step, sizes, results), results)
    if rest := tokens - steps * step:
        complete = list(itertools.takewhile(lambda end: end < rest, itertools.accumulate(sizes)))
        results = write(steps * step, [*sizes[: len(complete)], rest - sum(sizes[: len(complete)])], results)
    return jax.tree.map(lambda x: x.at[tokens:].set(0).reshape(batch, length + room, *x.shape[1:]), results)


def single_twice(x: Num[Array, "B n *rest"]) -> Num[Array, "B m *rest"]:
    """On a GPU, the only token of the only row twice; other tokens as they are.

    XLA computes the norm of a single token by two kernels, and its product with a small matrix, or one in eight bits,
    as a sum of elementwise products, each of them rounded and written to memory. Those of two tokens are one kernel
    each, which reads the weights once and adds in float32. The second costs nothing: a tile has sixteen.
    """
    if x.shape[:2] != (1, 1) or jax.default_backend() != "gpu":
        return x
    flat = jnp.broadcast_to(x.reshape(1, 1, -1), (1, 2, x.size))  # products take this in, but not one of more axes
    return flat.reshape(1, 2, *x.shape[2:])


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """float32 means float32, not the TF32 that GPUs default to."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def is_quantized(dtype: DTypeLike) -> bool:
    """Whether weights of this dtype have scales."""
    return jnp.dtype(dtype) == E4M3


def quantize(
    x: Float[Array, "*rows n"], scale: Float32[Array, "*rows"] | None = None
) -> tuple[Num[Array, "*rows n"], Float32[Array, "*rows"]]:
    """E4M3 codes of vectors along the last axis, and scales; x is nearly codes * scale.

    By default the largest entry of a vector has the largest code.
    """
    scale = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32) / LARGEST_CODE if scale is None else scale
    scale = jnp.maximum(scale, _LEAST_SCALE)
    # Out of range, e4m3 is NaN.
    codes = jnp.clip(x.astype(jnp.float32) * (1 / scale)[..., None], -LARGEST_CODE, LARGEST_CODE)
    return codes.astype(E4M3), scale


class Linear(nnx.Module):
    """y = x W + b in `dtype`, with W `[in, *out]`, or in e4m3 `[*out, in]` with scales and without a gradient.

    `init` gives initial weights; `finish` sums products over the devices.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        bias: bool,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        init: Callable[..., Array],
        finish: Callable[[Array], Array],
        rngs: nnx.Rngs,
        preferred_element_type: DTypeLike | None = None,
    ) -> None:
        out = (out_features,) if isinstance(out_features, int) else out_features
        self.quantized = is_quantized(param_dtype)
        if self.quantized:
            codes, scale = quantize(init(rngs.params(), (*out, in_features), jnp.float32))
            self.codes, self.scale = nnx.Param(codes), nnx.Param(scale)
        else:
            self.kernel = nnx.Param(init(rngs.params(), (in_features, *out), param_dtype))
        self.bias = nnx.Param(jnp.zeros(out, dtype if self.quantized else param_dtype)) if bias else None
        self.dtype, self.finish, self.result = jnp.dtype(dtype), finish, preferred_element_type

    def __call__(self, x: Float[Array, "*tokens n"]) -> Float[Array, "*tokens *out"]:
        x = x.astype(self.dtype)
        if self.quantized:
            y, out = self.finish(quantized_product(x, self.codes[...], self.scale[...])), self.scale.shape
        else:  # flat, or cuBLAS does not add the bias
            kernel, axes = self.kernel[...].astype(self.dtype), (((x.ndim - 1,), (0,)), ((), ()))
            options: Any = {"precision": precision_of(self.dtype), "preferred_element_type": self.result}
            y = self.finish(jax.lax.dot_general(x, kernel.reshape(len(kernel), -1), axes, **options))
            out = kernel.shape[1:]
        flat = y.reshape(*x.shape[:-1], -1)
        flat = flat if self.bias is None else flat + self.bias[...].astype(self.dtype).reshape(-1)
        return flat.reshape(*x.shape[:-1], *out)


def quantized_product(
    x: Float[Array, "*tokens n"], codes: Num[Array, "*out n"], scale: Float32[Array, "*out"]
) -> Float[Array, "*tokens *out"]:
    """x W^T in the dtype of x; the derivative by x is that of the product with W = codes * scale.

    Under `jax.shard_map` each device may have other weights: the derivative is then summed over the devices.
    """
    axes = jax.typeof(codes).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return _product(jax.lax.pcast(x, tuple(axes), to="varying"), codes, scale)


@jax.custom_vjp
def _product(x: Array, codes: Array, scale: Array) -> Array:
    axes = (((x.ndim - 1,), (codes.ndim - 1,)), ((), ()))
    if math.prod(x.shape[:-1]) <= _FEW_TOKENS:
        # XLA converts the weights as fast as it reads them, for two tokens or more.
        y = jax.lax.dot_general(x, codes.astype(x.dtype), axes, precision=precision_of(x.dtype))
        return (y.astype(jnp.float32) * scale).astype(x.dtype)
    x_codes, x_scale = quantize(x)
    # Bare, with the sum in bfloat16 or float32, or XLA makes no product of e4m3 numbers of it.
    wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    product = functools.partial(jax.lax.dot_general, dimension_numbers=axes, preferred_element_type=wide)
    y = jax.lax.platform_dependent(
        x_codes, codes, cuda=functools.partial(product, precision=_CUBLASLT), default=product
    )
    scales = x_scale.reshape(*x_scale.shape, *(1 for _ in scale.shape)) * scale
    return (y.astype(jnp.float32) * scales).astype(x.dtype)


def _forward(x: Array, codes: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, codes, scale), (codes, scale)


def _backward(weights: tuple[Array, Array], slope: Array) -> tuple[Array, None, None]:
    """The codes of x have no derivative, for they are steps; that of x itself is taken in their place."""
    codes, scale = weights
    out = tuple(range(scale.ndim))
    tokens = tuple(range(slope.ndim - scale.ndim, slope.ndim))
    scaled = (slope.astype(jnp.float32) * scale).astype(slope.dtype)
    x = jax.lax.dot_general(
        scaled, codes.astype(slope.dtype), ((tokens, out), ((), ())), precision=precision_of(slope.dtype)
    )
    return x, None, None


_product.defvjp(_forward, _backward)
