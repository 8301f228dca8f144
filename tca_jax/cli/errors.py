"""Errors that users can fix, and their one-line messages."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import typer

from tca_jax.errors import UserError

UsageError: Any = typer.BadParameter.__base__  # typer does not export it by its name


def users_message(error: Exception) -> str | None:
    """The message of an error that users can fix; None for a bug, whose traceback is shown."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        if not error.strerror:
            return str(error)
        return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory: {str(error).splitlines()[0]}"
    return None


@contextlib.contextmanager
def naming_options(*names: str) -> Iterator[None]:
    """Errors that begin with one of these arguments' names begin with its option: `--top-p 2.0: must be ...`."""
    try:
        yield
    except UserError as error:
        if not (found := re.match(rf"(?:TCAConfig\.)?({'|'.join(names)})\b(?: =)?", str(error))):
            raise
        raise UserError(f"--{found[1].replace('_', '-')}{str(error)[found.end() :]}") from error
