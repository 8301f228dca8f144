"""Contexts between devices: from a mesh, where heads and rows are dealt out, to one device, and the other way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from tca_jax.engine.cache import LayerCache, spread_pools
from tca_jax.engine.layouts import CacheLayout, with_capacities
from tca_jax.engine.mesh import CACHES, HeadShards, on_host, place, rows_of_device
from tca_jax.methods.regions import Regions
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import Pool, Ring

if TYPE_CHECKING:
    from tca_jax.engine.contexts import Context
    from tca_jax.engine.lm import LM


def is_on(context: Context, lm: LM) -> bool:
    """Whether a context's caches are those that a model makes where it lies."""
    layout = context.layouts[0]
    rows = layout.batch * axis_size(lm.mesh, DATA)
    return layout.shards == lm.head_shards and rows == context.batch


def context_on(context: Context, lm: LM) -> Context:
    """See `Context.on`."""
    if is_on(context, lm):
        return context
    whole = context_on_one_device(context)
    if lm.mesh is None:
        return whole
    rows_of_device(lm, context.batch, "rows of the context")
    return dataclasses.replace(whole, caches=_dealt(whole.caches, lm))


def context_on_one_device(context: Context) -> Context:
    """The context with all heads in the model's order and all rows in one pool a layer; itself where it is so."""
    if context.layouts[0].shards is None:
        return context
    caches = tuple(_gathered(layer, cache, context.batch) for layer, cache in enumerate(_pools_on_host(context)))
    return dataclasses.replace(context, caches=caches)


def _pools_on_host(context: Context) -> tuple[LayerCache, ...]:
    """The caches of all layers, what a pool holds that they share fetched once for all."""
    first = context.caches[0]
    if first.layout.shared is None:
        return context.caches
    k, v = on_host((first.pool.k, first.pool.v))
    return spread_pools((first.with_keys_and_values(k, v), *context.caches[1:]))


def _gathered(layer: int, cache: LayerCache, batch: int) -> LayerCache:
    """A layer's cache on one device, from that of a mesh."""
    layout = cache.layout
    assert layout.shards is not None
    order, held = np.asarray(layout.shards.order[layer]), layout.num_kv_heads
    places = np.argsort(order)
    regions = Regions(batch, tuple(layout.capacities_by_device.reshape(-1)[places].tolist()))
    offsets = on_host(cache.pool.offsets)

    def gather(name: str) -> jax.Array:
        x = on_host(getattr(cache.pool, name))  # [data, model, P, d]
        out = np.zeros((regions.pool_tokens, x.shape[-1]), x.dtype)
        for row, head, start, capacity in _regions(regions):
            place = int(places[head])
            first = offsets[row, place]
            of_device = x[row // layout.batch, place // held]
            out[start : start + capacity] = of_device[first : first + capacity]
        return jnp.asarray(out)

    lengths = jnp.asarray(on_host(cache.pool.lengths)[:, places])
    pool = Pool(gather("k"), gather("v"), jnp.asarray(regions.offsets, jnp.int32), lengths)
    ring = Ring(*(jnp.asarray(on_host(x)[:, places]) for x in cache.ring))
    alone = dataclasses.replace(layout, batch=batch, regions=regions, shards=None, shared=None)
    return LayerCache(pool, None, ring, alone)


def _dealt(caches: tuple[LayerCache, ...], lm: LM) -> tuple[LayerCache, ...]:
    """The caches of all layers on a model's mesh, from those of one device."""
    shards, mesh = lm.head_shards, lm.mesh
    assert shards is not None
    assert mesh is not None
    rows = axis_size(mesh, DATA)
    put = functools.partial(jax.tree.map, functools.partial(place, CACHES, mesh=mesh))
    k: Any = None
    v: Any = None
    dealt = []
    for layer, (cache, layout) in enumerate(zip(caches, _dealt_layouts(caches, shards, rows), strict=True)):
        order, offsets = np.asarray(shards.order[layer]), _offsets(layout)
        if layout.shared is None or layout.shared.first:
            shape = rows, shards.devices, layout.pool_tokens, cache.ring.k.shape[-1]
            k, v = (np.zeros(shape, cache.ring.k.dtype) for _ in range(2))
        for x, out in ((cache.pool.k, k), (cache.pool.v, v)):
            _deal(on_host(x), out, cache.layout.regions, offsets, np.argsort(order))
        own: tuple[Any, Any] = (k, v) if layout.shared is None else (None, None)  # a shared one is put when it is whole
        pool = Pool(*own, _with(offsets, rows), on_host(cache.pool.lengths)[:, order])
        dealt.append(put(LayerCache(pool, None, Ring(*(on_host(x)[:, order] for x in cache.ring)), layout)))
    first = dealt[0]
    if first.layout.shared is not None:
        dealt[0] = first.with_keys_and_values(put(k), put(v))
    return tuple(dealt)


def _dealt_layouts(caches: tuple[LayerCache, ...], shards: HeadShards, rows: int) -> tuple[CacheLayout, ...]:
    """The shapes of caches of one device on each device of a mesh, which has `rows` of them along the rows' axis."""
    layouts = [dataclasses.replace(cache.layout, batch=cache.layout.batch // rows, shards=shards) for cache in caches]
    capacities = [shards.by_device(layer, layout.regions.capacities) for layer, layout in enumerate(layouts)]
    return with_capacities(layouts, capacities)


def _offsets(layout: CacheLayout) -> Int[np.ndarray, "devices B Hkv"]:
    """First pool token of each region, on each device along the heads' axis of a mesh."""
    assert layout.shards is not None
    if layout.shared is not None:
        return layout.shared.offsets
    return np.broadcast_to(layout.regions.offsets, (layout.shards.devices, *layout.regions.offsets.shape))


def _with(offsets: Int[np.ndarray, "devices B Hkv"], rows: int) -> Any:
    """The offsets of all devices in one array `[R, H]` over a mesh, which has `rows` devices along the rows' axis."""
    return np.tile(np.concatenate(list(offsets), axis=1), (rows, 1)).astype(np.int32)


def _deal(
    x: Float[np.ndarray, "p d"],
    out: Float[np.ndarray, "rows devices P d"],
    regions: Regions,
    offsets: Int[np.ndarray, "devices B Hkv"],
    places: Int[np.ndarray, " H"],
) -> None:
    """Writes the regions of a layer's keys or values on one device into pools of a mesh's."""
    _, batch, held = offsets.shape
    for row, head, first, capacity in _regions(regions):
        device, place_there = divmod(int(places[head]), held)
        start = offsets[device, row % batch, place_there]
        out[row // batch, device, start : start + capacity] = x[first : first + capacity]


def _regions(regions: Regions) -> Iterator[tuple[int, int, int, int]]:
    """Row, head, first token and capacity of each region."""
    offsets = regions.offsets
    for row, head in np.ndindex(offsets.shape):
        yield row, head, int(offsets[row, head]), regions.capacities[head]
