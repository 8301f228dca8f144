"""Contexts on disk: metadata and arrays through Orbax, replaced whole, under a checksum."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import LayerCache
from tca_jax.engine.contexts import Context, ContextIdentity
from tca_jax.engine.layouts import CacheLayout
from tca_jax.engine.persistence import RestoreArrays, checksum, load_step, save_step
from tca_jax.methods.regions import Regions
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig
from tca_jax.pallas_kernels.kv import Pool, Ring

FORMAT_VERSION = 1
_KIND = "context"
_CHECKSUM = "sha256"
_FIELDS = ("format_version", "identity", "layouts", "dtype", "arrays", "library_version", _CHECKSUM)


def save_context(context: Context, directory: str | os.PathLike[str]) -> None:
    """See `Context.save`."""
    arrays = {name: np.asarray(x) for name, x in _arrays(context).items()}
    metadata = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(context.identity),
        "layouts": [dataclasses.asdict(layout) for layout in context.layouts],
        "dtype": context.caches[0].ring.k.dtype.name,
        "arrays": sorted(arrays),
        "library_version": importlib.metadata.version("tca-jax"),
    }
    # As bytes: NumPy has no bfloat16 of its own, and what is read back must be what was written, bit for bit.
    arrays = {name: x.view(np.uint8) if x.dtype.name == metadata["dtype"] else x for name, x in arrays.items()}
    metadata = json.loads(json.dumps(metadata))  # tuples are lists from here on, as they will be when it is read
    save_step(
        _KIND, Path(directory).expanduser().absolute(), arrays, {**metadata, _CHECKSUM: checksum(metadata, arrays)}
    )


def load_context(directory: str | os.PathLike[str]) -> Context:
    """See `Context.load`."""
    return load_step(_KIND, Path(directory).expanduser().absolute(), _parse)


def _arrays(context: Context) -> dict[str, jax.Array]:
    """All arrays of a context by name."""
    arrays = {"tokens": context.tokens, "lengths": context.lengths, "prompt_lengths": context.prompt_lengths}
    for layer, cache in enumerate(context.caches):
        parts = {"pool": cache.pool._asdict(), "ring": cache.ring._asdict()}
        arrays |= {f"{layer}.{part}.{name}": x for part, fields in parts.items() for name, x in fields.items()}
    return arrays


def _parse(folder: Path, metadata: Any, restore: RestoreArrays) -> Context:
    """The context that a folder holds; ValueError, which names the folder, where it is damaged."""
    file = folder / "metadata" / "metadata"
    _check_fields(metadata, file)
    signed = {name: value for name, value in metadata.items() if name != _CHECKSUM}
    arrays = restore(metadata["arrays"])
    if metadata[_CHECKSUM] != checksum(signed, arrays):
        raise ValueError(f"{folder}: damaged: the context in it does not match its checksum")
    dtype = jnp.dtype(metadata["dtype"])
    layouts = [_layout(fields) for fields in metadata["layouts"]]

    def values(layer: int, part: str, name: str) -> jax.Array:
        x = arrays[f"{layer}.{part}.{name}"]
        return jnp.asarray(x.view(dtype) if name in ("k", "v") else x)

    caches = tuple(
        LayerCache(
            Pool(*(values(layer, "pool", name) for name in Pool._fields)),
            None,
            Ring(*(values(layer, "ring", name) for name in Ring._fields)),
            layout,
        )
        for layer, layout in enumerate(layouts)
    )
    tokens, lengths, prompt_lengths = (jnp.asarray(arrays[name]) for name in ("tokens", "lengths", "prompt_lengths"))
    return Context(caches, tokens, lengths, prompt_lengths, 0.0, 0.0, _identity(metadata["identity"]))


def _check_fields(metadata: Any, file: Path) -> None:
    if not isinstance(metadata, dict) or "format_version" not in metadata:
        raise ValueError(f"{file}: has no field 'format_version', so it is not a tca_jax context")
    if metadata["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format_version = {metadata['format_version']!r}: tca_jax "
            f"{importlib.metadata.version('tca-jax')} reads {FORMAT_VERSION}; save the context again"
        )
    if missing := [name for name in _FIELDS if name not in metadata]:
        raise ValueError(f"{file}: field {missing[0]!r} is missing")


def _layout(fields: Mapping[str, Any]) -> CacheLayout:
    regions = Regions(fields["regions"]["batch"], tuple(fields["regions"]["capacities"]))
    return CacheLayout(**{**fields, "regions": regions})


def _identity(fields: Mapping[str, Any]) -> ContextIdentity:
    config = dict(fields["config"])
    return ContextIdentity(**{**fields, "config": ModelConfig(**{**config, "rope": RopeConfig(**config["rope"])})})
