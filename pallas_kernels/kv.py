"""Keys and values as the kernels hold them: a pool of selected tokens, and a ring of local ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from tca_jax.errors import UserError
from tca_jax.pallas_kernels.checks import check_shapes

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


def pool_shapes(pool: Pool, name: str = "pool", rows: str = "P") -> dict[str, tuple[Any, str]]:
    """The arrays of a pool, an argument of that name, and their dimensions, as `checks.check_shapes` takes them."""
    return {
        f"{name}.k": (pool.k, f"{rows} d"),
        f"{name}.v": (pool.v, f"{rows} d"),
        f"{name}.offsets": (pool.offsets, "B Hkv"),
        f"{name}.lengths": (pool.lengths, "B Hkv"),
    }


def ring_shapes(ring: Ring) -> dict[str, tuple[Any, str]]:
    """A ring's arrays and their dimensions, as `checks.check_shapes` takes them."""
    return {"ring.k": (ring.k, "B Hkv R d"), "ring.v": (ring.v, "B Hkv R d")}


def check_cache(
    queries: Mapping[str, tuple[Any, str]],
    pool: Pool,
    growth: Pool | None,
    ring: Ring,
    *,
    capacity: int,
    growth_capacity: int,
) -> dict[str, int]:
    """Checks what attends to a cache, arrays as `checks.check_shapes` takes them, and the cache against each other.

    Returns:
        The size of every dimension name; "P" and "Pg" are the rows of the pools.

    Raises:
        ValueError: a shape does not fit the others, or a pool is smaller than its capacity.
    """
    grown = {} if growth is None else pool_shapes(growth, "growth", "Pg")
    sizes = check_shapes({**queries, **pool_shapes(pool), **grown, **ring_shapes(ring)})
    if not 0 <= capacity <= sizes["P"]:
        raise UserError(f"capacity = {capacity}: must lie in [0, {sizes['P']}], the rows of the pool")
    if growth is None and growth_capacity:
        raise UserError(f"growth_capacity = {growth_capacity}: must be 0 where there is no growth")
    if growth is not None and not 0 <= growth_capacity <= sizes["Pg"]:
        raise UserError(f"growth_capacity = {growth_capacity}: must lie in [0, {sizes['Pg']}], the rows of growth")
    return sizes


def held_pools(pool: Pool, capacity: int, growth: Pool | None, growth_capacity: int) -> tuple[Pool, ...]:
    """Those of a cache's two pools that can hold any token."""
    pools = ((pool, capacity), (growth, growth_capacity))
    return tuple(each for each, tokens in pools if each is not None and tokens)
