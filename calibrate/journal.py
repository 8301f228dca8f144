"""What a calibration has measured, kept in a file line by line: one that is interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tca_jax.errors import UserError


class Journal:
    """Measurements by what was measured, in memory and, with a path, in a file of JSON lines.

    Args:
        path: The file; one that another calibration has begun is written anew. None for memory alone.
        identity: What the measurements depend on: the model, the texts, the hyperparameters.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path | None, identity: Any) -> None:
        self._path, self._known = path, dict[str, Any]()
        if path is None:
            return
        head = {"calibration": _digest(json.dumps(identity, sort_keys=True).encode())}
        lines = path.read_bytes().strip().splitlines() if path.exists() else []
        records = [record for line in lines if (record := _parsed(line)) is not None]
        if lines and not (records and "calibration" in records[0]):
            raise UserError(f"journal = {path}: this file is no journal of a calibration; name another one")
        if records and records[0] == head:
            self._known = {record["key"]: record["value"] for record in records[1:] if {"key", "value"} <= set(record)}
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [head, *({"key": key, "value": value} for key, value in self._known.items())]
        path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    def get(self, name: str, of: np.ndarray | None, measure: Callable[[], Any]) -> Any:
        """What was measured under a name of an array, or what `measure` gives: JSON values."""
        key = name if of is None else f"{name} {_digest(str((of.dtype, of.shape)).encode() + of.tobytes())}"
        if key not in self._known:
            self._known[key] = measure()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "value": self._known[key]}) + "\n")
        return self._known[key]

    def remove(self) -> None:
        """Deletes the file: what it was for is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _parsed(line: bytes) -> Any:
    """The JSON object of a line; None where an interruption has cut it."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
