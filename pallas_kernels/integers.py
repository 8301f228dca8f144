"""Integers of the host, sizes and counts known before anything is traced: divided up and rounded up."""

from __future__ import annotations


def cdiv(value: int, by: int) -> int:
    """ceil(value / by)."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return cdiv(value, multiple) * multiple
