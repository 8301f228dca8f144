"""Contexts on disk: arrays and JSON in a folder that Orbax writes and replaces."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.mesh import HeadShards, on_host
from tca_jax.errors import explaining, require
from tca_jax.methods.registry import current_types
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig
from tca_jax.pallas_kernels.kv import CODES, EightBits
from tca_jax.persistence import load, save

FORMAT_VERSION, _READ_VERSIONS = 3, (2, 3)
_KIND = "context"
#: Arrays of a context beside those of its cache.
OF_ROWS = ("tokens", "lengths", "prompt_lengths", "attended_share")
_OF_CACHE, _OF_LAYERS = ("start", "end"), ("tables", "kept")
_EIGHT_BITS = ("words", "exponents")


@dataclasses.dataclass(frozen=True)
class ContextIdentity:
    """Whose a context is."""

    model: str  # the model's name
    config: ModelConfig  # its architecture
    fingerprint: str  # of its weights (`models.fingerprint`)
    method: str  # name of the attention method
    method_description: str  # all of its parts and options, from `describe_method`


def save_context(directory: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """See `Context.save`; `fields` are those of a context."""
    cache, shards = on_host(fields["cache"]), fields["shards"]
    rows = {name: fields[name] for name in OF_ROWS}
    arrays = {name: np.asarray(x) for name, x in {**rows, **_arrays(cache)}.items()}
    metadata = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(fields["identity"]),
        "layout": dataclasses.asdict(fields["layout"]),
        "shards": None if shards is None else dataclasses.asdict(shards),
        "kept_columns": cache.kept_columns,
        "dtype": cache.dtype.name,
        "library_version": importlib.metadata.version("tca-jax"),
    }
    # As bytes: NumPy has no bfloat16 of its own, and what is read back must be what was written, bit for bit.
    arrays = {name: x.view(np.uint8) if x.dtype.name == metadata["dtype"] else x for name, x in arrays.items()}
    save(_KIND, directory, arrays, metadata)


def load_context(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Fields of the context that `save_context` wrote, its arrays in host memory; see `Context.load`."""
    folder, metadata, arrays = load(_KIND, directory)
    version = metadata.get("format_version") if isinstance(metadata, dict) else None
    require(
        version in _READ_VERSIONS,
        f"{folder}: format_version = {version!r}: tca_jax {importlib.metadata.version('tca-jax')} reads "
        f"{list(_READ_VERSIONS)}; read the document again and save that context",
    )
    broken = (ValueError, TypeError, KeyError, AttributeError)
    with explaining(f"{folder}: damaged, or of another version of tca_jax", *broken):
        return _context(metadata, arrays)


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


def _stored(arrays: Mapping[str, Any], name: str, dtype: jnp.dtype) -> Any:
    """Keys or values, from the arrays of a folder."""
    if dtype == CODES:
        words, exponents = (arrays[f"{name}.{part}"] for part in _EIGHT_BITS)
        return EightBits(words, exponents)
    return arrays[name].view(dtype)


def _context(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    dtype, layout = jnp.dtype(metadata["dtype"]), _made(CacheLayout, metadata["layout"])
    shards = metadata.get("shards")  # not in version 2, whose contexts are all of one device
    shards = None if shards is None else _made(HeadShards, shards)
    k, v = (_stored(arrays, name, dtype) for name in ("k", "v"))
    tables, kept = (tuple(arrays[f"{name}.{layer}"] for layer in range(layout.num_layers)) for name in _OF_LAYERS)
    start, end = (arrays[name] for name in _OF_CACHE)
    cache = PagedCache(k, v, tables, kept, start, end, _tuples(metadata["kept_columns"]))
    rows = {name: arrays[name] for name in OF_ROWS}
    rows["attended_share"] = rows["attended_share"].view(np.float32)
    own = dict(metadata["identity"])
    config = _made(ModelConfig, {**own["config"], "rope": _made(RopeConfig, own["config"]["rope"])})
    own |= {"config": config, "method_description": current_types(own["method_description"])}
    return {"identity": _made(ContextIdentity, own), "cache": cache, "layout": layout, "shards": shards, **rows}


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass of JSON values; lists become tuples."""
    return kind(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
