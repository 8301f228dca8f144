"""MInference 1.0 (arXiv 2407.02490): each head has one of three patterns, found offline, and fills it from the prompt.

A vertical-slash head takes the columns and diagonals with most attention of the prompt's last 64 queries, an A-shape
head the first columns and nearest diagonals, a block-sparse head the key blocks whose mean key has the largest product
with the tile's mean query. Follows microsoft/MInference at 0647e2c: the first 30 columns and the nearest 100 diagonals
come first; a vertical-slash head has at least 30 and 50. A diagonal is computed in blocks of as many keys as a tile has
queries. What differs: blocks are cut from the nearest diagonal on, in the code from the farthest, and every tile
attends to its own block, which in the code heads of the last two patterns may leave out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tca_jax.errors import UserError, check_integer, check_number, require
from tca_jax.lab.rivals.compression import rival
from tca_jax.lab.rivals.scores import diagonal_sums, highest, last_attention
from tca_jax.lab.rivals.tables import check_shape, of_layer
from tca_jax.methods.base import Heads, Layer, last_queries
from tca_jax.methods.block_sparse import BlockSparsePrefill, Listed, block_sums, lists_of_mask
from tca_jax.pallas_kernels.numerics import cdiv

OBSERVED = 64  # queries that the lines are found in
_FIRST_COLUMNS, _NEAREST_DIAGONALS = 30, 100  # always taken
_LEAST_COLUMNS, _LEAST_DIAGONALS = 30, 50
#: Kinds of a head, by what the published tables and this package call them.
KINDS = {kind: kind for kind in ("vertical_slash", "a_shape", "block_sparse")}
KINDS |= {"vertical_and_slash": "vertical_slash", "stream_llm": "a_shape"}


class HeadPattern(NamedTuple):
    """Pattern of one query head; serialises as a list such as `["vertical_slash", 1000, 6096]`."""

    # "vertical_slash": the columns and diagonals that the last queries have most attention on; "a_shape": the first
    # columns and the nearest diagonals; "block_sparse": the key blocks with the highest products of means, whose
    # numbers have no meaning, as in the published code
    kind: str
    columns: int
    diagonals: int


#: What the authors give a head of which nothing is known.
DEFAULT = HeadPattern("vertical_slash", 1000, 6096)


@dataclasses.dataclass(frozen=True)
class MInferencePrefill(BlockSparsePrefill):
    # for each layer an entry `[kind, columns, diagonals]` a query head, such as a table that the authors published
    # (`json.load` of it); None: `DEFAULT` for all
    patterns: Any = None
    scale: float = 1.0  # what all numbers of columns, diagonals and blocks are multiplied by: the knob of the budget
    blocks: int = 100  # key blocks that a tile of a block-sparse head takes
    # tokens in a block and queries in a tile; 16 or a multiple of it for Triton. Lone diagonals cost as much as it is
    # large, and large tiles are computed faster.
    block_size: int = 64
    dense_tokens: int = 1024  # longest prompt, in tokens, with exact causal attention

    aligned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0, at_most=1e6)
        check_integer("blocks", self.blocks, at_least=1)
        check_integer("block_size", self.block_size, at_least=1)
        must = "must be no multiple of 128, for diagonals begin between such blocks"
        require(self.block_size % 128, f"block_size = {self.block_size}: {must}")
        check_integer("dense_tokens", self.dense_tokens, at_least=0)
        if self.patterns is not None:
            object.__setattr__(self, "patterns", _parsed(self.patterns))

    @property
    def layers_differ(self) -> bool:  # type: ignore[override]
        return self.patterns is not None

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        if self.patterns is not None:
            check_shape("patterns", self.patterns, num_layers, num_kv_heads, "query heads")

    def estimate(self, layer: Layer, heads: Heads, head: Array, q: Array, k: Array, lengths: Array) -> Listed:
        group, patterns = q.shape[2], self._of_layer(layer, heads, q.shape[2])
        kinds, *numbers = map(np.array, zip(*patterns, strict=True))
        arrays = kinds == "a_shape", kinds == "block_sparse", *(x.astype(np.int32) for x in numbers)
        fixed, by_blocks, *counts = (jnp.asarray(heads.of(x.reshape(-1, group)))[head] for x in arrays)
        columns, diagonals = (x & ~by_blocks[:, None] for x in lines(q, k, lengths, fixed, *counts))
        by_lines = Listed(*blocks_of_diagonals(diagonals, self.block_size), columns)
        if "block_sparse" not in kinds:
            return by_lines
        mask = best_blocks(q, k, lengths, max(1, int(self.scale * self.blocks)), self.block_size)
        marked = lists_of_mask(mask, self.block_size, k.shape[1])
        blocks = jnp.where(by_blocks[:, None, None], marked.blocks, by_lines.blocks)
        return Listed(blocks, jnp.where(by_blocks[:, None], marked.counts, by_lines.counts), columns)

    def most_columns(self, layer: Layer, heads: Heads, group: int) -> int:
        columns = (p.columns for p in self._of_layer(layer, heads, group) if p.kind != "block_sparse")
        return max((max(_LEAST_COLUMNS, number) for number in columns), default=0)

    def _of_layer(self, layer: Layer, heads: Heads, group: int) -> list[HeadPattern]:
        """The pattern of every query head of the model's, scaled."""
        count = heads.of_model * group
        given = (DEFAULT,) * count if self.patterns is None else of_layer("patterns", self.patterns, layer, count)
        return [HeadPattern(kind, *(int(self.scale * n) for n in numbers)) for kind, *numbers in given]


