"""Which pattern each query head has under MInference: a table of plain values, as searches write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tca_jax.errors import UserError

#: Kinds of a head, and what the published tables call them.
KINDS = {
    "vertical_slash": "vertical_slash",
    "vertical_and_slash": "vertical_slash",
    "a_shape": "a_shape",
    "stream_llm": "a_shape",
    "block_sparse": "block_sparse",
}


class HeadPattern(NamedTuple):
    """What one query head attends to; serialises as a list such as `["vertical_slash", 1000, 6096]`.

    Attributes:
        kind: "vertical_slash": the columns and diagonals that the last queries have most attention on; "a_shape": the
            first columns and the nearest diagonals; "block_sparse": the key blocks with the highest products of means.
        columns: Columns; of no meaning for "block_sparse", as in the published code.
        diagonals: Diagonals, likewise.
    """

    kind: str
    columns: int
    diagonals: int


#: What the authors give a head of which nothing is known.
DEFAULT = HeadPattern("vertical_slash", 1000, 6096)
#: Patterns of each layer's query heads.
Patterns = tuple[tuple[HeadPattern, ...], ...]


def parse_patterns(table: Any) -> Patterns:
    """Patterns of every layer and query head from plain values.

    Args:
        table: For each layer a list with an entry `[kind, columns, diagonals]` a head, or, as the published tables have
            it, a mapping from the head's number to one; further values of an entry, such as a score, are ignored.

    Raises:
        ValueError: it is no such table; the message names the place.
    """
    if not isinstance(table, Sequence) or isinstance(table, str) or not table:
        raise UserError(f"patterns = {table!r}: must be a list with the patterns of each layer")
    layers = tuple(_parse_layer(layer, f"patterns[{number}]") for number, layer in enumerate(table))
    counts = sorted({len(layer) for layer in layers})
    if len(counts) > 1:
        raise UserError(f"patterns has layers of {counts} heads: must be as many in each")
    return layers


def _parse_layer(layer: Any, place: str) -> tuple[HeadPattern, ...]:
    if isinstance(layer, Mapping):
        heads = {str(number): entry for number, entry in layer.items()}
        missing = [number for number in range(len(heads)) if str(number) not in heads]
        if missing:
            raise UserError(f"{place} has no head {missing[0]}: must have all of its {len(heads)} heads by number")
        layer = [heads[str(number)] for number in range(len(heads))]
    if not isinstance(layer, Sequence) or isinstance(layer, str) or not layer:
        raise UserError(f"{place} = {layer!r}: must be a list with an entry for each query head")
    return tuple(_parse_head(entry, f"{place}[{number}]") for number, entry in enumerate(layer))


def _parse_head(entry: Any, place: str) -> HeadPattern:
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) < 3:
        raise UserError(f"{place} = {entry!r}: must be [kind, columns, diagonals]")
    kind, columns, diagonals = entry[:3]
    if kind not in KINDS:
        raise UserError(f"{place} has kind {kind!r}: must be one of {list(KINDS)}")
    for number in (columns, diagonals):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise UserError(f"{place} has {number!r}: columns and diagonals must be integers of at least 0")
    return HeadPattern(KINDS[kind], columns, diagonals)
