"""Attention of probes over what rows have left of the text before them, and its derivative, a tile at a time.

Probes are packed into one sequence of columns; each is read behind the text alone and sees no other. All gradients of a
tile come from its scores and from the products of cotangents and values, which are computed once: with p the attention
over what is seen, P that over the whole text and s = dO V^T, the gradient of the scores is p (s - sum p s), and a gate
that lets a head see the whole text has the derivative sum (P - p) s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.pallas_kernels.integers import cdiv
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, varying_like, weighted_sum

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
    q: Float[Array, "P Hq d"], k: Float[Array, "P Hkv d"], v: Float[Array, "P Hkv d"], text: SeenText
) -> Float[Array, "P Hq d"]:
    """Attention of probes' queries over what is seen of the text before them, and causally over their own probe.

    Nothing is evicted while a probe is read, so that all it misses is what the selection at the text's end dropped.

    Args:
        q: Queries of the probes after RoPE; `k` and `v` their keys and values.
        text: What they are read behind.
    """
    tiles = _Tiles(q, k, v, text)

    def of_tile(tile: tuple[Array, Array]) -> Float32[Array, "Hkv G t d"]:
        queries, columns = tile
        scores, seen, _ = tiles.scores(queries, columns)
        return weighted_sum("hgtl,hld->hgtd", jax.nn.softmax(jnp.where(seen, scores, MASKED)), tiles.values)

    return tiles.whole(jax.lax.map(of_tile, (tiles.split(q), tiles.columns))).astype(q.dtype)


def known_attention(out: Float[Array, "P Hq d"], text: SeenText) -> Callable[[Array, Array, Array, Array], Array]:
    """`attend_probe` where its result is known, differentiable by the probes' operands and by gates of the heads.

    Args:
        out: What `attend_probe` gave for the operands that the function will be called with.
        text: What the probes are read behind.

    Returns:
        A function of q, k, v and gates `[H_kv]`: at 0 heads see what they have, at 1 the whole text. It returns `out`,
        whatever the gates; its derivatives are those at gates of 0.
    """

    @jax.custom_vjp
    def attend(q: Array, k: Array, v: Array, gates: Array) -> Array:
        return out

    def forward(q: Array, k: Array, v: Array, gates: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        return out, (q, k, v)

    def backward(operands: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, Array, Array]:
        return _gradients(*operands, text, cotangent)

    attend.defvjp(forward, backward)
    return attend


def _gradients(
    q: Float[Array, "P Hq d"],
    k: Float[Array, "P Hkv d"],
    v: Float[Array, "P Hkv d"],
    text: SeenText,
    cotangent: Float[Array, "P Hq d"],
) -> tuple[Float[Array, "P Hq d"], Float[Array, "P Hkv d"], Float[Array, "P Hkv d"], Float32[Array, " Hkv"]]:
    """By queries, keys and values of the probes, and by gates that let each KV head see the whole text."""
    tiles, scale, tokens = _Tiles(q, k, v, text), 1 / math.sqrt(q.shape[-1]), text.k.shape[0]

    def of_tile(sums: tuple[Array, Array, Array], tile: tuple[Array, Array, Array]) -> tuple[Any, Array]:
        queries, columns, slopes = tile
        scores, seen, there = tiles.scores(queries, columns)
        products = weighted_sum("hgtd,hld->hgtl", slopes, tiles.values)
        weights, norm, mean = _softmax_mean(scores, seen, products)
        *_, mean_of_whole = _softmax_mean(scores, there, products)
        weights = weights / norm
        of_scores = weights * (products - mean) * scale
        own = (
            weighted_sum("hgtl,hgtd->hld", of_scores[..., tokens:], queries),
            weighted_sum("hgtl,hgtd->hld", weights[..., tokens:], slopes.astype(v.dtype)),
            (mean_of_whole - mean).sum(axis=(1, 2, 3)),
        )
        added = tuple(a + b for a, b in zip(sums, own, strict=True))
        return added, weighted_sum("hgtl,hld->hgtd", of_scores, tiles.keys)

    shapes = (k.shape[1], k.shape[0], k.shape[2])
    nothing = jnp.zeros(shapes, jnp.float32), jnp.zeros(shapes, jnp.float32), jnp.zeros(k.shape[1], jnp.float32)
    each = tiles.split(q), tiles.columns, tiles.split(cotangent)
    (of_k, of_v, of_gates), of_q = jax.lax.scan(of_tile, varying_like(nothing, q, k, v, text, cotangent), each)
    of_k, of_v = (jnp.moveaxis(x, 0, 1) for x in (of_k, of_v))
    return tiles.whole(of_q).astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype), of_gates


def _softmax_mean(
    scores: Float32[Array, "Hkv G t L"], there: Bool[Array, "#Hkv 1 t L"], values: Float32[Array, "Hkv G t L"]
) -> tuple[Float32[Array, "Hkv G t L"], Float32[Array, "Hkv G t 1"], Float32[Array, "Hkv G t 1"]]:
    """Unscaled softmax weights of the tokens that are there, their sums, and the weighted mean of values."""
    masked = jnp.where(there, scores, MASKED)
    weights = jnp.exp(masked - masked.max(axis=-1, keepdims=True))
    norm = weights.sum(axis=-1, keepdims=True)
    return weights, norm, (weights * values).sum(axis=-1, keepdims=True) / norm


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
