"""Argument checks that the operations share; all raise before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tca_jax.errors import UserTypeError, check_integer, require

AnyArray = jax.Array | np.ndarray  # what public functions take for an array


def check_shape(argument: str, array: Any, dims: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Binds an array's sizes to dimension names ("B L Hkv d"), against `sizes` bound so far; returns all of them."""
    shape, names = np.shape(array), dims.split()
    bound = {**dict(zip(names, shape, strict=False)), **sizes}
    expected = ", ".join(f"{name} = {sizes[name]}" if name in sizes else name for name in names)
    fits = shape == tuple(bound.get(name) for name in names)
    require(fits, f"{argument} has shape {shape}: must be [{expected}]")
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
    must = "the former must be a positive multiple of the latter"
    require(is_multiple(heads, kv_heads), f"{heads} query heads and {kv_heads} KV heads: {must}")


def is_multiple(size: int, of: int) -> bool:
    """Whether `size` is a positive multiple of a positive number."""
    return size > 0 and of > 0 and size % of == 0


def check_blocks(block_size: int, **multiples: int) -> None:
    """Raises ValueError unless `block_size` is positive and the others, such as `window`, positive multiples of it."""
    check_integer("block_size", block_size, at_least=1)
    for name, size in multiples.items():
        fits = is_multiple(size, block_size)
        require(fits, f"{name} = {size}: must be a positive multiple of block_size = {block_size}")


def check_whole_blocks(name: str, sizes: Mapping[str, int], block_size: int) -> None:
    """Raises ValueError unless an array's axis "nb" has one entry for each full block of axis "L"."""
    whole, length = sizes["L"] // block_size, sizes["L"]
    must = f"must be L // block_size = {length} // {block_size} = {whole}"
    require(sizes["nb"] == whole, f"{name} has {sizes['nb']} blocks: {must}")


def as_int32(name: str, values: Any) -> Array:
    """`values` as int32, whatever integer type they have; TypeError for anything that is no integer."""
    values = jnp.asarray(values)
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    require(is_integer, f"{name} has dtype {values.dtype}: must be integers", UserTypeError)
    return values.astype(jnp.int32)


def check_range(name: str, values: Any, low: int, high: int) -> None:
    """Raises ValueError unless all `values` are in [low, high]; traced values pass unchecked."""
    if isinstance(values, jax.core.Tracer):
        return
    values = np.asarray(values)
    require(((low <= values) & (values <= high)).all(), f"{name} = {values.tolist()}: must lie in [{low}, {high}]")
