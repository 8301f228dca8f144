"""Keys and values that were selected from a prompt, as selection and prefill attention hold them."""

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


def pool_shapes(pool: Pool) -> dict[str, tuple[Any, str]]:
    """The arrays of a pool and their dimensions, as `checks.check_shapes` takes them."""
    return {
        "pool.k": (pool.k, "P d"),
        "pool.v": (pool.v, "P d"),
        "pool.offsets": (pool.offsets, "B Hkv"),
        "pool.lengths": (pool.lengths, "B Hkv"),
    }
