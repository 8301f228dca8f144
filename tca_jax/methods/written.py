"""Methods as they are written on a command line: options after a colon, pairs by "+"."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tca_jax.errors import require, require_name
from tca_jax.methods.registry import names, option_names

Parts = tuple[tuple[str, Mapping[str, Any]], ...]  # name and options of a method, or of each of the two of a pair


def parse_parts(
    text: str,
    option: str,  # of the command line, for messages
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),  # further allowed names, with their options
) -> Parts:
    """The parts of a method such as "random:share=0.25" or "full+streaming:window=512,sinks=8".

    Values are numbers, true, false, null or text. ValueError if a name or an option is unknown.
    """
    return tuple(_part(part, f"{option} {text}", more) for part in text.split("+"))


def _part(text: str, where: str, more: Mapping[str, Sequence[str]]) -> tuple[str, Mapping[str, Any]]:
    name, _, listed = text.partition(":")
    require_name(f"{where}: {name!r} is not registered", name, (*names(), *more))
    options = {}
    for option in listed.split(",") if listed else ():
        key, equals, value = option.partition("=")
        require(equals, f"{where}: {option!r} must be written as option=value")
        options[key] = _value(value)
    taken = more[name] if name in more else option_names(name)
    for key in options:
        require_name(f"{where}: {name} has no option {key!r}", key, taken)
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def joined(parts: Parts, where: str) -> tuple[str, dict[str, Any]]:
    """A registered name, or a pair of them, and its options as `get` takes them; `where` begins messages."""
    name = "+".join(part for part, _ in parts)
    if len(parts) == 1:
        return name, dict(parts[0][1])
    same = len(parts) == 2 and parts[0][0] == parts[1][0] and parts[0][1] != parts[1][1]
    require(not same, f"{where}: joins a method with itself under other options")
    return name, {part: options for part, options in parts if options}
