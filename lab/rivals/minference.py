"""MInference 1.0 (arXiv 2407.02490): each head has one of three patterns, found offline, and fills it from the prompt.

A vertical-slash head takes the columns and diagonals on which the prompt's last 64 queries have most attention, an
A-shape head the first columns and the nearest diagonals, a block-sparse head the key blocks whose mean key has the
largest product with the tile's mean query.

Where text and code differ this is the code (microsoft/MInference at 0647e2c). The first 30 columns and the nearest 100
diagonals are taken first; a vertical-slash head has at least 30 and 50 of them; block-sparse heads take 100 blocks;
heads of which nothing is known are vertical-slash with 1000 columns and 6096 diagonals. A diagonal is computed as its
kernel does it: in blocks of as many keys as a tile has queries, which begin at any token and take in further diagonals
as far as they reach. Here blocks are cut from the nearest diagonal on, there from the farthest: of the keys beside the
diagonals the two compute some others.

The offline search (`search_patterns` in `pattern_search` beside this file) has the
code's candidates and criterion: there, the nearest 30 diagonals are taken first, and an A-shape head sees one diagonal
more than its number says. The code then turns A-shape heads into vertical-slash ones of the same size and
block-sparse heads into the default; this search keeps the kind that it found, as the paper does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tca_jax.errors import UserError, check_integer, check_number
from tca_jax.lab.rivals.head_tables import check_query_heads, of_layer
from tca_jax.lab.rivals.last_attention import by_position, diagonal_sums, last_attention
from tca_jax.lab.rivals.ranks import highest
from tca_jax.methods.base import Heads, Method, last_queries
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed, block_sums
from tca_jax.methods.full import FullCache
from tca_jax.pallas_kernels.block_sparse_attention.lists import BlockLists, columns_of_mask, lists_of_mask
from tca_jax.pallas_kernels.numerics import cdiv

OBSERVED = 64  # queries that the lines are found in
_FIRST_COLUMNS, _NEAREST_DIAGONALS = 30, 100  # always taken
_LEAST_COLUMNS, _LEAST_DIAGONALS = 30, 50


#: Kinds of a head, and what the published tables call them.
KINDS = {
    "vertical_slash": "vertical_slash",
    "vertical_and_slash": "vertical_slash",
    "a_shape": "a_shape",
    "stream_llm": "a_shape",
    "block_sparse": "block_sparse",
}


class HeadPattern(NamedTuple):
    """What one query head attends to; serialises as a list such as `["vertical_slash", 1000, 6096]`."""

    # "vertical_slash": the columns and diagonals that the last queries have most attention on; "a_shape": the first
    # columns and the nearest diagonals; "block_sparse": the key blocks with the highest products of means
    kind: str
    columns: int  # columns; of no meaning for "block_sparse", as in the published code
    diagonals: int  # diagonals, likewise


#: What the authors give a head of which nothing is known.
DEFAULT = HeadPattern("vertical_slash", 1000, 6096)
#: Patterns of each layer's query heads.
Patterns = tuple[tuple[HeadPattern, ...], ...]


class PatternArrays(NamedTuple):
    """Patterns of some query heads as arrays of one shape."""

    columns: Any
    diagonals: Any
    fixed: Any  # whether it is an A-shape head
    by_blocks: Any  # whether it is a block-sparse head

    @classmethod
    def of(cls, patterns: tuple[HeadPattern, ...]) -> PatternArrays:
        kinds = np.array([p.kind for p in patterns])
        columns, diagonals = (np.array(x, np.int32) for x in zip(*(p[1:] for p in patterns), strict=True))
        return cls(columns, diagonals, kinds == "a_shape", kinds == "block_sparse")


@dataclasses.dataclass(frozen=True)
class MInferencePrefill(BlockSparsePrefill):
    """The pattern of each query head, filled from the prompt."""

    patterns: Patterns | None = None
    scale: float = 1.0
    blocks: int = 100
    block_size: int = 64
    dense_tokens: int = 1024

    aligned = False

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0, at_most=1e6)
        check_integer("blocks", self.blocks, at_least=1)
        check_integer("block_size", self.block_size, at_least=1)
        check_integer("dense_tokens", self.dense_tokens, at_least=0)

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if self.patterns is not None:
            check_query_heads("patterns", self.patterns, num_layers, num_kv_heads)

    def of_layer(self, layer: int, heads: int) -> tuple[HeadPattern, ...]:
        """Patterns of a layer's query heads, scaled.

        Raises:
            ValueError: the table is of another number of heads.
        """
        patterns = (DEFAULT,) * heads if self.patterns is None else of_layer("patterns", self.patterns, layer, heads)
        return tuple(HeadPattern(p.kind, *(int(self.scale * n) for n in p[1:])) for p in patterns)

    def estimate(self, layer: int, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> tuple[Listed, ...]:
        group, tokens = q.shape[2], q.shape[1]
        patterns = self.of_layer(layer, heads.of_model * group)
        arrays = (heads.of(x.reshape(-1, group)) for x in PatternArrays.of(patterns))
        own = PatternArrays(*(jnp.asarray(x)[head] for x in arrays))
        of_lines = [max(_LEAST_COLUMNS, p.columns) for p in patterns if p.kind != "block_sparse"]
        columns, diagonals = lines(q, k, lengths, own)
        launches: tuple[Listed, ...] = (
            Listed(
                blocks_of_diagonals(diagonals, self.block_size),
                columns_of_mask(columns, min(tokens, max(of_lines, default=1))),
            ),
        )
        if len(of_lines) < len(patterns):
            blocks = max(1, int(self.scale * self.blocks))
            mask = best_blocks(q, k, lengths, blocks, self.block_size) & own.by_blocks[:, None, None]
            launches += (Listed(lists_of_mask(mask, self.block_size)),)
        return launches


def lines(
    q: Float[Array, "B L G d"],
    k: Float[Array, "B L d"],
    lengths: Int[Array, " B"],
    numbers: PatternArrays,
    nearest: int = _NEAREST_DIAGONALS,
) -> tuple[Bool[Array, "B G L"], Bool[Array, "B G L"]]:
    """Columns by their positions, and diagonals by how far left of the query they are; of block-sparse heads none.

    A vertical-slash head takes the `nearest` diagonals before all others.
    """
    attention = last_attention(last_queries(q, lengths, OBSERVED), k, lengths)
    index = jnp.arange(k.shape[1])
    real = index < lengths[:, None, None]
    marked = []
    for sums, always, least, number in (
        (by_position(attention.sum(axis=2), lengths), _FIRST_COLUMNS, _LEAST_COLUMNS, numbers.columns),
        (diagonal_sums(attention), nearest, _LEAST_DIAGONALS, numbers.diagonals),
    ):
        counts = jnp.minimum(lengths[:, None], jnp.maximum(number, least))
        best = highest(jnp.where(index < always, jnp.inf, sums), counts, real)
        first = (index < number[:, None]) & real
        marked.append(jnp.where(numbers.fixed[:, None], first, best) & ~numbers.by_blocks[:, None])
    return marked[0], marked[1]


def blocks_of_diagonals(diagonals: Bool[Array, "B G L"], size: int) -> BlockLists:
    """The fewest blocks of keys, cut from the nearest on, that hold what a tile's queries meet on some diagonals."""
    length = diagonals.shape[-1]
    tiles = cdiv(length, size)
    end = tiles * size
    diagonals = jnp.pad(diagonals, ((0, 0), (0, 0), (0, end - length)))
    # The queries of a tile meet diagonal o at the places o to o + size - 1, counted left from the tile's last token.
    met = jnp.cumsum(diagonals, axis=-1, dtype=jnp.int32)
    met = met > jnp.pad(met, ((0, 0), (0, 0), (size, 0)))[..., :end]
    places = jnp.where(met, jnp.arange(end, dtype=jnp.int32), end)
    following = jax.lax.cummin(places, axis=2, reverse=True)  # the nearest place from here on that is met; `end`: none
    # A block begins at the first place that the one before does not hold. Twice the jump finds twice as many blocks.
    starts = following[..., :1]
    jump = jnp.pad(following, ((0, 0), (0, 0), (0, size + 1)), constant_values=end)[..., size:]
    while starts.shape[-1] < tiles:
        starts = jnp.concatenate([starts, jnp.take_along_axis(jump, starts, axis=-1)], axis=-1)
        jump = jnp.take_along_axis(jump, jump, axis=-1)
    starts = starts[..., :tiles]
    ends = (jnp.arange(tiles, dtype=jnp.int32) + 1) * size
    counts = (starts[..., None, :] < ends[:, None]).sum(axis=-1, dtype=jnp.int32)
    return BlockLists((starts + size)[:, :, None], counts)


