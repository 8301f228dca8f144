"""Precision and masking rules that all XLA implementations share; sizes divided up and rounded up."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

MASKED = -1e30  # score of a masked token: finite, so that a row of masked tokens gives zeros and never NaN
_T = TypeVar("_T")


def precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """Matrix products of float32 operands are true float32 on every device (no TF32)."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def scaled_scores(subscripts: str, q: Float[Array, " *Q"], k: Float[Array, " *K"]) -> Float32[Array, " *S"]:
    """q k^T / sqrt(d) in float32, the contraction named by `subscripts`; d is the last axis of `q`."""
    scores = jnp.einsum(subscripts, q, k, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    return scores * (1 / math.sqrt(q.shape[-1]))


def weighted_sum(subscripts: str, weights: Float[Array, " *W"], v: Float[Array, " *V"]) -> Float32[Array, " *O"]:
    """Weights times values, summed in float32; the weights take the values' type, as tensor cores want."""
    weights = weights.astype(v.dtype)
    return jnp.einsum(subscripts, weights, v, precision=precision(v.dtype), preferred_element_type=jnp.float32)


def varying_like(values: _T, *operands: Any) -> _T:
    """The values; under `shard_map`, as values that vary over the mesh axes that any of the operands varies over.

    What a loop over the operands begins with must be such, and so must the results of a Mosaic kernel, which JAX
    takes for the same on all devices.
    """
    axes = varying_axes(operands)
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - varying_axes(x)), to="varying"), values)


def varying_axes(operands: Any) -> frozenset[str]:
    """Mesh axes that any array of a pytree varies over; none outside `shard_map`."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(operands)))


def zero_padding(x: Float[Array, "B L H d"], lengths: Int[Array, " B #H"]) -> Float[Array, "B L H d"]:
    """The array, with zeros past the length of each row and head."""
    return jnp.where((jnp.arange(x.shape[1])[:, None] < lengths[:, None])[..., None], x, 0)


def cdiv(value: int, by: int) -> int:
    """ceil(value / by)."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return cdiv(value, multiple) * multiple


def shared_size(value: int) -> int:
    """The least 9 * 2 ** n that is at least `value`: sizes that programs of other lengths share.

    A prompt that fills a power of two has room for an answer then.
    """
    return 9 << max(0, (cdiv(value, 9) - 1).bit_length()) if value else 0
