"""Keys and values as the kernels hold them: a pool of selected tokens, and a ring of local ones."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

#: Regions of the pool start on multiples of this, so that tiles and TMA loads are aligned.
REGION_ALIGNMENT = 128


class Pool(NamedTuple):
    """Selected tokens of all (row, KV head) regions, flat, each region sorted by position.

    Attributes:
        k: Keys `[P, d]`.
        v: Values `[P, d]`.
        offsets: First pool row of every region, int32 `[B, Hkv]`.
        lengths: Tokens in every region, int32 `[B, Hkv]`.
    """

    k: Float[Array, "P d"]
    v: Float[Array, "P d"]
    offsets: Int[Array, "B Hkv"]
    lengths: Int[Array, "B Hkv"]


class Ring(NamedTuple):
    """The latest tokens of every head: position p lies in slot p mod R.

    Attributes:
        k: Keys `[B, Hkv, R, d]`.
        v: Values `[B, Hkv, R, d]`.
    """

    k: Float[Array, "B Hkv R d"]
    v: Float[Array, "B Hkv R d"]


def pool_shapes(pool: Pool) -> dict[str, tuple[Any, str]]:
    """A pool's arrays and their dimensions, as `checks.check_shapes` takes them."""
    return {
        "pool.k": (pool.k, "P d"),
        "pool.v": (pool.v, "P d"),
        "pool.offsets": (pool.offsets, "B Hkv"),
        "pool.lengths": (pool.lengths, "B Hkv"),
    }


def ring_shapes(ring: Ring) -> dict[str, tuple[Any, str]]:
    """A ring's arrays and their dimensions, as `checks.check_shapes` takes them."""
    return {"ring.k": (ring.k, "B Hkv R d"), "ring.v": (ring.v, "B Hkv R d")}
