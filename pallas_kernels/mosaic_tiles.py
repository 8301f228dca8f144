"""Tiles in the kernels on Pallas Mosaic GPU: in shared memory, in global memory, and as operands of wgmma."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(dtype: Any) -> Callable[[tuple[int, ...]], Any]:
    """Shared memory of a shape, laid out as TMA fills it and wgmma reads it."""
    return partial(plgpu.SMEM, dtype=dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def aligned(first: Any, count: int) -> Any:
    """A slice that starts on a multiple of its size, which the compiler cannot know."""
    return pl.ds(pl.multiple_of(first, count), count)


def iotas(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Row and column of every place of a product."""
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=plgpu.Layout.WGMMA) for i in range(2))
    return rows, columns


def transposed(ref: Any) -> Any:
    """A tile as the transposed operand of a product."""
    # JAX 0.10 has only the function, 0.11 deprecates it for the method.
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))
