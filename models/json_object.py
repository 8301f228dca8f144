"""JSON files and their entries: whatever is wrong is a ValueError that names the file or the entry."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError, explaining, require

LFS_POINTER = "is a Git LFS pointer and not the file itself: run `git lfs pull` in its folder"
MOST = 2**31 - 1  # token ids, positions and sizes of axes are int32
_SHOWN = 200  # characters of a value in a message
_LFS = b"version https://git-lfs"


@dataclasses.dataclass(frozen=True)
class Entries:
    """Typed access to entries, of a config.json or of GGUF metadata."""

    values: Mapping[str, Any]
    name: str = "config[{!r}]"  # of an entry in messages

    def get(self, key: str, default: Any = None) -> Any:
        """The entry; null counts as absent. ValueError where it is absent and has no default."""
        value = self.values.get(key)
        value = default if value is None else value
        require(value is not None, f"{self.name.format(key)} is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least` that fits into int32."""
        value = self.get(key, default)
        return value if type(value) is int and least <= value <= MOST else self.refuse(key, f"an integer >= {least}")

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
        return float(value) if is_number else self.refuse(key, "a positive number")

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch."""
        value = self.get(key, default)
        return value if isinstance(value, bool) else self.refuse(key, "true or false")

    def refuse(self, key: str, must: str) -> Any:
        """Raises ValueError with the entry and the allowed values."""
        value = repr(self.values.get(key))
        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        raise UserError(f"{self.name.format(key)} = {shown}: must be {must}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError with the file's name where it holds none."""
    entries = read_json(path)
    require(isinstance(entries, dict), f"{path} holds a {type(entries).__name__}: must be a JSON object")
    return entries


def read_json(path: Path) -> Any:
    """Content of a JSON file; errors are those of `read_json_object`."""
    with explaining(f"{path} is not valid JSON", ValueError, RecursionError):
        return json.loads(path.read_text(encoding="utf-8"))


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left a pointer in place of the file."""
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS
