"""Matrix products of the decoder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_FEW_WEIGHTS = 10_000_000  # below that, XLA makes sums of a vector's products


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, *, axis: str | None = None, **options: Any) -> Array:
    """`jax.lax.dot_general` without batch axes; a single row times few weights is, on an NVIDIA GPU, two rows.

    XLA makes a vector times a small matrix a sum of products: it rounds each to the result's dtype and writes them all
    to memory before it adds them. Small are the projections of models of three billion parameters and less, and those
    that devices of a mesh have of larger ones. Two rows it leaves a matrix product, which reads the weights once and
    adds up in float32; the second costs nothing, as a tile has sixteen.

    Args:
        lhs: The rows.
        rhs: The weights.
        dimension_numbers: As `jax.lax.dot_general` takes them; no batch axes.
        axis: Mesh axis over whose devices the product is summed; None for no sum.
        **options: Of `jax.lax.dot_general`.
    """
    (contracted, _), _ = dimension_numbers
    free = [i for i in range(lhs.ndim) if i not in contracted]

    def product(lhs: Array, rhs: Array) -> Array:
        part = jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)
        return part if axis is None else jax.lax.psum(part, axis)

    def of_two_rows(lhs: Array, rhs: Array) -> Array:
        return product(jnp.repeat(lhs, 2, free[0]), rhs)[:1]

    if not free or any(lhs.shape[i] > 1 for i in free) or rhs.size >= _FEW_WEIGHTS:
        return product(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cuda=of_two_rows, default=product)
