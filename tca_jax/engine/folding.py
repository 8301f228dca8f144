"""Folding what has left the window since a prefill into a new pool, so that a context can go on growing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tca_jax.engine.cache import LayerCache, gather_pools, spread_pools
from tca_jax.engine.layouts import CacheLayout, with_capacities
from tca_jax.engine.mesh import on_host
from tca_jax.methods.base import CachePolicy
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.kv import Pool

# Where a region is too small, there is room made for more than is fed: for so many blocks, or this part of the context.
_HEADROOM_BLOCKS = 8
_HEADROOM_SHARE = 8


def layouts_after(
    policy: CachePolicy, caches: Sequence[LayerCache], rows: int, fed_tokens: int
) -> tuple[CacheLayout, ...]:
    """The caches that a context has once `fed_tokens` were appended, in `rows` rows of a device.

    The regions are as now where everything is sure to fit, so that a conversation's turns mostly run one program;
    otherwise there is room for some more turns.
    """
    layouts = [dataclasses.replace(cache.layout, batch=rows, growth=None) for cache in caches]
    return with_capacities(layouts, [_capacities(policy, *each, fed_tokens) for each in enumerate(caches)])


def _capacities(policy: CachePolicy, layer: int, cache: LayerCache, fed_tokens: int) -> Int[np.ndarray, "devices Hkv"]:
    """Tokens that a layer's regions are to hold on each device."""
    layout = cache.layout
    now = layout.capacities_by_device
    held = on_host(cache.pool.lengths).reshape(-1, *now.shape).max(axis=0)
    if np.all(held + layout.growth_by_device(policy, layer, fed_tokens) <= now):
        return now
    headroom = max(_HEADROOM_BLOCKS * layout.block_size, layout.prompt_tokens // _HEADROOM_SHARE)
    return np.maximum(held + layout.growth_by_device(policy, layer, fed_tokens + headroom), now)


def fold(caches: tuple[LayerCache, ...], layouts: tuple[CacheLayout, ...]) -> tuple[LayerCache, ...]:
    """The caches with what is kept in their pools alone, each row with regions of its own, from `layouts_after`."""
    folded: list[LayerCache] = []
    for cache, layout in zip(spread_pools(caches), layouts, strict=True):
        regions, lengths = layout.regions, cache.pool.lengths
        k, v = (_fold(cache, name, regions) for name in ("k", "v"))
        lengths = lengths if cache.growth is None else lengths + cache.growth.lengths
        if layout.shared is None:
            pool = Pool(k, v, jnp.asarray(regions.offsets, jnp.int32), lengths)
        else:
            own = Pool(k, v, cache.pool.offsets, lengths)
            pool = layout.shared.write(regions, own, folded[-1].pool if folded else None)
        folded.append(LayerCache(pool, None, cache.ring, layout))
    return gather_pools(tuple(folded))


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
