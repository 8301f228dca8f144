"""Copies of contexts: in a folder, on other devices, and the rows of several in one.

Folders are written and read through Orbax, replaced whole, under a checksum. Pages go through the host's memory.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, HeadShards, by_row, on_host, place
from tca_jax.errors import UserError
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import CODES, EightBits, Stored
from tca_jax.persistence import RestoreArrays, absolute_folder, checksum, load_step, save_step

FORMAT_VERSION = 2
_KIND = "context"
_CHECKSUM = "sha256"
_DTYPES = ("float32", "bfloat16", "float16", CODES.name)
_JSON_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
)
#: Arrays of a context beside those of its cache.
OF_ROWS = ("tokens", "lengths", "prompt_lengths", "attended_share")
_OF_CACHE, _OF_LAYERS = ("start", "end"), ("tables", "kept")
_EIGHT_BITS = ("words", "exponents")
_FIELDS = ("format_version", "identity", "layout", "kept_columns", "dtype", "arrays", "library_version", _CHECKSUM)


@dataclasses.dataclass(frozen=True)
class ContextIdentity:
    """Whose a context is.

    Attributes:
        model: The model's name.
        config: Its architecture.
        fingerprint: Of its weights (`models.fingerprint`).
        method: Name of the attention method.
        method_description: All of its parts and options, from `describe_method`.
    """

    model: str
    config: ModelConfig
    fingerprint: str
    method: str
    method_description: str


class Held(NamedTuple):
    """What devices hold of a context: its cache, the cache's layout, and how KV heads lie on a mesh."""

    cache: PagedCache
    layout: CacheLayout
    shards: HeadShards | None

    @property
    def rows(self) -> int:
        """Rows on all devices together."""
        devices = 1 if self.shards is None else self.cache.start.shape[0]
        return devices * self.layout.batch


def save_context(
    directory: str | os.PathLike[str], identity: ContextIdentity, held: Held, rows: Mapping[str, jax.Array]
) -> None:
    """See `Context.save`; `rows` are the arrays that `OF_ROWS` names."""
    cache, layout, _ = on_one_device(held)  # files know no mesh
    arrays = {name: np.asarray(x) for name, x in {**rows, **_arrays(cache)}.items()}
    metadata = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(identity),
        "layout": dataclasses.asdict(layout),
        "kept_columns": cache.kept_columns,
        "dtype": cache.dtype.name,
        "arrays": sorted(arrays),
        "library_version": importlib.metadata.version("tca-jax"),
    }
    # As bytes: NumPy has no bfloat16 of its own, and what is read back must be what was written, bit for bit.
    arrays = {name: x.view(np.uint8) if x.dtype.name == metadata["dtype"] else x for name, x in arrays.items()}
    metadata = json.loads(json.dumps(metadata))  # tuples are lists from here on, as they will be when it is read
    save_step(_KIND, absolute_folder(directory), arrays, {**metadata, _CHECKSUM: checksum(metadata, arrays)})


def load_context(directory: str | os.PathLike[str]) -> tuple[ContextIdentity, Held, dict[str, jax.Array]]:
    """What `save_context` wrote; see `Context.load`."""
    path = absolute_folder(directory)
    if not path.exists():
        raise FileNotFoundError(f"context directory {path} does not exist")
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a context directory")
    return load_step(_KIND, path, _parse)


def _arrays(cache: PagedCache) -> dict[str, Any]:
    """All arrays of a cache by name."""
    arrays = {name: getattr(cache, name) for name in _OF_CACHE} | _stored_arrays(cache)
    for name in _OF_LAYERS:
        arrays |= {f"{name}.{layer}": x for layer, x in enumerate(getattr(cache, name))}
    return arrays


def _stored_arrays(cache: PagedCache) -> dict[str, Any]:
    """The arrays of keys and values by name."""
    if cache.dtype != CODES:
        return {"k": cache.k, "v": cache.v}
    parts = {"k": cache.k, "v": cache.v}
    return {f"{name}.{part}": getattr(x, part) for name, x in parts.items() for part in _EIGHT_BITS}


