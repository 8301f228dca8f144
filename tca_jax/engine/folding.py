"""Folding what has left the window since a prefill into a new pool, so that a context can go on growing."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tca_jax.engine.cache import LayerCache
from tca_jax.engine.mesh import on_host
from tca_jax.methods.base import CachePolicy
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.kv import Pool

# Where a region is too small, there is room made for more than is fed: for so many blocks, or this part of the context.
_HEADROOM_BLOCKS = 8
_HEADROOM_SHARE = 8


def regions_after(policy: CachePolicy, layer: int, cache: LayerCache, rows: int, fed_tokens: int) -> Regions:
    """Regions of the pool that a context has once `fed_tokens` were appended, in `rows` rows of a device.

    The same as now where everything is sure to fit, so that a conversation's turns mostly run one program; otherwise
    with room for some more turns.
    """
    layout = cache.layout
    now = np.asarray(layout.regions.capacities)
    held = on_host(cache.pool.lengths).reshape(-1, now.size).max(axis=0)  # of heads, those of all devices at a place
    if np.all(held + layout.most_growth(policy, layer, fed_tokens) <= now):
        return Regions.plan(rows, layout.regions.capacities)
    headroom = max(_HEADROOM_BLOCKS * layout.block_size, layout.prompt_tokens // _HEADROOM_SHARE)
    needed = held + layout.most_growth(policy, layer, fed_tokens + headroom)
    return Regions.plan(rows, tuple(np.maximum(needed, now).tolist()))


def fold(cache: LayerCache, regions: Regions) -> LayerCache:
    """The cache with what is kept in its pool alone, each row with regions of its own."""
    layout = dataclasses.replace(cache.layout, regions=regions, growth=None)
    offsets = jnp.asarray(regions.offsets, jnp.int32)
    k, v = (_fold(cache, name, regions) for name in ("k", "v"))
    lengths = cache.pool.lengths if cache.growth is None else cache.pool.lengths + cache.growth.lengths
    return LayerCache(Pool(k, v, offsets, lengths), None, cache.ring, layout)


def _fold(cache: LayerCache, name: str, regions: Regions) -> Float[Array, "P d"]:
    """Keys or values of all regions, those of the pool before those of the growth."""
    if not regions.row_tokens:
        return getattr(regions.empty(cache.ring.k.shape[-1], cache.ring.k.dtype), name)
    pool, growth = cache.pool, cache.growth
    parts = []
    for head, capacity in enumerate(regions.capacities):
        slots, held = jnp.arange(capacity), pool.lengths[:, head, None]
        part = getattr(pool, name).at[pool.offsets[:, head, None] + slots].get(mode="clip")
        if growth is not None:
            later = getattr(growth, name).at[growth.offsets[:, head, None] + slots - held].get(mode="clip")
            part = jnp.where((slots < held)[..., None], part, later)
        parts.append(part)
    return jnp.concatenate(parts, axis=1).reshape(-1, parts[0].shape[-1])
