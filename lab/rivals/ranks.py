"""The highest of many values, as many as the data ask for, by a search for the least of them: nothing is sorted."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, UInt32


def highest(
    values: Float32[Array, "*lead n"], counts: Int[Array, "*lead"], among: Bool[Array, "*#lead n"]
) -> Bool[Array, "*lead n"]:
    """Marks the `counts` highest values of each row, all where there are fewer; ties go to the lower index.

    Args:
        values: Any but NaN.
        counts: How many, at least 0; data.
        among: Values that can be marked.
    """
    keys = _ordered(values, among)
    ones = jnp.ones_like(keys, jnp.int32)
    return _first(keys, _least(keys, ones, counts), lambda tied, above: counts - above.sum(axis=-1, dtype=jnp.int32))


def covering(
    values: Float32[Array, "*lead n"],
    mass: Float32[Array, "*lead"],
    among: Bool[Array, "*#lead n"],
    *,
    reach: bool = True,
) -> Bool[Array, "*lead n"]:
    """Marks the fewest values of each row, the highest ones, that add up to a mass; ties go to the lower index.

    Args:
        values: At least 0.
        mass: What they must add up to, all of them where they do not; nothing is marked where it is 0 or less.
        among: Values that can be marked.
        reach: Whether the one that reaches the mass belongs to them; else the most values that do not pass it.
    """
    keys = _ordered(values, among)
    weights = jnp.where(among, values, 0)

    def room(tied: Array, above: Array) -> Array:
        value = jnp.max(jnp.where(tied, weights, 0), axis=-1)
        missing = mass - jnp.sum(jnp.where(above, weights, 0), axis=-1)
        times = missing / jnp.maximum(value, jnp.finfo(jnp.float32).tiny)
        return jnp.ceil(times) if reach else jnp.floor(times)

    return _first(keys, _least(keys, weights, mass), room)


def _ordered(values: Float32[Array, "*lead n"], among: Bool[Array, "*#lead n"]) -> UInt32[Array, "*lead n"]:
    """Integers in the values' order, above 0; 0 for those that cannot be marked."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(among, jnp.where(bits >= sign, ~bits, bits | sign), 0)


def _least(keys: UInt32[Array, "*lead n"], weights: Array, target: Array) -> UInt32[Array, "*lead 1"]:
    """The highest key such that it and all above weigh at least the target; 0 where all do not."""

    def step(i: Array, least: Array) -> Array:
        candidate = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= candidate, weights, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= target[..., None], candidate, least)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros_like(keys[..., :1]))


def _first(
    keys: UInt32[Array, "*lead n"], least: UInt32[Array, "*lead 1"], room: Callable[..., Array]
) -> Bool[Array, "*lead n"]:
    """All keys above the least, and of those equal to it the first `room(tied, above)`."""
    above, tied = keys > least, (keys == least) & (keys > 0)
    places = jnp.cumsum(tied, axis=-1, dtype=jnp.int32)
    return above | (tied & (places <= room(tied, above)[..., None]))
