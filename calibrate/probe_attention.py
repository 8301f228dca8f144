"""Attention of probes over what rows have left of the text before them, a tile of queries at a time.

Probes are packed into one sequence of columns; each is read behind the text alone and sees no other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.pallas_kernels.integers import cdiv
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum

_TILE_ELEMENTS = 2**27  # scores of a tile: 512 MiB
_LARGEST_TILE = 256  # queries


class SeenText(NamedTuple):
    """A text, and what is seen of it by probes behind it.

    Attributes:
        k: Keys, zero behind the text; `v` the values.
        seen: Tokens that each KV head still has.
        length: Tokens of the text.
        probe: Number of the probe that each column belongs to; columns of a probe stand side by side, in order.
    """

    k: Float[Array, "L Hkv d"]
    v: Float[Array, "L Hkv d"]
    seen: Bool[Array, "Hkv L"]
    length: Int[Array, ""]
    probe: Int[Array, " P"]


def attend_probe(
    q: Float[Array, "P Hq d"],
    k: Float[Array, "P Hkv d"],
    v: Float[Array, "P Hkv d"],
    text: SeenText,
    gates: Float32[Array, " Hkv"] | None = None,
) -> Float[Array, "P Hq d"]:
    """Attention of probes' queries over what is seen of the text before them, and causally over their own probe.

    Nothing is evicted while a probe is read, so that all it misses is what the selection at the text's end dropped.

    Args:
        q: Queries of the probes after RoPE; `k` and `v` their keys and values.
        text: What they are read behind.
        gates: Of each KV head, from what it sees at 0 to the whole text at 1; None for 0.
    """
    tiles = _Tiles(q, k, v, text)

    @jax.checkpoint
    def of_tile(tile: tuple[Array, Array]) -> Float32[Array, "Hkv G t d"]:
        queries, columns = tile
        scores, seen, there = tiles.scores(queries, columns)
        weights = jax.nn.softmax(jnp.where(seen, scores, MASKED))
        if gates is not None:
            whole = jax.nn.softmax(jnp.where(there, scores, MASKED))
            weights += gates[:, None, None, None] * (whole - weights)
        return weighted_sum("hgtl,hld->hgtd", weights, tiles.values)

    return tiles.whole(jax.lax.map(of_tile, (tiles.split(q), tiles.columns))).astype(q.dtype)


class _Tiles:
    """Queries of probes in tiles, each against all keys of text and probes."""

    def __init__(
        self, q: Float[Array, "P Hq d"], k: Float[Array, "P Hkv d"], v: Float[Array, "P Hkv d"], text: SeenText
    ) -> None:
        (self._count, heads, _), (self._tokens, self._kv_heads, _) = q.shape, text.k.shape
        # Heads first, once: what the tiles multiply is then laid out as matrix products want it.
        self.keys, self.values = (jnp.moveaxis(jnp.concatenate(pair), 1, 0) for pair in ((text.k, k), (text.v, v)))
        self._text, self._there = text, jnp.arange(self._tokens) < text.length
        self._size = max(1, min(self._count, _LARGEST_TILE, _TILE_ELEMENTS // (heads * (self._tokens + self._count))))
        number = cdiv(self._count, self._size)
        self.columns = jnp.arange(number * self._size).reshape(number, self._size)

    def split(self, rows: Float[Array, "P Hq d"]) -> Float[Array, "N Hkv G t d"]:
        """Rows of queries in tiles, the last one padded with zeros."""
        _, heads, dim = rows.shape
        padded = jnp.pad(rows, ((0, -self._count % self._size), (0, 0), (0, 0)))
        tiles = padded.reshape(-1, self._size, self._kv_heads, heads // self._kv_heads, dim)
        return jnp.moveaxis(tiles, 1, 3)

    def whole(self, tiles: Float[Array, "N Hkv G t d"]) -> Float[Array, "P Hq d"]:
        """What `split` has split."""
        rows = jnp.moveaxis(tiles, 3, 1)
        return rows.reshape(-1, rows.shape[2] * rows.shape[3], rows.shape[4])[: self._count]

    def scores(
        self, queries: Float[Array, "Hkv G t d"], columns: Int[Array, " t"]
    ) -> tuple[Float32[Array, "Hkv G t L"], Bool[Array, "Hkv 1 t L"], Bool[Array, "1 1 t L"]]:
        """Scores of a tile against all keys, those that it sees, and those that it would of the whole text."""
        probe, own = self._text.probe, jnp.arange(self._count)
        mine = probe[jnp.minimum(columns, self._count - 1)]
        own = (own <= columns[:, None]) & (probe == mine[:, None])  # [t, P]

        def beside(text: Bool[Array, "H T"]) -> Bool[Array, "H 1 t L"]:
            rows = jnp.broadcast_to(text[:, None], (text.shape[0], own.shape[0], self._tokens))
            return jnp.concatenate([rows, jnp.broadcast_to(own, (text.shape[0], *own.shape))], axis=-1)[:, None]

        seen, there = beside(self._text.seen & self._there), beside(self._there[None])
        return scaled_scores("hgtd,hld->hgtl", queries, self.keys), seen, there
