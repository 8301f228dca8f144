"""Input and output of commands: files and the terminal."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tca_jax.errors import UserError, explaining
from tca_jax.files import naming


def read_text(path: Path, option: str) -> str:
    """Text of a UTF-8 file, "-" for standard input; errors name the option."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    with explaining(f"{option} {path} is not UTF-8 text", UnicodeDecodeError):
        return data.decode("utf-8")


def require_writable(folder: Path, option: str) -> None:
    """Fails before a long run if `folder`, or the nearest folder above it that exists, cannot be written to."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be written: {existing}: {error.strerror}") from None


def print_json(record: dict[str, Any]) -> None:
    with naming("standard output"):
        print(json.dumps(record, indent=2, allow_nan=False))
