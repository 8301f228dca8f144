"""Errors that are the user's to mend, and checks of arguments that raise them: what was given, what is allowed."""

import math
import numbers
from typing import Any


class UserError(ValueError):
    """What was given cannot be used. The message names it, and says what is allowed."""


class UserTypeError(UserError, TypeError):
    """What was given is of a wrong type."""


class Unsupported(UserError, NotImplementedError):
    """What was asked for exists elsewhere and not here, or not on this device."""


def require(ok: Any, message: str, error: type[Exception] = UserError) -> None:
    """Raises `error` unless `ok`; the message says what was given, what it must be, and a remedy."""
    if not ok:
        raise error(message)


def require_type(name: str, value: Any, allowed: type | tuple[type, ...], what: str) -> None:
    """Raises UserTypeError unless a value is of an allowed type; `what` says which these are, with an article."""
    if not isinstance(value, allowed):
        raise UserTypeError(f"{name} is of type {type(value).__name__}: must be {what}")


def is_finite_number(value: Any) -> bool:
    """Whether it is a number, of Python or NumPy, that a float holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def check_integer(name: str, value: Any, *, at_least: int) -> None:
    """Raises ValueError unless `value` is an integer, of Python or NumPy, of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise UserError(f"{name} = {value!r}: must be an integer of at least {at_least}")


def check_seed(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is an integer in [0, 2^32): JAX's keys would take others for one of these."""
    check_integer(name, value, at_least=0)
    if value >= 2**32:
        raise UserError(f"{name} = {value}: must lie in [0, 2^32)")


def check_number(name: str, value: Any, *, above: float, at_most: float) -> None:
    """Raises ValueError unless `value` is a number in (above, at_most]."""
    if not is_finite_number(value):
        raise UserError(f"{name} = {value!r}: must be a finite number")
    if not above < float(value) <= at_most:
        raise UserError(f"{name} = {value!r}: must lie in ({above}, {at_most}]")


def least_share(share: float) -> str:
    """The least share that is allowed, for messages: rounded up, so that what is shown is allowed."""
    nearest = round(float(share), 4)
    return f"{nearest if nearest >= share else nearest + 1e-4:.4f}"


def check_not_negative(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a finite number of at least 0."""
    if not is_finite_number(value) or value < 0:
        raise UserError(f"{name} = {value!r}: must be a finite number of at least 0")


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} = {value!r}: must be True or False")


def check_geometry(block_size: Any, window: Any) -> None:
    """Raises ValueError unless blocks are a power of two long and the window holds whole blocks, at least one."""
    check_integer("block_size", block_size, at_least=1)
    if block_size & (block_size - 1):
        raise UserError(f"block_size = {block_size}: must be a power of two, at least 1")
    check_integer("window", window, at_least=1)
    if window < block_size or window % block_size:
        raise UserError(f"window = {window}: must be a positive multiple of block_size = {block_size}")
