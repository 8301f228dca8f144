"""Contexts on other devices, and the rows of several contexts in one. Pages are copied through the host."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.contexts import Context
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, HeadShards, by_row, on_host, place
from tca_jax.errors import UserError, require_type
from tca_jax.models.sharding import DATA, axis_size


def moved(context: Context, lm: LM) -> Context:
    """The context as a model holds its own: on its devices, with KV heads where the model has them."""
    shards, rows = lm.head_shards, axis_size(lm.mesh, DATA)
    layout = _dealt_anew(context, shards, context.batch // rows)
    cache = _with_pages_of(context, layout, shards, rows)
    if lm.mesh is None:
        cache = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), cache)
    else:
        cache = jax.tree.map(functools.partial(place, CACHES, mesh=lm.mesh), cache)
    return dataclasses.replace(context, cache=cache, layout=layout, shards=shards)


def on_one_device(context: Context) -> Context:
    """The context with all KV heads in the model's order on one device; itself where it is so."""
    if context.shards is None:
        return context
    layout = _dealt_anew(context, None, context.batch)
    cache = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), _with_pages_of(context, layout, None, 1))
    return dataclasses.replace(context, cache=cache, layout=layout, shards=None)


def joined_rows(contexts: list[Any]) -> Context:
    """See `Context.join`."""
    if not contexts:
        raise UserError("contexts is empty: at least one is needed")
    for i, context in enumerate(contexts):
        require_type(f"contexts[{i}]", context, Context, "a Context, from tca_jax.prefill")
        if context.identity != contexts[0].identity:
            raise UserError(
                f"contexts[{i}] is of {context.identity.model!r} under {context.identity.method!r}, contexts[0] of "
                f"{contexts[0].identity.model!r} under {contexts[0].identity.method!r}, or their weights or options "
                "differ: all must be of one model and method"
            )
    contexts = [on_one_device(context) for context in contexts]
    layouts = [context.layout for context in contexts]
    pages = tuple(
        ((tuple(np.max([layout.kept_pages[layer][0] for layout in layouts], axis=0).tolist())),)
        for layer in range(layouts[0].num_layers)
    )
    widest = max(context.tokens.shape[1] for context in contexts)
    layout = dataclasses.replace(
        layouts[0],
        batch=sum(each.batch for each in layouts),
        kept_pages=pages,
        window_columns=max(each.window_columns for each in layouts),
        prompt_tokens=max(each.prompt_tokens for each in layouts),
    )
    tokens = [np.pad(x.tokens, ((0, 0), (0, widest - x.tokens.shape[1]))) for x in contexts]
    rows = {
        name: jnp.concatenate([jnp.asarray(getattr(context, name)) for context in contexts])
        for name in ("lengths", "prompt_lengths", "attended_share")
    }
    return dataclasses.replace(
        contexts[0],
        cache=_stacked([context.cache for context in contexts]),
        layout=layout,
        tokens=jnp.asarray(np.concatenate(tokens)),
        compile_seconds=sum(context.compile_seconds for context in contexts),
        prefill_seconds=sum(context.prefill_seconds for context in contexts),
        **rows,
    )


def _stacked(caches: list[PagedCache]) -> PagedCache:
    """Rows of caches on one device in one, whose pool has the pages of all pools."""
    starts = np.cumsum([0, *(len(cache.k) for cache in caches)])
    columns = tuple(map(max, zip(*(cache.kept_columns for cache in caches), strict=True)))
    tables = []
    for layer, kept in enumerate(columns):
        own = [cache.tables[layer] for cache in caches]
        local = max(table.shape[-1] - cache.kept_columns[layer] for table, cache in zip(own, caches, strict=True))
        wide = [
            _widened(
                np.asarray(table), cache.kept_columns[layer], len(cache.k), int(first), (kept, local), int(starts[-1])
            )
            for table, cache, first in zip(own, caches, starts[:-1], strict=True)
        ]
        tables.append(jnp.asarray(np.concatenate(wide)))
    kept_tokens = tuple(jnp.concatenate(of_layer) for of_layer in zip(*(cache.kept for cache in caches), strict=True))
    k, v, start, end = (
        jnp.concatenate([jnp.asarray(getattr(cache, name)) for cache in caches]) for name in ("k", "v", "start", "end")
    )
    return PagedCache(k, v, tuple(tables), kept_tokens, start, end, columns)


