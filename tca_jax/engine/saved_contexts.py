"""Contexts on disk: arrays and JSON in a folder that Orbax writes and replaces."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tca_jax.engine.contexts import OF_ROWS, ContextIdentity
from tca_jax.engine.mesh import HeadShards, on_host
from tca_jax.engine.pages import FreePages, Rows, Scored
from tca_jax.errors import explaining, require
from tca_jax.models.config import ModelConfig
from tca_jax.models.rope import RopeConfig
from tca_jax.pallas_kernels.kv import CODES, EightBits
from tca_jax.persistence import load, save

FORMAT_VERSION = 4
_KIND = "context"
_OF_TABLE, _SCORED = ("pages", "kept", "start", "own", "length"), ("scores", "pages", "bias", "raised")
_EIGHT_BITS = ("words", "exponents")


def save_context(directory: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """See `Context.save`; `fields` are those of a context."""
    rows, shards = on_host(fields["rows"]), fields["shards"]
    arrays = {name: np.asarray(x) for name, x in {name: fields[name] for name in OF_ROWS}.items()} | _arrays(rows)
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


def _arrays(rows: Rows) -> dict[str, Any]:
    """All arrays of rows by name; those of a table with two axes more on a mesh."""
    arrays = {name: getattr(rows, name) for name in _OF_TABLE}
    if rows.scored is not None:
        arrays |= {f"scored.{name}": getattr(rows.scored, name) for name in _SCORED}
    parts = {"k": rows.k, "v": rows.v}
    if rows.k.dtype != CODES:
        return arrays | parts
    return arrays | {f"{name}.{part}": getattr(x, part) for name, x in parts.items() for part in _EIGHT_BITS}


def _stored(arrays: Mapping[str, Any], name: str, dtype: jnp.dtype) -> Any:
    """Keys or values, from the arrays of a folder."""
    if dtype == CODES:
        words, exponents = (arrays[f"{name}.{part}"] for part in _EIGHT_BITS)
        return EightBits(words, exponents)
    return arrays[name].view(dtype)


def _context(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    dtype, shards = jnp.dtype(metadata["dtype"]), metadata.get("shards")
    shards = None if shards is None else _made(HeadShards, shards)
    pools = [_stored(arrays, name, dtype) for name in ("k", "v")]
    table, scored = {name: arrays[name] for name in _OF_TABLE}, None
    if "scored.pages" in arrays:
        of_scores = {name: arrays[f"scored.{name}"] for name in _SCORED}
        floats = {name: of_scores[name].view(np.float32) for name in ("scores", "bias")}
        scored = Scored(**of_scores | floats)
    lead = table["start"].shape[:-1]  # of a mesh
    nothing: Any = np.zeros((*lead, 0), np.int32)
    free = FreePages(nothing, np.zeros(lead, np.int32))  # type: ignore[arg-type]
    rows = Rows(k=pools[0], v=pools[1], free=free, **table, scored=scored, window_pages=metadata["window_pages"])
    of_rows = {name: arrays[name] for name in OF_ROWS}
    of_rows["attended_share"] = of_rows["attended_share"].view(np.float32)
    own = dict(metadata["identity"])
    config = _made(ModelConfig, {**own["config"], "rope": _made(RopeConfig, own["config"]["rope"])})
    identity = _made(ContextIdentity, own | {"config": config})
    return {"identity": identity, "rows": rows, "window": metadata["window"], "shards": shards, **of_rows}


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A dataclass of JSON values; lists become tuples."""
    return kind(**{name: _tuples(value) for name, value in fields.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
