"""Argument checks that the operations share; all raise before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tca_jax.errors import UserError, UserTypeError

#: What public functions take for an array.
AnyArray = jax.Array | np.ndarray


def check_shape(argument: str, array: Any, dims: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Binds an array's sizes to dimension names ("B L Hkv d"), against `sizes` bound so far; returns all of them."""
    shape, names = np.shape(array), dims.split()
    bound = {**dict(zip(names, shape, strict=False)), **sizes}
    if shape != tuple(bound.get(name) for name in names):
        expected = ", ".join(f"{name} = {sizes[name]}" if name in sizes else name for name in names)
        raise UserError(f"{argument} has shape {shape}: must be [{expected}]")
    return bound


def check_shapes(arrays: Mapping[str, tuple[Any, str]]) -> dict[str, int]:
    """Checks named arrays against each other (argument name -> array and its dimensions, in order).

    Returns the size of every dimension name. Query heads "Hq" must be a positive multiple of the KV heads "Hkv".
    """
    sizes: dict[str, int] = {}
    for name, (array, dims) in arrays.items():
        sizes = check_shape(name, array, dims, sizes)
    if {"Hq", "Hkv"} <= sizes.keys():
        check_heads(sizes)
    return sizes


def check_heads(sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless the query heads "Hq" are a positive multiple of the KV heads "Hkv"."""
    heads, kv_heads = sizes["Hq"], sizes["Hkv"]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise UserError(
            f"{heads} query heads and {kv_heads} KV heads: the former must be a positive multiple of the latter"
        )


def check_blocks(block_size: int, *, window: int | None = None) -> None:
    """Raises ValueError unless `block_size` is positive and `window` a positive multiple of it."""
    if block_size < 1:
        raise UserError(f"block_size = {block_size}: must be at least 1")
    if window is not None and (window < block_size or window % block_size):
        raise UserError(f"window = {window}: must be a positive multiple of block_size = {block_size}")


def check_whole_blocks(name: str, sizes: Mapping[str, int], block_size: int) -> None:
    """Raises ValueError unless an array's axis "nb" has one entry for each whole block of the length "L"."""
    whole = sizes["L"] // block_size
    if sizes["nb"] != whole:
        raise UserError(
            f"{name} has {sizes['nb']} blocks: must be L // block_size = {sizes['L']} // {block_size} = {whole}"
        )


def as_int32(name: str, values: Any) -> Array:
    """`values` as int32, whatever integer type they have; TypeError for anything that is no integer."""
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise UserTypeError(f"{name} has dtype {values.dtype}: must be integers")
    return values.astype(jnp.int32)


def check_range(name: str, values: Any, low: int, high: int) -> None:
    """Raises ValueError unless all `values` lie in [low, high]; values that are traced pass unseen."""
    if isinstance(values, jax.core.Tracer):
        return
    values = np.asarray(values)
    if values.size and not (low <= values.min() and values.max() <= high):
        raise UserError(f"{name} = {values.tolist()}: must lie in [{low}, {high}]")
