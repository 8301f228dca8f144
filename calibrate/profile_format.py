"""What a saved profile holds: fields of metadata and arrays, and a checksum over all."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

import numpy as np

from tca_jax.errors import UserError
from tca_jax.methods.config import TCAConfig
from tca_jax.persistence import RestoreArrays, checksum

# Formats 1 and 2 were of before the first release: their rows were found by other rules, and what they lack would have
# to be guessed.
FORMAT_VERSION = 3
_OLDEST = 3

ARRAYS = ("candidates", "scores", "readings", "prefill_candidates", "reading_worth", "keeping_worth")
_CHECKSUM = "sha256"
_FIELD_TYPES: Mapping[str, tuple[type | UnionType, str]] = MappingProxyType(
    {
        "format_version": (int, "an integer"),
        "config": (dict, "an object"),
        "fingerprint": (str | None, "a string or null"),
        "model_name": (str, "a string"),
        "sources": (list, "a list"),
        "losses": (dict, "an object"),
        "probes": (dict | None, "an object or null"),
        "library_version": (str, "a string"),
    }
)


def sign(metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The metadata with the arrays' names and a checksum over itself and the arrays."""
    metadata = {**metadata, "arrays": sorted(arrays)}
    return {**metadata, _CHECKSUM: checksum(metadata, arrays)}


def read_fields(folder: Path, metadata: Any, restore: RestoreArrays) -> dict[str, Any]:
    """Arguments of `Profile` from what a folder holds.

    Args:
        folder: For messages.
        metadata: JSON values, as they were read.
        restore: Reads arrays by their names.

    Returns:
        Values of the profile's fields.

    Raises:
        ValueError: something does not match the checksum, is missing, unknown, of a wrong type, or of a newer version;
            the message names the folder and the field.
    """
    file = folder / "metadata" / "metadata"
    _require_version(metadata, file)
    fields, names = dict(metadata), metadata.get("arrays")
    _require_fields(file, {*fields} & {"arrays", _CHECKSUM}, ("arrays", _CHECKSUM))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file}: arrays = {names!r}: must be a list of names")
    _require_fields(f"{file}: arrays", names, ARRAYS)
    arrays, signature = restore(names), fields.pop(_CHECKSUM)
    if signature != checksum(fields, arrays):
        raise UserError(f"{folder}: damaged: the profile in it does not match its checksum")
    del fields["arrays"]
    _require_fields(file, fields, _FIELD_TYPES)
    for name, (kind, description) in _FIELD_TYPES.items():
        if not isinstance(fields[name], kind):
            raise UserError(f"{file}: {name} = {fields[name]!r}: must be {description}")
    del fields["format_version"]
    _require_fields(f"{file}: config", fields["config"], [field.name for field in dataclasses.fields(TCAConfig)])
    try:
        return {**fields, **arrays, "config": TCAConfig(**fields["config"])}
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error


def _require_version(metadata: Any, file: Path) -> None:
    """Raises ValueError unless the metadata is of a format that can be read."""
    if not isinstance(metadata, dict) or "format_version" not in metadata:
        raise UserError(f"{file}: has no field 'format_version', so it is not a tca_jax profile")
    version = metadata["format_version"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise UserError(f"{file}: format_version = {version!r}: must be an integer of at least 1")
    if version < _OLDEST:
        raise UserError(
            f"{file}: format_version = {version} is of before the first release, whose budgets were found by other "
            "rules; make a new profile: tca-jax calibrate "
            f"{metadata.get('model_name', 'MODEL')} --text FILE --out FOLDER"
        )
    if version > FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version = {version} is newer than {FORMAT_VERSION}, the newest that tca_jax "
            f"{importlib.metadata.version('tca-jax')} reads: upgrade tca_jax"
        )


def _require_fields(where: Path | str, found: Collection[str], wanted: Collection[str]) -> None:
    """Raises unless `found` has all fields that are wanted, and no other."""
    if unknown := sorted(set(found) - set(wanted)):
        raise UserError(
            f"{where}: unknown field {unknown[0]!r}; known are {sorted(wanted)}. Where a newer tca_jax wrote the "
            "profile, upgrade tca_jax"
        )
    if missing := sorted(set(wanted) - set(found)):
        raise UserError(f"{where}: field {missing[0]!r} is missing")