def _stored(arrays: Mapping[str, np.ndarray], name: str, dtype: jnp.dtype) -> Stored:
    """Keys or values, from the arrays of a folder."""
    if dtype != CODES:
        return jnp.asarray(arrays[name].view(dtype))
    return EightBits(*(jnp.asarray(arrays[f"{name}.{part}"]) for part in _EIGHT_BITS))


def _parse(folder: Path, metadata: Any, restore: RestoreArrays) -> tuple[ContextIdentity, Held, dict[str, jax.Array]]:
    """The context that a folder holds; ValueError, which names the folder, where it is damaged."""
    file = folder / "metadata" / "metadata"
    _check_fields(metadata, file)
    signed = {name: value for name, value in metadata.items() if name != _CHECKSUM}
    arrays = restore(metadata["arrays"])
    if metadata[_CHECKSUM] != checksum(signed, arrays):
        raise UserError(f"{folder}: damaged: the context in it does not match its checksum")
    try:
        return _context(metadata, arrays)
    except (ValueError, TypeError, KeyError) as error:  # under a checksum that fits: written so, by another version
        raise UserError(
            f"{file}: tca_jax {metadata['library_version']!r} wrote it, and {importlib.metadata.version('tca-jax')} "
            f"does not read it: {error}; read the document again and save that context"
        ) from error


def _context(
    metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[ContextIdentity, Held, dict[str, jax.Array]]:
    """What metadata and arrays say; ValueError, TypeError or KeyError where they say something else."""
    dtype, layout = jnp.dtype(metadata["dtype"]), _layout(metadata["layout"])
    layers, columns = range(layout.num_layers), metadata["kept_columns"]
    if not _is_nested(columns, depth=1) or len(columns) != len(layers):
        raise UserError(f"kept_columns = {columns!r}: must be {len(layers)} integers in [0, 2^31)")
    k, v = (_stored(arrays, name, dtype) for name in ("k", "v"))
    tables, kept = (tuple(jnp.asarray(arrays[f"{name}.{layer}"]) for layer in layers) for name in _OF_LAYERS)
    start, end = (jnp.asarray(arrays[name]) for name in ("start", "end"))
    cache = PagedCache(k, v, tables, kept, start, end, tuple(columns))
    rows = {name: jnp.asarray(arrays[name]) for name in OF_ROWS[:-1]}
    rows[OF_ROWS[-1]] = jnp.asarray(arrays[OF_ROWS[-1]].view(np.float32))
    return _identity(metadata["identity"]), Held(cache, layout, None), rows


def _check_fields(metadata: Any, file: Path) -> None:
    if not isinstance(metadata, dict) or "format_version" not in metadata:
        raise UserError(f"{file}: has no field 'format_version', so it is not a tca_jax context")
    if metadata["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version = {metadata['format_version']!r}: tca_jax "
            f"{importlib.metadata.version('tca-jax')} reads {FORMAT_VERSION}; read the document again and save that "
            "context"
        )
    if missing := [name for name in _FIELDS if name not in metadata]:
        raise UserError(f"{file}: field {missing[0]!r} is missing")
    names = metadata["arrays"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file}: arrays = {names!r}: must be a list of names")
    if metadata["dtype"] not in _DTYPES:
        raise UserError(f"{file}: dtype = {metadata['dtype']!r}: must be one of {list(_DTYPES)}")


def _layout(fields: Any) -> CacheLayout:
    layers = _entry(fields, "kept_pages", "layout")
    if not _is_nested(layers, depth=3):
        raise UserError(f"layout.kept_pages = {layers!r}: must be integers in [0, 2^31), [layers][devices][H_kv]")
    pages = tuple(tuple(map(tuple, of_layer)) for of_layer in layers)
    shared = fields.get("shared_pages", [])  # earlier versions did not write it
    if shared and not (_is_nested(shared, depth=2) and [*map(len, shared)] in ([2] * len(layers), [2])):
        raise UserError(f"layout.shared_pages = {shared!r}: must be integers in [0, 2^31), [{len(layers)} or 1][2]")
    fields = {**fields, "shared_pages": shared}
    parts = {"kept_pages": pages, "shared_pages": tuple(map(tuple, shared))}
    layout: CacheLayout = _made(CacheLayout, fields, "layout", **parts)
    return layout


def _is_nested(value: Any, depth: int) -> bool:
    """Whether it is such integers, in lists of lists that are not empty."""
    if not depth:
        return type(value) is int and 0 <= value < 2**31
    return isinstance(value, list) and bool(value) and all(_is_nested(each, depth - 1) for each in value)


def _identity(fields: Any) -> ContextIdentity:
    config = _entry(fields, "config", "identity")
    rope = _made(RopeConfig, _entry(config, "rope", "identity.config"), "identity.config.rope")
    made: ContextIdentity = _made(
        ContextIdentity, fields, "identity", config=_made(ModelConfig, config, "identity.config", rope=rope)
    )
    return made


def _entry(fields: Any, name: str, where: str) -> Any:
    if not isinstance(fields, Mapping) or name not in fields:
        raise UserError(f"{where} has no {name!r}")
    return fields[name]


def _made(kind: Any, fields: Any, where: str, **parts: Any) -> Any:
    """A dataclass of JSON values, and of parts that are made already; each is of the type that the class says."""
    names = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    if not isinstance(fields, Mapping) or set(fields) != set(names):
        raise UserError(f"{where} = {fields!r}: must be an object of {list(names)}")
    for name, wanted in names.items():
        value = fields[name]
        if wanted in _JSON_TYPES and type(value) not in _JSON_TYPES[wanted]:  # type: a bool is no number
            raise UserError(f"{where}.{name} = {value!r}: must be of type {wanted}")
        if wanted == "int" and not 0 <= value < 2**31:
            raise UserError(f"{where}.{name} = {value}: must lie in [0, 2^31)")
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return kind(**{**fields, **lists, **parts})


def moved(held: Held, lm: LM, lies_so: bool) -> Held:
    """A cache as a model holds its own: on its devices, with KV heads where the model has them.

    Args:
        held: The cache, on other devices or in the host's memory.
        lm: The model.
        lies_so: Whether its KV heads and rows are dealt out as the model's, and only the memory is another.
    """
    shards, rows = lm.head_shards, axis_size(lm.mesh, DATA)
    if shards is None:
        on_host_or_device, layout, _ = on_one_device(held)
        return Held(jax.tree.map(jnp.asarray, on_host_or_device), layout, None)
    layout = held.layout if lies_so else _dealt_anew(held, shards, held.rows // rows)
    cache = held.cache if lies_so else _with_pages_of(held, layout, shards, rows)
    assert lm.mesh is not None
    return Held(jax.tree.map(functools.partial(place, CACHES, mesh=lm.mesh), cache), layout, shards)


def on_one_device(held: Held) -> Held:
    """A cache with all KV heads in the model's order on one device; itself where it is so."""
    if held.shards is None:
        return held
    layout = _dealt_anew(held, None, held.rows)
    cache = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), _with_pages_of(held, layout, None, 1))
    return Held(cache, layout, None)


