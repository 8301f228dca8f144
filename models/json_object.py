"""JSON files: whatever is wrong with one is a ValueError that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError

_DEEPEST = 32  # levels; no config has ten, and what is printed of a value shall not overflow a stack


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8, no JSON, no object, or nested deeper than anything that is meant; names the file.
    """
    entries = read_json(path)
    if not isinstance(entries, dict):
        raise UserError(f"{path} holds a {type(entries).__name__}: must be a JSON object")
    if _is_deep(entries):
        raise UserError(f"{path} is not valid JSON: its values are nested more than {_DEEPEST} levels deep")
    return entries


def read_json(path: Path) -> Any:
    """What a file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8, no JSON, or nested too deeply to be read; names the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UserError(f"{path} is not valid JSON: its values are nested too deeply") from None
    except ValueError as error:  # JSON or UTF-8
        raise UserError(f"{path} is not valid JSON: {error}") from error


def _is_deep(value: Any) -> bool:
    """Whether a value has more levels than `_DEEPEST`."""
    level = [value]
    for _ in range(_DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
