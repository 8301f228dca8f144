"""Keys and values as the kernels hold them: a pool of selected tokens, and a ring of local ones (DESIGN section 5)."""

from __future__ import annotations

from typing import NamedTuple

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
