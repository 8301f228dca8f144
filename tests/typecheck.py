"""The run-time type checker of the tests: beartype, with int accepted where float is expected (PEP 484)."""

import inspect

from beartype import BeartypeConf, beartype

_beartyped = beartype(conf=BeartypeConf(is_pep484_tower=True))
_INNER = {}


def check(function):
    """The function with its arguments and its result checked; made once for what is defined inside of a function.

    What jaxtyping hands in has a signature and a body that does nothing. It does so whenever a definition runs: making
    a checker each time took a sixth of the time of tests that call much without compiling it.
    """
    if "<locals>" not in function.__qualname__:
        return _beartyped(function)
    parameters = inspect.signature(function).parameters.values()
    called = tuple((each.name, each.kind, each.default is each.empty) for each in parameters)
    key = function.__module__, function.__qualname__, called, tuple(function.__annotations__.items())
    if key not in _INNER:
        _INNER[key] = _beartyped(function)
    return _INNER[key]
