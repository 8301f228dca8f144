"""The highest values of rows, numbers as data: a search for the least of them bit by bit, without sorting."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, UInt32


def highest(
    values: Float32[Array, "*lead n"], counts: Int[Array, "*lead"], among: Bool[Array, "*#lead n"]
) -> Bool[Array, "*lead n"]:
    """Marks the `counts` highest values `among` those of each row, all if fewer; ties go to the lower index."""
    keys = ordered(values, among)
    least = threshold(keys[..., :1], lambda key: total(keys >= key) >= counts[..., None])
    return _first(keys, least, lambda tied, above: counts[..., None] - total(above))


def covering(
    values: Float32[Array, "*lead n"],
    mass: Float32[Array, "*lead"],
    among: Bool[Array, "*#lead n"],
    *,
    reach: bool = True,
) -> Bool[Array, "*lead n"]:
    """Marks the fewest highest values of each row that reach a mass, or stay within it without `reach`."""
    keys, mass = ordered(values, among), mass[..., None]

    def room(tied: Array, above: Array) -> Array:
        value = jnp.max(jnp.where(tied, values, 0), axis=-1, keepdims=True)
        times = (mass - total(above, values)) / jnp.maximum(value, jnp.finfo(jnp.float32).tiny)
        return jnp.ceil(times) if reach else jnp.floor(times)

    return _first(keys, threshold(keys[..., :1], lambda key: total(keys >= key, values) >= mass), room)


def ordered(values: Float32[Array, "*lead n"], among: Bool[Array, "*#lead n"]) -> UInt32[Array, "*lead n"]:
    """Integers above 0 in the order of the values `among`; 0 for others."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(among, jnp.where(bits >= sign, ~bits, bits | sign), 0)


def threshold(like: UInt32[Array, "*s"], enough: Callable[[Array], Array]) -> UInt32[Array, "*s"]:
    """The highest keys, of the shape of `like`, from which on the keys are `enough`; 0 where all are not."""

    def step(i: Array, least: Array) -> Array:
        candidate = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, least)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros_like(like))


def total(marks: Bool[Array, "*lead n"], values: Array | int = 1) -> Array:
    """The number of marks of each row, `[*lead, 1]`, or the sum of the marked values."""
    return jnp.where(marks, values, 0).sum(axis=-1, keepdims=True)


def _first(
    keys: UInt32[Array, "*lead n"], least: UInt32[Array, "*lead 1"], room: Callable[..., Array]
) -> Bool[Array, "*lead n"]:
    """All keys above the least, and of those equal to it the first `room(tied, above)`."""
    above, tied = keys > least, (keys == least) & (keys > 0)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= room(tied, above)))
