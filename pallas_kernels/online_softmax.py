"""Online softmax: attention streamed over spans of keys, a tile at a time; the XLA implementations' loop."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, varying_like, weighted_sum


class KeyValues(NamedTuple):
    """Keys and values of all regions, one region after another [rows, d]."""

    k: Float[Array, "rows d"]
    v: Float[Array, "rows d"]


class Span(NamedTuple):
    """Keys [first, end), from row `base` on, for R queries; query r sees [lower[r], upper[r]) of them."""

    base: Int[Array, ""]
    first: Int[Array, ""]
    end: Int[Array, ""]
    lower: Int[Array, " R"]
    upper: Int[Array, " R"]


class OnlineSoftmax(NamedTuple):
    """Attention of R queries over the keys seen so far; all float32."""

    peak: Float32[Array, "*R"]  # largest score [R]
    weight: Float32[Array, "*R"]  # sum of exp(score - peak) [R]
    output: Float32[Array, "*R d"]  # sum of exp(score - peak) times the value [R, d]

    @classmethod
    def empty(cls, queries: int, head_dim: int) -> OnlineSoftmax:
        """Before any key."""
        peak, weight = (jnp.full(queries, value, jnp.float32) for value in (MASKED, 0))
        return cls(peak, weight, jnp.zeros((queries, head_dim), jnp.float32))

    def attend(self, scores: Float32[Array, "R k"], seen: Bool[Array, "R k"], v: Float[Array, "k d"]) -> OnlineSoftmax:
        """With more keys, by their scores."""
        scores = jnp.where(seen, scores, MASKED)
        peak = jnp.maximum(self.peak, scores.max(axis=-1))
        weights, decay = jnp.where(seen, jnp.exp(scores - peak[:, None]), 0), jnp.exp(self.peak - peak)
        output = self.output * decay[:, None] + weighted_sum("rk,kd->rd", weights, v)
        return OnlineSoftmax(peak, self.weight * decay + weights.sum(axis=-1), output)

    def attention(self) -> Float32[Array, "*R d"]:
        """The output, normalised; zeros for a query that saw no key."""
        return self.output / self._total()[..., None]

    def log_sum_exp(self) -> Float32[Array, "*R"]:
        """Log-sum-exp of the scores."""
        return self.peak + jnp.log(self._total())

    def _total(self) -> Float32[Array, "*R"]:
        return jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)


def attend_span(
    queries: Float[Array, "R d"], keys: KeyValues, span: Span, state: OnlineSoftmax, tile: int
) -> OnlineSoftmax:
    """Takes a span's keys through the softmax, `tile` at a time.

    The trip count is dynamic: the cost is that of the keys in the span. No tile leaves the array: the last
    may reach back over keys that are masked, never past the end.
    """
    rows = keys.k.shape[0]
    tile = min(tile, rows)

    def step(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        begin = span.first + i * tile
        start = jnp.minimum(span.base + begin, rows - tile)
        index = start - span.base + jnp.arange(tile)
        scores = scaled_scores("rd,kd->rk", queries, jax.lax.dynamic_slice_in_dim(keys.k, start, tile))
        lower = jnp.maximum(begin, span.lower)[:, None]
        seen = (index >= lower) & (index < jnp.minimum(span.end, span.upper)[:, None])
        return state.attend(scores, seen, jax.lax.dynamic_slice_in_dim(keys.v, start, tile))

    trips = divide_up(jnp.maximum(span.end - span.first, 0), tile)
    return jax.lax.fori_loop(0, trips, step, varying_like(state, queries, keys, span))
