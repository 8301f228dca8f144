"""Methods told apart by a description that is the same in every process."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tca_jax.methods.base import CachePolicy, Method, PrefillPolicy


@functools.lru_cache(maxsize=64)
def describe_method(method: Method) -> str:
    """Canonical JSON of a method: its policies' types and all of their options."""
    return json.dumps(_described(method), sort_keys=True, separators=(",", ":"))


def unknown_types(description: str) -> list[str]:
    """Types that a description names and that no module of this process has, sorted."""
    try:
        described = json.loads(description)
    except ValueError:  # no description of ours at all
        return []
    return sorted({name for name in _types(described) if not _is_known(name)})


def _types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value["type"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _types(item)


def _is_known(name: str) -> bool:
    """Whether a dotted name leads to something, from the longest prefix that is an imported module."""
    if "<locals>" in name or "." not in name:  # nothing can lead to it
        return True
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (module := sys.modules.get(".".join(parts[:count]))) is not None:
            found: Any = module
            for part in parts[count:]:
                found = getattr(found, part, None)
            return found is not None
    return False


def _described(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_described(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, CachePolicy | PrefillPolicy):
        fields = vars(value)
    else:
        return repr(value)
    kind = type(value)
    return {"type": f"{kind.__module__}.{kind.__qualname__}", **{name: _described(x) for name, x in fields.items()}}