def stacked(parts: Sequence[Held]) -> Held:
    """The rows of several caches on one device in one, whose pool has the pages of all pools."""
    layouts = [part.layout for part in parts]
    kept = [np.asarray(layout.kept_pages) for layout in layouts]  # [layers, 1, H_kv]
    shared = [layout.shared_pages for layout in layouts]
    layout = dataclasses.replace(
        layouts[0],
        batch=sum(each.batch for each in layouts),
        kept_pages=tuple(tuple(map(tuple, of_layer)) for of_layer in np.max(kept, axis=0).tolist()),
        window_columns=max(each.window_columns for each in layouts),
        prompt_tokens=max(each.prompt_tokens for each in layouts),
        shared_pages=tuple(
            (max(together), max(of_head))
            for together, of_head in (zip(*of_layer, strict=True) for of_layer in zip(*shared, strict=True))
        ),
    )
    return Held(_stacked([part.cache for part in parts]), layout, None)


def _stacked(caches: list[PagedCache]) -> PagedCache:
    starts = np.cumsum([0, *(cache.num_pages for cache in caches)])
    columns = tuple(map(max, zip(*(cache.kept_columns for cache in caches), strict=True)))
    tables = []
    for layer, kept in enumerate(columns):
        own = [cache.tables[layer] for cache in caches]
        local = max(table.shape[-1] - cache.kept_columns[layer] for table, cache in zip(own, caches, strict=True))
        size = kept, local
        wide = [
            _widened(np.asarray(table), cache.kept_columns[layer], cache.num_pages, int(first), size, int(starts[-1]))
            for table, cache, first in zip(own, caches, starts[:-1], strict=True)
        ]
        tables.append(jnp.asarray(np.concatenate(wide)))
    kept_tokens = tuple(jnp.concatenate(of_layer) for of_layer in zip(*(cache.kept for cache in caches), strict=True))
    k, v, start, end = (
        jax.tree.map(lambda *parts: jnp.concatenate(list(map(jnp.asarray, parts))), *(getattr(c, name) for c in caches))
        for name in ("k", "v", "start", "end")
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


def _dealt_anew(held: Held, shards: HeadShards | None, batch: int) -> CacheLayout:
    """The layout with KV heads dealt out in another way, of so many rows per device."""
    pages = []
    for layer, of_layer in enumerate(held.layout.kept_pages):
        of_model = np.asarray(of_layer).reshape(-1)[_places(held.shards, layer, np.size(of_layer))]
        by_device = of_model[None] if shards is None else shards.by_device(layer, of_model.tolist())
        pages.append(tuple(map(tuple, by_device.tolist())))
    return dataclasses.replace(held.layout, batch=batch, kept_pages=tuple(pages))


def _places(shards: HeadShards | None, layer: int, heads: int) -> Int[np.ndarray, " H"]:
    """Where each of the model's KV heads lies."""
    return np.arange(heads) if shards is None else shards.inverse[layer]


def _with_pages_of(held: Held, layout: CacheLayout, shards: HeadShards | None, rows: int) -> Any:
    """A `PagedCache` in another layout, in host memory, with axes for the devices in front."""
    old = jax.tree.map(lambda x: x if held.shards is not None else x[None, None], on_host(held.cache))
    devices, heads = (1 if shards is None else shards.devices), layout.num_kv_heads
    k, v = jax.tree.map(lambda x: np.zeros((rows, devices, layout.num_pages, *x.shape[3:]), x.dtype), (old.k, old.v))
    kept = tuple(
        _dealt(by_row(x)[:, _places(held.shards, layer, heads * devices)], shards, layer, rows)
        for layer, x in enumerate(old.kept)
    )
    lying = [
        [layout.tables(device, [jnp.asarray(x[r, device]) for x in kept]) for device in range(devices)]
        for r in range(rows)
    ]
    tables = tuple(
        np.stack([[np.asarray(of_device[layer]) for of_device in of_row] for of_row in lying])
        for layer in range(layout.num_layers)
    )
    for layer in range(layout.num_layers):
        places = _places(held.shards, layer, heads * devices)
        numbers = range(heads * devices) if shards is None else shards.order[layer]
        for row, place_here in np.ndindex(held.rows, heads * devices):
            device, head = divmod(place_here, heads)
            source_row, of_row = divmod(row, held.layout.batch)
            source, of_head = divmod(int(places[numbers[place_here]]), old.tables[layer].shape[3])
            pages = old.tables[layer][source_row, source, of_row, of_head]
            to = tables[layer][row // layout.batch, device, row % layout.batch, head]
            real = (pages < old.num_pages) & (to < layout.num_pages)
            here = row // layout.batch, device
            for mine, theirs in zip(*map(jax.tree.leaves, ((k, v), (old.k, old.v))), strict=True):
                mine[(*here, to[real])] = theirs[source_row, source, pages[real]]
    start, end = (
        np.broadcast_to(x[:, 0].reshape(rows, 1, -1), (rows, devices, layout.batch)) for x in (old.start, old.end)
    )
    arrays: Any = {"k": k, "v": v, "tables": tables, "kept": kept, "start": start, "end": end}
    return PagedCache(**arrays, kept_columns=layout.kept_columns)


def _dealt(
    x: Shaped[np.ndarray, "B H"], shards: HeadShards | None, layer: int, rows: int
) -> Shaped[np.ndarray, "rows devices b h"]:
    """Something of each row and KV head of the model, by device."""
    order = slice(None) if shards is None else list(shards.order[layer])
    devices = 1 if shards is None else shards.devices
    return x[:, order].reshape(rows, x.shape[0] // rows, devices, -1).swapaxes(1, 2)
