"""Which requests are run together: those that begin alike, and those of about one length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Shared:
    """Sequences that begin with the same tokens.

    Attributes:
        length: Tokens that they share; 0 of a sequence that shares too few.
        members: Their places.
    """

    length: int
    members: tuple[int, ...]


def shared_prefixes(sequences: Sequence[Sequence[int]], at_least: int) -> list[Shared]:
    """Groups of sequences whose beginnings can be read once. At least one token of each is left behind its prefix.

    Sequences are sorted, and one joins the group of the one before it if it shares `at_least` tokens with all of the
    group, and at least half of what the group shares already: a document that several questions follow is not given
    up for the few-shot examples that stand before every document.

    Args:
        sequences: Token ids.
        at_least: Fewest tokens worth sharing; 0 groups nothing.
    """
    if not at_least:
        return [Shared(0, (i,)) for i in range(len(sequences))]
    groups: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
        own = len(sequences[i]) - 1
        if groups:
            length, members = groups[-1]
            common = min(length, own, _common(sequences[members[-1]], sequences[i]))
            if common >= max(at_least, length / 2):
                groups[-1] = (common, [*members, i])
                continue
        groups.append((own, [i]))
    return [Shared(length if len(members) > 1 else 0, tuple(members)) for length, members in groups]


def batches(items: Sequence[Item], size: int, key: Callable[[Item], Any]) -> Iterator[list[Item]]:
    """Batches of at most `size` items, those with the highest keys first, so that what does not fit fails at once."""
    ordered = sorted(items, key=key, reverse=True)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def filled(rows: Sequence[Item], size: int) -> list[Item]:
    """Rows with the last one repeated up to `size`: another number of rows would compile another program."""
    return [*rows, *[rows[-1]] * (size - len(rows))]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
