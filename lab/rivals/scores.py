"""Attention of a prompt's last queries, and the highest of many values.

How many are highest is data: the least of them is found bit by bit, nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from tca_jax.pallas_kernels.numerics import scaled_scores


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


def last_attention(
    q: Float[Array, "B O G d"], k: Float[Array, "B L d"], lengths: Int[Array, " B"]
) -> Float32[Array, "B G O L"]:
    """Causal attention of the last O queries of a KV head's group; 0 for queries at negative positions."""
    queries = q.shape[1]
    places = lengths[:, None, None] - queries + jnp.arange(queries)[:, None]  # [B, O, 1]
    seen = (jnp.arange(k.shape[1]) <= places)[:, None]
    return jax.nn.softmax(scaled_scores("bogd,bld->bgol", q, k), axis=-1, where=seen)


def diagonal_sums(attention: Float32[Array, "B G O L"], lengths: Int[Array, " B"]) -> Float32[Array, "B G L"]:
    """Sums along the diagonals: entry o adds up the attention of the last queries on the token o before each."""
    *lead, queries, length = attention.shape
    # Counted back from the row's last token, query a sees the token o before its own at u = o + (O - 1 - a): rows
    # shifted right by their number line up.
    places = (lengths[:, None] - 1 - jnp.arange(length))[:, None, None]
    reversed_ = jnp.where(places >= 0, jnp.take_along_axis(attention, jnp.maximum(places, 0), axis=-1), 0)
    flat = jnp.pad(reversed_, [(0, 0)] * (len(lead) + 1) + [(0, queries)]).reshape(*lead, -1)
    shifted = flat[..., : queries * (length + queries - 1)].reshape(*lead, queries, length + queries - 1)
    return shifted.sum(axis=-2)[..., queries - 1 :]
