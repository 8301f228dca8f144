"""Which errors are the user's to mend, and the one line that says so."""

from __future__ import annotations

import dis
import os
from types import TracebackType

#: What checks of arguments and files raise.
_RAISED_BY_CHECKS = (ValueError, TypeError, ArithmeticError, NotImplementedError)


def users_message(error: Exception) -> str | None:
    """What a user reads of an error, without Python's decoration; None where it is a bug, whose traceback is wanted.

    The user's are errors of the system, a device's memory that does not suffice, and those that a `raise` of this
    package states. A ValueError or TypeError that Python or a library comes up with on its own is a bug of ours.
    """
    if isinstance(error, OSError):
        if not error.strerror:
            return str(error)
        return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, _RAISED_BY_CHECKS) and _is_raised_by_us(error.__traceback__):
        return str(error)
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory: {str(error).splitlines()[0]}"
    return None


def _is_raised_by_us(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is this package's, and stopped at a `raise`."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    if frame.f_globals.get("__name__", "").partition(".")[0] != "tca_jax":
        return False
    return dis.opname[frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
