"""What the text of a compiled program says."""

from __future__ import annotations

import re


def operations(program: str, shapes: set[tuple[int, ...]]) -> set[str]:
    """Names of the operations whose result has one of the shapes."""
    found = re.finditer(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", program)
    return {match[2] for match in found if tuple(map(int, match[1].split(","))) in shapes}