minference = rival("minference", MInferencePrefill)


def lines(
    q: Float[Array, "B L G d"],
    k: Float[Array, "B L d"],
    lengths: Int[Array, " B"],
    fixed: Bool[Array, " G"],  # whether it is an A-shape head
    columns: Int[Array, " G"],
    diagonals: Int[Array, " G"],
) -> tuple[Bool[Array, "B G L"], Bool[Array, "B G L"]]:
    """Columns by their positions, and diagonals by how far left of the query they are."""
    attention = last_attention(last_queries(q, lengths, OBSERVED), k, lengths)
    index = jnp.arange(k.shape[1])
    real = index < lengths[:, None, None]

    def marked(sums: Array, always: int, least: int, number: Array) -> Bool[Array, "B G L"]:
        counts = jnp.minimum(lengths[:, None], jnp.maximum(number, least))
        best = highest(jnp.where(index < always, jnp.inf, sums), counts, real)
        return jnp.where(fixed[:, None], (index < number[:, None]) & real, best)

    return (
        marked(attention.sum(axis=2), _FIRST_COLUMNS, _LEAST_COLUMNS, columns),
        marked(diagonal_sums(attention, lengths), _NEAREST_DIAGONALS, _LEAST_DIAGONALS, diagonals),
    )


def blocks_of_diagonals(diagonals: Bool[Array, "B G L"], size: int) -> tuple[Array, Array]:
    """The fewest blocks of keys, cut from a tile's own on, that hold the keys of its queries on some diagonals."""
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
    jump = jnp.pad(following, ((0, 0), (0, 0), (0, size + 1)), constant_values=end)[..., size:]
    starts = jump[..., :1]
    while starts.shape[-1] < tiles:
        starts = jnp.concatenate([starts, jnp.take_along_axis(jump, starts, axis=-1)], axis=-1)
        jump = jnp.take_along_axis(jump, jump, axis=-1)
    begins = jnp.arange(tiles, dtype=jnp.int32)[:, None] * size - starts[..., None, :tiles]  # [B, G, tile, block]
    return begins, (begins > -size).sum(axis=-1, dtype=jnp.int32)


def best_blocks(
    q: Float[Array, "B L G d"], k: Float[Array, "B L d"], lengths: Int[Array, " B"], blocks: int, size: int
) -> Bool[Array, "B G N N"]:
    """For each tile the key blocks whose mean key has the largest product with the tile's mean query."""
    queries, keys = block_sums(q, lengths, size), block_sums(k[:, :, None], lengths, size)[:, :, 0]
    scores = jnp.einsum("bigd,bjd->bgij", queries, keys, precision="highest") / size**2
    tiles = scores.shape[-1]
    among = jnp.tri(tiles, dtype=bool) & (jnp.arange(tiles) * size < lengths[:, None])[:, None, None]
    return highest(scores, jnp.full(scores.shape[:-1], blocks, jnp.int32), among)


def _parsed(table: Any) -> tuple[tuple[HeadPattern, ...], ...]:
    """Patterns of every layer and query head from plain values; entries after the numbers are ignored."""
    layers = table if isinstance(table, Sequence) else ()
    sizes = {len(layer) if isinstance(layer, Sequence | Mapping) else 0 for layer in layers}
    fits = len(sizes) == 1 and 0 not in sizes
    require(fits, f"patterns = {table!r}: must be a list with an entry for each query head of each layer")
    return tuple(
        tuple(_parsed_entry(f"patterns[{number}][{head}]", layer, head) for head in range(len(layer)))
        for number, layer in enumerate(table)
    )


def _parsed_entry(place: str, layer: Any, head: int) -> HeadPattern:
    # Published tables map the head's number to its entry.
    entry = layer.get(str(head), layer.get(head)) if isinstance(layer, Mapping) else layer[head]
    match entry:
        case [str(kind), int(columns), int(diagonals), *_] if kind in KINDS and min(columns, diagonals) >= 0:
            return HeadPattern(KINDS[kind], columns, diagonals)
    raise UserError(f"{place} = {entry!r}: must be [kind, columns, diagonals] with a kind of {list(KINDS)}")
