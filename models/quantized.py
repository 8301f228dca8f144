"""Projections in eight bits: weights with a scale for each output channel, and products of tokens with them.

A weight is stored as codes `[*out, in]` and a float32 scale `[*out]`: W = codes * scale. The codes are e4m3 ("fp8") or
int8 ("int8"). Products have two forms. Few tokens take as long as it takes to read the weights: these are converted
inside of the product, exactly. Many tokens take as long as the product: with e4m3 weights their activations are
quantized too, each token with a scale of its own, and the product is one of e4m3 numbers, which on Hopper takes half
the time. int8 weights are always converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from tca_jax.models.projections import dot_general, precision_of

#: What weights are stored in, by the name that users give.
WEIGHTS = MappingProxyType({"fp8": jnp.dtype(jnp.float8_e4m3fn), "int8": jnp.dtype(jnp.int8)})

# Tokens up to which weights are converted inside of a product. On an H200 a product of e4m3 numbers overtakes it there.
_FEW_TOKENS = 64
_LEAST_SCALE = 1e-30  # of vectors of zeros, too: its inverse is finite


def is_quantized(dtype: DTypeLike) -> bool:
    """Whether weights of this dtype have scales."""
    return jnp.dtype(dtype) in WEIGHTS.values()


def largest_code(dtype: DTypeLike) -> float:
    """The largest number of an eight-bit dtype: 448 for e4m3, 127 for int8."""
    dtype = jnp.dtype(dtype)
    return float(jnp.finfo(dtype).max if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max)


def scale_of(x: Float[Array, "*rows n"], dtype: DTypeLike) -> Float32[Array, "*rows"]:
    """The scale of each vector along the last axis, with which its largest entry has the largest code."""
    return jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32) / largest_code(dtype)


def quantize(
    x: Float[Array, "*rows n"], dtype: DTypeLike, scale: Float32[Array, "*rows"] | None = None
) -> tuple[Num[Array, "*rows n"], Float32[Array, "*rows"]]:
    """Codes of vectors along the last axis, and scales; x is nearly codes * scale.

    Args:
        x: Vectors.
        dtype: Of the codes: e4m3 or int8.
        scale: The scales; None for `scale_of(x)`.
    """
    scale = jnp.maximum(scale_of(x, dtype) if scale is None else scale, _LEAST_SCALE)
    most = largest_code(dtype)
    codes = jnp.clip(x.astype(jnp.float32) * (1 / scale)[..., None], -most, most)  # out of range, e4m3 is NaN
    if jnp.issubdtype(dtype, jnp.integer):
        codes = jnp.round(codes)
    return codes.astype(dtype), scale


class QuantizedLinear(nnx.Module):
    """y = x W^T + b with W in eight bits; the counterpart of `nnx.LinearGeneral`, and as such has no gradient of W.

    Args:
        in_features: Width of x.
        out_features: Shape of y.
        bias: Whether there is one.
        dtype: Dtype of products of 16 or 32 bits, and of the result.
        param_dtype: Dtype of the codes.
        init: `(key, shape, dtype)` to initial weights, which are quantized.
        finish: Applied to products: over a contracted axis of which devices have parts, their sum.
        rngs: Keys.
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
    ) -> None:
        out = (out_features,) if isinstance(out_features, int) else out_features
        codes, scale = quantize(init(rngs.params(), (*out, in_features), jnp.float32), param_dtype)
        self.codes, self.scale = nnx.Param(codes), nnx.Param(scale)
        self.bias = nnx.Param(jnp.zeros(out, dtype)) if bias else None
        self.dtype, self.finish = jnp.dtype(dtype), finish

    def __call__(self, x: Float[Array, "*tokens n"]) -> Float[Array, "*tokens *out"]:
        return self.product(x, self.codes[...], self.scale[...], None if self.bias is None else self.bias[...])

    def product(
        self,
        x: Float[Array, "*tokens n"],
        codes: Num[Array, "*out n"],
        scale: Float32[Array, "*out"],
        bias: Array | None,
    ) -> Float[Array, "*tokens *out"]:
        """The product with some of the weights, or all."""
        y = self.finish(quantized_product(x.astype(self.dtype), codes, scale))
        return y if bias is None else y + bias.astype(self.dtype)


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
    if math.prod(x.shape[:-1]) <= _FEW_TOKENS or jnp.issubdtype(codes.dtype, jnp.integer):
        # XLA converts the weights as fast as it reads them from two rows on.
        precision = precision_of(x.dtype)
        y = dot_general(x, codes.astype(x.dtype), axes, few_weights=codes.size + 1, precision=precision)
        return (y.astype(jnp.float32) * scale).astype(x.dtype)
    x_codes, x_scale = quantize(x, codes.dtype)
    # Bare, with the sum in bfloat16 or float32, or XLA makes no product of e4m3 numbers of it.
    wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    y = jax.lax.dot_general(x_codes, codes, axes, preferred_element_type=wide)
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
