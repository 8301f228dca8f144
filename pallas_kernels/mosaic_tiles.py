"""Tiles of the Mosaic kernels: shared memory as wgmma reads it, and values of rows in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # query rows of a warpgroup: one wgmma tile
TILE = 128  # tokens of a tile of keys


def swizzled(*shape: int, dtype: Any) -> Any:
    """Shared memory as TMA fills it and wgmma reads it, in rows of up to 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    width = min(128, shape[-1] * itemsize)
    swizzle = plgpu.TilingTransform((8, width // itemsize)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM(shape, dtype, transforms=swizzle)


def of_rows(value: float) -> Any:
    """A value for each row of a warpgroup."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def load_rows(ref: Any) -> Any:
    """Values of the rows, from device memory."""
    return plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def across(of_rows: Any, like: Any) -> Any:
    """A value for each row, in all columns."""
    return lax.broadcast_in_dim(of_rows, like.shape, [0])


def aligned(first: Any) -> Any:
    """A tile's slice: it starts on a multiple of its size, which the compiler cannot know."""
    return pl.ds(pl.multiple_of(first, TILE), TILE)


def transposed(ref: Any) -> Any:
    """A tile as the transposed operand of a product."""
    # JAX 0.10 has only the function, 0.11 deprecates it for the method.
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11) else plgpu.transpose_ref(ref, (1, 0))
