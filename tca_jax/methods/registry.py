"""The registry of attention methods: one name each, pairs by "+"; and canonical descriptions of methods.

A package registers methods by entry points of the group "tca_jax.methods", from a name to a factory; the lab does so
with its rivals. A method is imported when it is first asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from tca_jax.errors import UserError, require, require_name
from tca_jax.methods.base import CachePolicy, Method, PrefillPolicy

Factory = Callable[..., Method]

_GROUP = "tca_jax.methods"
_IN_CORE = {name: f"tca_jax.methods.{name}:{name}" for name in ("full", "streaming", "tca")}
_FACTORIES: dict[str, Factory] = {}


def register(name: str, factory: Factory, *, replace: bool = False) -> None:
    """Makes a method available by a name, to `get` and to `lm.with_method`.

    Args:
        name: Without "+", which joins two methods.
        factory: Returns the method; its keyword arguments are the method's options.
        replace: Whether the name may be taken already.

    Raises:
        ValueError: the name is empty, holds a "+", or is taken.
    """
    require(name and "+" not in name, f"name = {name!r}: must be a non-empty string without '+'")
    free = replace or name not in names()
    require(free, f"name = {name!r} is registered already; pass replace=True to put another method in its place")
    _FACTORIES[name] = factory


def names() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted({*_installed(), *_FACTORIES}))


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    """Methods by name: the core's, and those of installed packages."""
    core = [EntryPoint(name, target, _GROUP) for name, target in _IN_CORE.items()]
    return {entry.name: entry for entry in (*entry_points(group=_GROUP), *core)}


def option_names(name: str) -> tuple[str, ...]:
    """Names of a method's options; ValueError if the name is unknown."""
    return tuple(inspect.signature(_factory(name)).parameters)


def required_options(name: str) -> tuple[str, ...]:
    """Names of those of a method's options that have no default; ValueError if the name is unknown."""
    given = inspect.signature(_factory(name)).parameters.values()
    return tuple(each.name for each in given if each.default is each.empty and each.kind is not each.VAR_KEYWORD)


def get(name: str, **options: Any) -> Method:
    """A method by its name.

    Args:
        name: A registered name, or "a+b": the prefill policy of a over the cache policy of b.
        **options: Options of the method; of a pair, a mapping of options for each part that takes any, by its name:
            `get("full+streaming", streaming={"sinks": 8})`.

    Raises:
        ValueError: the name is unknown (with the known ones), an option is, or a value is not allowed.
    """
    made = [_make(part, given) for part, given in _parts(name, options)]
    return made[0] if len(made) == 1 else Method(name, made[0].prefill, made[1].cache)


def with_known(name: str, known: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a method or a pair, with values for those that are known of a model, such as its budgets.

    A method gets those values of `known` that it takes; `options` replace them. Names and errors are those of `get`.
    """
    filled = {
        part: {**{option: known[option] for option in option_names(part) if option in known}, **given}
        for part, given in _parts(name, options)
    }
    return filled if "+" in name else filled[name]


def _parts(name: str, options: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and options of a method, or of each of the two that a pair joins."""
    parts = name.split("+")
    require(len(parts) <= 2, f"method {name!r}: at most two methods can be joined, prefill + cache")
    if len(parts) == 1:
        return [(name, options)]
    unknown = sorted(set(options) - set(parts))
    require(not unknown, f"method {name!r} has no part {unknown}: options of a pair go by its parts, {parts}")
    for part, given in options.items():
        require(isinstance(given, Mapping), f"{part} = {given!r}: options of a part of {name!r} must be a mapping")
    return [(part, options.get(part, {})) for part in parts]


def _factory(name: str) -> Factory:
    require_name(f"method {name!r} is not registered", name, names())
    if name not in _FACTORIES:
        _FACTORIES[name] = _installed()[name].load()
    return _FACTORIES[name]


def _make(name: str, options: Mapping[str, Any]) -> Method:
    factory = _factory(name)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UserError(f"options of method {name!r}: {error}; it takes {signature}") from None
    method = factory(**options)
    made = f"its factory returned a {type(method).__name__}, must be a Method"
    require(isinstance(method, Method), f"method {name!r}: {made}")
    return method


@functools.lru_cache(maxsize=64)
def describe_method(method: Method) -> str:
    """Canonical JSON of a method, the same in every process: its policies' types and all of their options."""
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
