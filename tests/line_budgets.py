"""Checks the lines of folders against the budgets in lines.toml.

    python tests/line_budgets.py   # prints every budget and the lines used; fails where one is exceeded

A key is one or several folders, counted with all below them, or `folder/*`: the folder's own files.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lines(place: str, suffix: str) -> int:
    """Lines of a folder's files with a suffix."""
    folder, own = Path(ROOT, place.removesuffix("/*")), place.endswith("/*")
    if not folder.is_dir():
        raise SystemExit(f"lines.toml: {place} is not a folder")
    return sum(len(path.read_text().splitlines()) for path in folder.glob(f"*.{suffix}" if own else f"**/*.{suffix}"))


def main() -> None:
    budgets = tomllib.loads((ROOT / "lines.toml").read_text())
    rows = [
        (places, suffix, sum(lines(place, suffix) for place in places.split()), most)
        for suffix, folders in budgets.items()
        for places, most in folders.items()
    ]
    for places, suffix, count, most in rows:
        print(f"{count:6,} of {most:6,}  {places} (.{suffix}){'  EXCEEDED' if count > most else ''}")
    sys.exit(any(count > most for *_, count, most in rows))


if __name__ == "__main__":
    main()
