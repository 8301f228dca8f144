"""Which errors are the user's to mend, and the one line that says so."""

from __future__ import annotations

import os

from tca_jax.errors import UserError


def users_message(error: Exception) -> str | None:
    """What a user reads of an error, without Python's decoration; None where it is a bug, whose traceback is wanted.

    The user's are `UserError`, errors of the system, and a device's memory that does not suffice.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        if not error.strerror:
            return str(error)
        return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory: {str(error).splitlines()[0]}"
    return None
