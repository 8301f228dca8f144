"""Errors that users can mend, and checks of arguments that raise them, with the value and the allowed values."""

import math
import numbers
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """An argument is not allowed. The message names it and the allowed values."""


class UserTypeError(UserError, TypeError):
    """An argument is of a wrong type."""


class Unsupported(UserError, NotImplementedError):
    """A feature exists elsewhere and not here, or not on this device."""


def require(ok: Any, message: str, error: type[Exception] = UserError) -> None:
    """Raises `error` unless `ok`; the message has the value, the allowed values and a remedy."""
    if not ok:
        raise error(message)


def require_name(given: str, name: Any, known: Collection[str], error: type[Exception] = UserError) -> None:
    """Raises `error` unless a name is known; the message has all, and the nearest where there are many."""
    near = () if name in known else get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    meant = f" (nearest: {', '.join(near)})" if near and len(known) > 5 else ""
    require(name in known, f"{given}: must be one of {sorted(known)}{meant}", error)


@contextmanager
def explaining(message: str, *kinds: type[BaseException], error: type[UserError] = UserError) -> Iterator[None]:
    """Raises `error` with the message and the reason in place of errors of these kinds, by default of any library's."""
    try:
        yield
    except BaseException as cause:
        # A panic of Rust code is no Exception; a request to end the process is none either.
        if not isinstance(cause, kinds or Exception) and (kinds or type(cause).__name__ != "PanicException"):
            raise
        kind = "" if kinds or isinstance(cause, UserError) else f"{type(cause).__name__}:"
        raise error(f"{message}: {' '.join([kind, *str(cause).split()]).strip()}") from cause


def require_type(name: str, value: Any, allowed: type | tuple[type, ...], must: str) -> None:
    """Raises UserTypeError unless a value is of an allowed type; `must` names these, with an article."""
    require(isinstance(value, allowed), f"{name} is of type {type(value).__name__}: must be {must}", UserTypeError)


def is_finite_number(value: Any) -> bool:
    """Whether it is a number, of Python or NumPy, that a float holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_integer(name: str, value: Any, *, at_least: int, at_most: float = math.inf) -> None:
    """Raises ValueError unless `value` is an integer, of Python or NumPy, from `at_least` to `at_most`."""
    holds = isinstance(value, numbers.Integral) and not isinstance(value, bool) and at_least <= int(value) <= at_most
    words = f"of at least {at_least}" if at_most == math.inf else f"from {at_least} to {at_most}"
    require(holds, f"{name} = {value!r}: must be an integer {words}")


def check_seed(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer in [0, 2^32): JAX's keys would take others for one of these."""
    check_integer(name, value, at_least=0)
    require(value < 2**32, f"{name} = {value}: must lie in [0, 2^32)")


def check_number(name: str, value: Any, *, above: float, at_most: float) -> None:
    """Raises ValueError unless `value` is a number in (above, at_most]."""
    require(is_finite_number(value), f"{name} = {value!r}: must be a finite number")
    require(above < float(value) <= at_most, f"{name} = {value!r}: must lie in ({above}, {at_most}]")


def check_not_negative(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite number of at least 0."""
    require(is_finite_number(value) and value >= 0, f"{name} = {value!r}: must be a finite number of at least 0")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    require(isinstance(value, bool), f"{name} = {value!r}: must be True or False")


def check_geometry(block_size: Any, window: Any, of: str = "") -> None:
    """Raises ValueError unless blocks are a power of two long and the window has one or more complete blocks."""
    check_integer(f"{of}block_size", block_size, at_least=1)
    require(not block_size & (block_size - 1), f"{of}block_size = {block_size}: must be a power of two, at least 1")
    check_integer(f"{of}window", window, at_least=1)
    fits = window % block_size == 0
    require(fits, f"{of}window = {window}: must be a positive multiple of block_size = {block_size}")
