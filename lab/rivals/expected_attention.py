"""Expected attention (arXiv 2510.00636): a head keeps the tokens that later queries are expected to attend to.

Queries before RoPE are taken for draws of a Gaussian with the mean and covariance of the prompt's. Turned by the mean
rotation of the next positions, they foretell a key's attention: exp(mu k / sqrt(d) + k^T cov k / (2 d)), normalised
over the prompt, averaged over the group, times |v|. Follows `ExpectedAttentionPress` (NVIDIA/kvpress at 08a43bf): |v|
and one budget for all heads, where the paper weighs by |W_o v| and divides a layer's budget.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.errors import check_integer, check_not_negative, require
from tca_jax.lab.rivals.compression import PromptCompression, rival
from tca_jax.methods.base import Frequencies, Wording

_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class ExpectedAttentionCache(PromptCompression):
    capacity: int | None = dataclasses.field(default=None, init=False)
    share: float = 0.5  # the code's 1 - `compression_ratio`
    future: int = 512  # positions after the prompt over which rotations are averaged; the code's `n_future_positions`
    sinks: int = 4  # first tokens, kept before all others; the code's `n_sink`
    epsilon: float = 0.0  # added to the expected attention before it is multiplied by |v|
    frequencies: Frequencies | None = dataclasses.field(default=None, repr=False)  # the model's, `[d / 2]`

    num_queries = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("future", self.future, at_least=1)
        check_integer("sinks", self.sinks, at_least=0)
        check_not_negative("epsilon", self.epsilon)

    def for_model(
        self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None
    ) -> ExpectedAttentionCache:
        needs = "expected-attention needs rotations that depend on a token's position alone"
        require(frequencies is not None, f"{needs}: this model's RoPE changes with the length (dynamic)")
        return dataclasses.replace(self, frequencies=frequencies)

    def score(self, q: Array, k: Array, v: Array, lengths: Array) -> Array:
        require(self.frequencies, "frequencies = None: must be the model's; lm.with_method puts them in")
        index, lengths = jnp.arange(k.shape[1]), lengths[:, None]
        measured = (index >= self.sinks) & (index < lengths)
        logits = expected_logits(*self.future_queries(q, measured, lengths), k.astype(jnp.float32))
        attention = jax.nn.softmax(logits, axis=-1, where=measured[:, None]).mean(axis=1)
        scores = (attention + self.epsilon) * jnp.linalg.norm(v.astype(jnp.float32), axis=-1)
        ahead = jnp.where(index < lengths, scores, 0).max(axis=-1, keepdims=True) + 1
        return jnp.where(index < self.sinks, ahead, scores)

    def future_queries(
        self, q: Float[Array, "B L G d"], measured: Bool[Array, "B L"], lengths: Int[Array, "B 1"]
    ) -> tuple[Float32[Array, "B G d"], Float32[Array, "B G d d"]]:
        """Mean and covariance of queries to come, under the mean rotation of positions after the prompt."""
        radians = jnp.asarray(self.frequencies, jnp.float32)
        angles = (jnp.arange(q.shape[1])[:, None] * radians)[:, None]
        queries = _turn(q.astype(jnp.float32), jnp.cos(angles), -jnp.sin(angles))  # before RoPE
        counted = jnp.maximum(lengths - self.sinks, 1)[..., None]  # shorter prompts have nothing to be selected from
        among = measured[..., None, None]
        mean = jnp.where(among, queries, 0).sum(axis=1) / counted
        centred = jnp.where(among, queries - mean[:, None], 0)
        covariance = jnp.einsum("blgi,blgj->bgij", centred, centred, precision=_EXACT) / counted[..., None]
        angles = (lengths + jnp.arange(self.future)).astype(jnp.float32)[..., None] * radians  # [B, future, d / 2]
        cos, sin = (x.mean(axis=1)[:, None] for x in (jnp.cos(angles), jnp.sin(angles)))
        rows = _turn(covariance, cos[:, None], sin[:, None])
        both = _turn(rows.swapaxes(-1, -2), cos[:, None], sin[:, None])
        return _turn(mean, cos, sin), both.swapaxes(-1, -2)


expected_attention = rival("expected-attention", ExpectedAttentionCache)


def expected_logits(
    mean: Float32[Array, "B G d"], covariance: Float32[Array, "B G d d"], k: Float32[Array, "B L d"]
) -> Float32[Array, "B G L"]:
    """Logarithm of the expectation of exp(q k / sqrt(d)) over Gaussian queries, for every key."""
    first = jnp.einsum("bgd,bld->bgl", mean, k, precision=_EXACT) / math.sqrt(k.shape[-1])
    turned = jnp.einsum("bld,bgde->bgle", k, covariance, precision=_EXACT)
    return first + jnp.einsum("bgle,ble->bgl", turned, k, precision=_EXACT) / (2 * k.shape[-1])


def _turn(
    x: Float32[Array, "*lead d"], cos: Float32[Array, "*angles half"], sin: Float32[Array, "*angles half"]
) -> Float32[Array, "*lead d"]:
    """The pairs (i, i + d / 2) of the last axis times cos + i sin, which broadcast against the other axes."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
