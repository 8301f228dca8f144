"""Methods told apart by a description that is the same in every process."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tca_jax.methods.base import CachePolicy, Method, PrefillPolicy


@functools.lru_cache(maxsize=64)
def describe_method(method: Method) -> str:
    """Canonical JSON of a method: its policies' types and all of their options."""
    return json.dumps(_described(method), sort_keys=True, separators=(",", ":"))


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
