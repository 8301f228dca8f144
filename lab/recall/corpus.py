"""Text for recall documents: the source of Python's standard library, which every machine has."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tca_jax.errors import require, require_name

# Modules that training never sees, about a megabyte in every Python since 3.11.
HELD_OUT_MODULES: tuple[str, ...] = (
    *("argparse.py", "difflib.py", "doctest.py", "imaplib.py", "inspect.py", "ipaddress.py", "mailbox.py"),
    *("optparse.py", "pickletools.py", "statistics.py", "subprocess.py", "tarfile.py", "typing.py"),
)

# Tests and tables are hardly prose or code; the rest is not the standard library's own.
_SKIPPED_FOLDERS = {"__pycache__", "_bundled", "dist-packages", "encodings", "idlelib", "lib2to3"}
_SKIPPED_FOLDERS |= {"pydoc_data", "site-packages", "test", "tests"}


def source_files(split: str) -> tuple[Path, ...]:
    """The standard library files of a split, sorted: "train" or "held-out" (`HELD_OUT_MODULES`)."""
    require_name(f"split = {split!r}", split, ("train", "held-out"))
    root = Path(sysconfig.get_path("stdlib"))
    held_out = (root / name for name in HELD_OUT_MODULES if (root / name).is_file())
    files = tuple(held_out if split == "held-out" else sorted(_training_files(root)))
    advice = "recall documents are made from the .py files of the running Python; use an installation that has them"
    require(files, f"no standard library source for the {split!r} split in {root}: {advice}", FileNotFoundError)
    return files


def _training_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            held_out = path.relative_to(root).as_posix() in HELD_OUT_MODULES
            if not held_out and not path.name.startswith("_sysconfigdata"):  # build settings of one machine
                yield path


@functools.lru_cache(maxsize=2)
def corpus(split: str) -> bytes:
    """All text of a split, one file after another, without characters outside ASCII."""
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in source_files(split))
    return b"\n".join(text.encode("ascii", errors="ignore") for text in texts)


@functools.lru_cache(maxsize=2)
def line_starts(split: str) -> np.ndarray:
    """Byte offsets at which a line of the corpus begins."""
    line_breaks = np.flatnonzero(np.frombuffer(corpus(split), np.uint8) == ord("\n"))
    return np.concatenate([[0], line_breaks[:-1] + 1])
