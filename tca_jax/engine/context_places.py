"""Contexts between devices: from a mesh, where heads and rows are dealt out, to one device, and the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import LayerCache
from tca_jax.engine.mesh import CACHES, on_host, place, rows_of_device
from tca_jax.methods.regions import Regions
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import Pool, Ring

if TYPE_CHECKING:
    from tca_jax.engine.contexts import Context
    from tca_jax.engine.lm import LM


def lies_on(context: Context, lm: LM) -> bool:
    """Whether a context's caches are those that a model makes where it lies."""
    layout = context.layouts[0]
    rows = layout.batch * axis_size(lm.mesh, DATA)
    return layout.heads == lm.head_shards and rows == context.batch


def context_on(context: Context, lm: LM) -> Context:
    """See `Context.on`."""
    if lies_on(context, lm):
        return context
    whole = context_on_one_device(context)
    if lm.mesh is None:
        return whole
    rows_of_device(lm, context.batch, "rows of the context")
    caches = tuple(_dealt(layer, cache, lm) for layer, cache in enumerate(whole.caches))
    return dataclasses.replace(whole, caches=caches)


def context_on_one_device(context: Context) -> Context:
    """The context with all heads in the model's order and all rows in one pool a layer; itself where it is so."""
    if context.layouts[0].heads is None:
        return context
    caches = tuple(_gathered(layer, cache, context.batch) for layer, cache in enumerate(context.caches))
    return dataclasses.replace(context, caches=caches)


def _gathered(layer: int, cache: LayerCache, batch: int) -> LayerCache:
    """A layer's cache on one device, from that of a mesh."""
    layout = cache.layout
    assert layout.heads is not None
    order, held = np.asarray(layout.heads.order[layer]), layout.num_kv_heads
    places = np.argsort(order)
    regions = Regions(batch, tuple(layout.regions.capacities[place % held] for place in places.tolist()))
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
    return LayerCache(pool, None, ring, dataclasses.replace(layout, batch=batch, regions=regions, heads=None))


def _dealt(layer: int, cache: LayerCache, lm: LM) -> LayerCache:
    """A layer's cache on a model's mesh, from that of one device."""
    layout, shards, mesh = cache.layout, lm.head_shards, lm.mesh
    assert shards is not None
    assert mesh is not None
    order, (rows, devices) = np.asarray(shards.order[layer]), (axis_size(mesh, DATA), axis_size(mesh, MODEL))
    batch, held = layout.batch // rows, layout.num_kv_heads // devices
    regions = Regions(batch, shards.widest(layer, layout.regions.capacities))
    places = np.argsort(order)

    def deal(name: str) -> np.ndarray:
        x = on_host(getattr(cache.pool, name))
        out = np.zeros((rows, devices, regions.pool_tokens, x.shape[-1]), x.dtype)
        for row, head, first, capacity in _regions(layout.regions):
            place = int(places[head])
            start = int(regions.offsets[row % batch, place % held])
            out[row // batch, place // held, start : start + capacity] = x[first : first + capacity]
        return out

    lengths = on_host(cache.pool.lengths)[:, order]
    arrays = deal("k"), deal("v"), np.tile(regions.offsets, (rows, devices)).astype(np.int32), lengths
    ring = (on_host(x)[:, order] for x in cache.ring)
    place_all: Any = [place(CACHES, x, mesh) for x in (*arrays, *ring)]
    planned = dataclasses.replace(layout, batch=batch, regions=regions, heads=shards)
    return LayerCache(Pool(*place_all[:4]), None, Ring(*place_all[4:]), planned)


def _regions(regions: Regions) -> Iterator[tuple[int, int, int, int]]:
    """Row, head, first token and capacity of each region."""
    offsets = regions.offsets
    for row, head in np.ndindex(offsets.shape):
        yield row, head, int(offsets[row, head]), regions.capacities[head]
