"""Contexts on disk: metadata and arrays through Orbax, replaced whole, under a checksum."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.context_moves import on_one_device
from tca_jax.engine.contexts import Context, ContextIdentity
from tca_jax.engine.persistence import RestoreArrays, absolute_folder, checksum, load_step, save_step
from tca_jax.errors import UserError
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig

FORMAT_VERSION = 2
_KIND = "context"
_CHECKSUM = "sha256"
_DTYPES = ("float32", "bfloat16", "float16")
_JSON_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
)
_OF_ROWS = ("tokens", "lengths", "prompt_lengths", "attended_share")  # arrays beside those of the cache
_OF_CACHE, _OF_LAYERS = ("k", "v", "start", "end"), ("tables", "kept")
_FIELDS = ("format_version", "identity", "layout", "kept_columns", "dtype", "arrays", "library_version", _CHECKSUM)


def save_context(context: Context, directory: str | os.PathLike[str]) -> None:
    """See `Context.save`."""
    context = on_one_device(context)  # files know no mesh
    arrays = {name: np.asarray(x) for name, x in _arrays(context).items()}
    metadata = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(context.identity),
        "layout": dataclasses.asdict(context.layout),
        "kept_columns": context.cache.kept_columns,
        "dtype": context.cache.k.dtype.name,
        "arrays": sorted(arrays),
        "library_version": importlib.metadata.version("tca-jax"),
    }
    # As bytes: NumPy has no bfloat16 of its own, and what is read back must be what was written, bit for bit.
    arrays = {name: x.view(np.uint8) if x.dtype.name == metadata["dtype"] else x for name, x in arrays.items()}
    metadata = json.loads(json.dumps(metadata))  # tuples are lists from here on, as they will be when it is read
    save_step(_KIND, absolute_folder(directory), arrays, {**metadata, _CHECKSUM: checksum(metadata, arrays)})


def load_context(directory: str | os.PathLike[str]) -> Context:
    """See `Context.load`."""
    path = absolute_folder(directory)
    if not path.exists():
        raise FileNotFoundError(f"context directory {path} does not exist")
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a context directory")
    return load_step(_KIND, path, _parse)


def _arrays(context: Context) -> dict[str, jax.Array]:
    """All arrays of a context by name."""
    arrays = {name: getattr(context, name) for name in _OF_ROWS}
    arrays |= {name: getattr(context.cache, name) for name in _OF_CACHE}
    for name in _OF_LAYERS:
        arrays |= {f"{name}.{layer}": x for layer, x in enumerate(getattr(context.cache, name))}
    return arrays


def _parse(folder: Path, metadata: Any, restore: RestoreArrays) -> Context:
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
            f"does not read it: {error}; save the context again"
        ) from error


def _context(metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Context:
    """What metadata and arrays say; ValueError, TypeError or KeyError where they say something else."""
    dtype, layout = jnp.dtype(metadata["dtype"]), _layout(metadata["layout"])
    layers, columns = range(layout.num_layers), metadata["kept_columns"]
    if not _is_nested(columns, depth=1) or len(columns) != len(layers):
        raise UserError(f"kept_columns = {columns!r}: must be {len(layers)} integers in [0, 2^31)")
    k, v = (jnp.asarray(arrays[name].view(dtype)) for name in ("k", "v"))
    tables, kept = (tuple(jnp.asarray(arrays[f"{name}.{layer}"]) for layer in layers) for name in _OF_LAYERS)
    start, end = (jnp.asarray(arrays[name]) for name in ("start", "end"))
    cache = PagedCache(k, v, tables, kept, start, end, tuple(columns))
    rows = [jnp.asarray(arrays[name]) for name in _OF_ROWS[:-1]]
    share = jnp.asarray(arrays[_OF_ROWS[-1]].view(np.float32))
    return Context(cache, *rows, share, 0.0, 0.0, layout, None, _identity(metadata["identity"]))


def _check_fields(metadata: Any, file: Path) -> None:
    if not isinstance(metadata, dict) or "format_version" not in metadata:
        raise UserError(f"{file}: has no field 'format_version', so it is not a tca_jax context")
    if metadata["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version = {metadata['format_version']!r}: tca_jax "
            f"{importlib.metadata.version('tca-jax')} reads {FORMAT_VERSION}; save the context again"
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
    layout: CacheLayout = _made(CacheLayout, fields, "layout", kept_pages=pages)
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
