"""Atomic writes of files, and system errors that name their file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a file beside `path` to write in its place; a rename makes it `path` unless the block raises an error."""
    target = Path(path)
    if target.exists() and not target.is_file():  # such as a pipe, which is written directly
        with naming(target):
            yield target
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        with naming(target, instead_of=unfinished):
            yield unfinished
            os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: str | os.PathLike[str], instead_of: Path | None = None) -> Iterator[None]:
    """Gives errors of the system `path` as their file where they have none, as on a full disk, or `instead_of`."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(instead_of)):
            error.filename, error.filename2 = os.fspath(path), None
        raise
