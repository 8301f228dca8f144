"""Errors that are the user's to mend: what checks of arguments and files raise."""

from typing import Any


class UserError(ValueError):
    """What was given cannot be used. The message names it, and says what is allowed."""


class UserTypeError(UserError, TypeError):
    """What was given is of a wrong type."""


class Unsupported(UserError, NotImplementedError):
    """What was asked for exists elsewhere and not here, or not on this device."""


def require_type(name: str, value: Any, allowed: type | tuple[type, ...], what: str) -> None:
    """Raises UserTypeError unless a value is of an allowed type; `what` says which these are, with an article."""
    if not isinstance(value, allowed):
        raise UserTypeError(f"{name} is of type {type(value).__name__}: must be {what}")
