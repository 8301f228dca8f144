"""Texts of the measuring sticks: Python's standard library and Vim's manual, in two halves by the hash of a name.

`python -m tca_jax.lab.evaluation.texts --to FOLDER` copies both into a folder, for a machine that lacks one of them or
has another version.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from tca_jax.errors import require
from tca_jax.lab.recall.corpus import source_files

Half = Literal["calibration", "test"]
KINDS = ("python", "manual")
_MANUALS = "/usr/share/vim"
_LONGEST_LINE = 10_000  # characters


def half_of(name: str) -> Half:
    """The half of a file by its name."""
    return "test" if hashlib.sha256(name.encode()).digest()[0] % 2 else "calibration"


def files(kind: str, folder: Path | None = None) -> list[Path]:
    """Files of a kind, sorted by name; those of `folder/kind`, or of this machine."""
    if folder is not None:
        found = [path for path in (folder / kind).rglob("*") if path.is_file()]
    elif kind == "python":
        found = [path for path in source_files("train") if path.stat().st_size > 2_000] + list(source_files("held-out"))
    else:
        found = list(Path(_MANUALS).glob("vim*/doc/*.txt"))
    where = folder / kind if folder is not None else _MANUALS
    advice = "install Debian's vim-runtime, or pass --texts FOLDER"
    require(found, f"no {kind} texts in {where}: {advice}", FileNotFoundError)
    return sorted(found, key=lambda path: (path.name, str(path)))


@functools.lru_cache(maxsize=8)
def read_half(kind: str, half: Half, folder: Path | None = None) -> str:
    """All text of a kind and a half, one file after the other."""
    paths = (path for path in files(kind, folder) if half_of(path.name) == half)
    return "\n".join(path.read_text("utf-8", errors="ignore") for path in paths)


def draw(rng: np.random.Generator, kind: str, half: Half, characters: int, folder: Path | None = None) -> str:
    """A slice of `characters`, from the start of a line on."""
    text, needed = read_half(kind, half, folder), characters + max(characters, _LONGEST_LINE + 1)
    of_half = f"the {half} half of {kind} texts has {len(text):,} characters"
    require(len(text) >= needed, f"{of_half}: {needed:,} are needed")
    start = text.index("\n", int(rng.integers(len(text) - characters - _LONGEST_LINE))) + 1
    return text[start : start + characters]


def main(to: Annotated[Path, typer.Option(help="Folder to copy the texts to; must not hold any yet.")]) -> None:
    """Copies the texts of this machine to a folder."""
    require(not to.exists() or not any(to.iterdir()), f"--to {to} is not empty: pass a new folder")
    texts = [(kind, path) for kind in KINDS for path in files(kind)]
    for kind, path in texts:  # the name stays: it decides the half
        number = 0  # of the subfolder: names repeat
        while (place := to / kind / str(number) / path.name).exists():
            number += 1
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    print(f"{len(texts)} files in {to}")


if __name__ == "__main__":
    typer.run(main)