def _widened(
    table: Int[np.ndarray, "B H T"], kept: int, pages: int, first: int, columns: tuple[int, int], no_page: int
) -> Int[np.ndarray, "B H T2"]:
    """A table whose pages begin at `first` of a pool that holds others, too, with so many entries of either kind."""
    shifted = np.where(table < pages, table + first, no_page)
    parts = shifted[..., :kept], shifted[..., kept:]
    padded = [
        np.pad(part, ((0, 0), (0, 0), (0, wide - part.shape[-1])), constant_values=no_page)
        for part, wide in zip(parts, columns, strict=True)
    ]
    return np.concatenate(padded, axis=-1).astype(np.int32)


def _dealt_anew(context: Context, shards: HeadShards | None, batch: int) -> CacheLayout:
    """The context's layout with KV heads dealt out in another way, of so many rows a device."""
    pages = []
    for layer, of_layer in enumerate(context.layout.kept_pages):
        of_model = np.asarray(of_layer).reshape(-1)[_places(context.shards, layer, np.size(of_layer))]
        by_device = of_model[None] if shards is None else shards.by_device(layer, of_model.tolist())
        pages.append(tuple(map(tuple, by_device.tolist())))
    return dataclasses.replace(context.layout, batch=batch, kept_pages=tuple(pages))


def _places(shards: HeadShards | None, layer: int, heads: int) -> Int[np.ndarray, " H"]:
    """Where each of the model's KV heads lies."""
    return np.arange(heads) if shards is None else shards.inverse[layer]


def _with_pages_of(context: Context, layout: CacheLayout, shards: HeadShards | None, rows: int) -> PagedCache:
    """The context's cache in another layout, in host memory, with axes for the devices in front."""
    old = jax.tree.map(lambda x: x if context.shards is not None else x[None, None], on_host(context.cache))
    devices, heads = (1 if shards is None else shards.devices), layout.num_kv_heads
    shape = rows, devices, layout.num_pages, *old.k.shape[3:]
    k, v = (np.zeros(shape, old.k.dtype) for _ in range(2))
    by_device = [[np.asarray(table) for table in layout.tables(device)] for device in range(devices)]
    for layer in range(layout.num_layers):
        places = _places(context.shards, layer, heads * devices)
        numbers = range(heads * devices) if shards is None else shards.order[layer]
        for row, place_here in np.ndindex(context.batch, heads * devices):
            device, head = divmod(place_here, heads)
            source_row, of_row = divmod(row, context.layout.batch)
            source, of_head = divmod(int(places[numbers[place_here]]), old.tables[layer].shape[3])
            pages = old.tables[layer][source_row, source, of_row, of_head]
            to = by_device[device][layer][row % layout.batch, head]
            real = (pages < old.k.shape[2]) & (to < layout.num_pages)
            here = row // layout.batch, device
            for mine, theirs in ((k, old.k), (v, old.v)):
                mine[(*here, to[real])] = theirs[source_row, source, pages[real]]
    tables = tuple(
        np.broadcast_to(
            np.stack([each[layer] for each in by_device])[None], (rows, devices, *by_device[0][layer].shape)
        )
        for layer in range(layout.num_layers)
    )
    kept = tuple(
        _dealt(by_row(x)[:, _places(context.shards, layer, heads * devices)], shards, layer, rows)
        for layer, x in enumerate(old.kept)
    )
    start, end = (
        np.broadcast_to(x[:, 0].reshape(rows, 1, -1), (rows, devices, layout.batch)) for x in (old.start, old.end)
    )
    return PagedCache(k, v, tables, kept, start, end, layout.kept_columns)


def _dealt(
    x: Shaped[np.ndarray, "B H"], shards: HeadShards | None, layer: int, rows: int
) -> Shaped[np.ndarray, "rows devices b h"]:
    """Something of each row and KV head of the model, by device."""
    order = slice(None) if shards is None else list(shards.order[layer])
    devices = 1 if shards is None else shards.devices
    return x[:, order].reshape(rows, x.shape[0] // rows, devices, -1).swapaxes(1, 2)
