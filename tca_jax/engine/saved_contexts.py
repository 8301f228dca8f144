"""Contexts on disk: arrays and JSON in a folder that Orbax writes and replaces."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.contexts import OF_ROWS, ContextIdentity
from tca_jax.engine.mesh import HeadShards, on_host
from tca_jax.engine.pages import FreePages, Rows, Scored
from tca_jax.errors import explaining, require
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig
from tca_jax.pallas_kernels.kv import EightBits
from tca_jax.persistence import load, save

FORMAT_VERSION = 4
_KIND = "context"
_PARTS = "k", "v", "pages", "kept", "start", "own", "length", "scored"  # of rows


def save_context(directory: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """See `Context.save`; `fields` are those of a context."""
    rows, shards = on_host(fields["rows"]), fields["shards"]
    parts = {name: np.asarray(fields[name]) for name in OF_ROWS} | {name: getattr(rows, name) for name in _PARTS}
    leaves = jax.tree_util.tree_leaves_with_path(parts)
    arrays = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    metadata = {
        "format_version": FORMAT_VERSION,
        "identity": dataclasses.asdict(fields["identity"]),
        "window": fields["window"],
        "window_pages": rows.window_pages,
        "shards": None if shards is None else dataclasses.asdict(shards),
        "dtype": rows.k.dtype.name,
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
        version == FORMAT_VERSION,
        f"{folder}: format_version = {version!r}: tca_jax {importlib.metadata.version('tca-jax')} reads "
        f"{FORMAT_VERSION}; read the document again and save that context",
    )
    broken = (ValueError, TypeError, KeyError, AttributeError)
    with explaining(f"{folder}: damaged, or of another version of tca_jax", *broken):
        return _context(metadata, arrays)


def _context(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    dtype, metadata = jnp.dtype(metadata["dtype"]), _tuples(metadata)

    def part(name: str) -> Any:
        """An array, of floating point where it is one of the model's; None where there is none."""
        if f"{name}.words" in arrays:
            return EightBits(arrays[f"{name}.words"], arrays[f"{name}.exponents"])
        if f"{name}.bias" in arrays:
            return Scored(*(part(f"{name}.{own}") for own in Scored._fields))
        kind = {"k": dtype, "v": dtype} | dict.fromkeys(("attended_share", "scored.scores", "scored.bias"), np.float32)
        return arrays[name].view(kind.get(name, np.int32)) if name in arrays else None

    parts = {name: part(name) for name in _PARTS}
    lead = parts["start"].shape[:-1]  # of a mesh
    free = FreePages(np.zeros((*lead, 0), np.int32), np.zeros(lead, np.int32))  # type: ignore[arg-type]
    rows = Rows(**parts, free=free, window_pages=metadata["window_pages"])
    own, shards = metadata["identity"], metadata.get("shards")
    config = ModelConfig(**{**own["config"], "rope": RopeConfig(**own["config"]["rope"])})
    return {
        "identity": ContextIdentity(**{**own, "config": config}),
        "rows": rows,
        "window": metadata["window"],
        "shards": shards and HeadShards(**shards),
        **{name: part(name) for name in OF_ROWS},
    }


def _tuples(value: Any) -> Any:
    """A value of JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _tuples(own) for name, own in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