def best_blocks(
    q: Float[Array, "B L G d"], k: Float[Array, "B L d"], lengths: Int[Array, " B"], blocks: int, size: int
) -> Bool[Array, "B G N N"]:
    """For each tile the key blocks whose mean key has the largest product with the tile's mean query."""
    queries, keys = block_sums(q, lengths, size), block_sums(k[:, :, None], lengths, size)[:, :, 0]
    scores = jnp.einsum("bigd,bjd->bgij", queries, keys, precision="highest") / size**2
    tiles = scores.shape[-1]
    among = jnp.tri(tiles, dtype=bool) & (jnp.arange(tiles) * size < lengths[:, None])[:, None, None]
    return highest(scores, jnp.full(scores.shape[:-1], blocks, jnp.int32), among)


def minference(
    patterns: Any = None, scale: float = 1.0, blocks: int = 100, block_size: int = 64, dense_tokens: int = 1024
) -> Method:
    """MInference for the prompt's queries; the cache keeps every token.

    Args:
        patterns: For each layer an entry `[kind, columns, diagonals]` a query head, as
            `search_patterns` finds them, or a table that the authors published (`json.load` of it);
            None: vertical-slash with 1000 columns and 6096 diagonals for all.
        scale: What all numbers of columns, diagonals and blocks are multiplied by, above 0: the knob of the budget.
        blocks: Key blocks that a tile of a block-sparse head takes.
        block_size: Tokens in a block and queries in a tile; 16 or a multiple of it for the Triton kernel. Lone
            diagonals cost as much as it is large, and large tiles are computed faster.
        dense_tokens: Prompts of at most so many tokens get exact causal attention.

    Raises:
        ValueError: a number is not allowed, or `patterns` is no such table.
    """
    table = None if patterns is None else parse_patterns(patterns)
    return Method("minference", MInferencePrefill(table, scale, blocks, block_size, dense_tokens), FullCache())


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
