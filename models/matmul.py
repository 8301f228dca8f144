"""Matrix products of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

_FEW_WEIGHTS = 10_000_000  # with fewer, XLA computes a vector's product as a sum of elementwise products


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    *,
    finish: Callable[[Array], Array] | None = None,
    **options: Any,
) -> Array:
    """`jax.lax.dot_general` without batch axes; on an NVIDIA GPU, one row times few weights is computed as two rows.

    XLA computes a vector times a small matrix as a sum of elementwise products: it rounds each product to the result's
    dtype and writes all of them to memory before it adds them. This affects the projections of models of up to three
    billion parameters, and those of larger models that are split over devices. Two rows stay a matrix product, which
    reads the weights once and adds in float32; the second row costs nothing, because a tile has sixteen.

    Args:
        lhs: The rows.
        rhs: The weights.
        dimension_numbers: As for `jax.lax.dot_general`; no batch axes.
        finish: Applied to the product while it still has both rows.
        **options: Of `jax.lax.dot_general`.
    """
    (contracted, _), _ = dimension_numbers
    free = [i for i in range(lhs.ndim) if i not in contracted]

    def product(lhs: Array, rhs: Array) -> Array:
        result = jax.lax.dot_general(lhs, rhs, dimension_numbers, **options)
        return result if finish is None else finish(result)

    def of_two_rows(lhs: Array, rhs: Array) -> Array:
        return product(jnp.repeat(lhs, 2, free[0]), rhs)[:1]

    if not free or any(lhs.shape[i] > 1 for i in free) or rhs.size >= _FEW_WEIGHTS:
        return product(lhs, rhs)
    return jax.lax.platform_dependent(lhs, rhs, cuda=of_two_rows, default=product)
