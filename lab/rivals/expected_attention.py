"""Expected attention (arXiv 2510.00636): a head keeps what queries to come will look at, as far as the prompt's tell.

Queries before RoPE are taken for draws of a Gaussian, whose mean and covariance the prompt's queries give. Turned by
the mean rotation of the next positions, they foretell a key's attention: exp(mu k / sqrt(d) + k^T cov k / (2 d)),
normalised over the prompt, averaged over the group, times |v|. No single query decides, so the last ones weigh no more
than others: ask of a context (`tca_jax.prefill`), and what is kept does not depend on the question at all. At the end
of a prompt, a question's few queries count among those of the whole prompt.

Follows the published code (NVIDIA/kvpress at 08a43bf, `ExpectedAttentionPress`), whose defaults these are. The paper
weighs by |W_o v| and deals a layer's budget out among its heads; that code takes |v| and the same budget for all. What
differs from it: the cache has a window here, so the last tokens stay whatever their scores; the budget is of the tokens
left of it; and what follows the prompt is never compressed.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.errors import UserError, check_integer, check_not_negative
from tca_jax.lab.rivals.compression import PromptCompression
from tca_jax.lab.rivals.tiles import concatenate_tiles, sum_tiles
from tca_jax.methods.base import Frequencies, Heads, Method, Wording
from tca_jax.methods.full import FullPrefill
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import MASKED

_EXACT = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class ExpectedAttentionCache(PromptCompression):
    """The window, the sinks, and the tokens that queries to come are expected to attend to."""

    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    # the model's, `[d / 2]`; None until a model gives them (`lm.with_method` does)
    frequencies: Frequencies | None = dataclasses.field(default=None, repr=False)

    num_queries = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("future", self.future, at_least=1)
        check_integer("sinks", self.sinks, at_least=0)
        check_not_negative("epsilon", self.epsilon)

    def for_model(
        self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None
    ) -> ExpectedAttentionCache:
        if frequencies is None:
            raise UserError(
                "expected-attention needs rotations that depend on a token's position alone: this model's RoPE "
                "changes with the length (dynamic)"
            )
        return dataclasses.replace(self, frequencies=frequencies)

    def scores(
        self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Float32[Array, "B Hkv L"]:
        if self.frequencies is None:
            raise UserError("frequencies = None: must be the model's; lm.with_method puts them in")
        mean, covariance = future_queries(q, lengths, self.frequencies, sinks=self.sinks, future=self.future)
        logits = expected_logits(mean, covariance, k)
        index = jnp.arange(k.shape[1])
        measured = (index >= self.sinks) & (index < lengths[:, None, None, None])
        attention = jax.nn.softmax(jnp.where(measured, logits, MASKED), axis=-1).mean(axis=2)
        norms = jnp.linalg.norm(v.astype(jnp.float32), axis=-1).swapaxes(1, 2)
        scores = (attention + self.epsilon) * norms
        ahead = jnp.where(index < lengths[:, None, None], scores, 0).max(axis=-1, keepdims=True) + 1
        return jnp.where(index < self.sinks, ahead, scores)


def expected_attention(
    share: float = 0.5,
    future: int = 512,
    sinks: int = 4,
    epsilon: float = 0.0,
    window: int = 128,
    block_size: int = 128,
) -> Method:
    """Full attention for the prompt's queries, expected attention's selection in the cache.

    Args:
        share: Kept share of the tokens left of the window, in (0, 1]; the code's 1 - `compression_ratio`.
        future: Positions behind the prompt over which rotations are averaged; the code's `n_future_positions`.
        sinks: First tokens, kept before all others; the code's `n_sink`.
        epsilon: Added to the expected attention before it is multiplied by |v|; the more, the more |v| decides.
        window: Least number of local tokens, a multiple of `block_size`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    cache = ExpectedAttentionCache(None, share, window, block_size, future, sinks, epsilon)
    return Method("expected-attention", FullPrefill(), cache)


def future_queries(
    q: Float[Array, "B L Hq d"], lengths: Int[Array, " B"], frequencies: Frequencies, *, sinks: int, future: int
) -> tuple[Float32[Array, "B Hq d"], Float32[Array, "B Hq d d"]]:
    """Mean and covariance of queries to come, under the mean rotation of the positions behind the prompt.

    A factor that RoPE multiplies cosines and sines by (YaRN's) is undone and put back, so it plays no part.

    Args:
        q: Prompt queries after RoPE `[B, L, Hq, d]`, right-padded; query i is at position i.
        lengths: Prompt lengths `[B]`.
        frequencies: Of the rotation, `[d / 2]`.
        sinks: First queries, which are left out.
        future: Positions over which the rotation is averaged.
    """
    radians = jnp.asarray(frequencies, jnp.float32)
    counted = jnp.maximum(lengths - sinks, 1)[:, None, None]  # shorter prompts have nothing to be selected from

    def unturned(positions: Array, tile: Array) -> tuple[Array, Array]:
        """Queries of a tile before RoPE, and which of them count."""
        angles = positions[:, None].astype(jnp.float32) * radians
        counts = (positions >= sinks) & (positions < lengths[:, None])
        return _turn(tile.astype(jnp.float32), jnp.cos(angles)[:, None], -jnp.sin(angles)[:, None]), counts[..., None]

    def add_up(positions: Array, tile: Array) -> Float32[Array, "B Hq d"]:
        queries, counts = unturned(positions, tile)
        return jnp.sum(jnp.where(counts[..., None], queries, 0), axis=1)

    def spread(positions: Array, tile: Array) -> Float32[Array, "B Hq d d"]:
        queries, counts = unturned(positions, tile)
        centred = jnp.where(counts[..., None], queries - mean[:, None], 0)
        return jnp.einsum("bthi,bthj->bhij", centred, centred, precision=_EXACT)

    mean = sum_tiles(add_up, q) / counted
    covariance = sum_tiles(spread, q) / counted[..., None]
    angles = (lengths[:, None] + jnp.arange(future)).astype(jnp.float32)[..., None] * radians  # [B, future, d / 2]
    cos, sin = (x.mean(axis=1)[:, None] for x in (jnp.cos(angles), jnp.sin(angles)))
    rows = _turn(covariance, cos[:, None], sin[:, None])
    both = _turn(rows.swapaxes(-1, -2), cos[:, None], sin[:, None])
    return _turn(mean, cos, sin), both.swapaxes(-1, -2)


def expected_logits(
    mean: Float32[Array, "B Hq d"], covariance: Float32[Array, "B Hq d d"], k: Float[Array, "B L Hkv d"]
) -> Float32[Array, "B Hkv G L"]:
    """Logarithm of the expectation of exp(q k / sqrt(d)) over Gaussian queries, for every key."""
    batch, _, kv_heads, head_dim = k.shape
    means = mean.reshape(batch, kv_heads, -1, head_dim)
    covariances = covariance.reshape(batch, kv_heads, -1, head_dim, head_dim)

    def of_tile(positions: Array, keys: Array) -> Float32[Array, "B Hkv G t"]:
        keys = keys.astype(jnp.float32)
        first = jnp.einsum("bhgd,bthd->bhgt", means, keys, precision=_EXACT) / math.sqrt(head_dim)
        turned = jnp.einsum("bthd,bhgde->bhgte", keys, covariances, precision=_EXACT)
        second = jnp.einsum("bhgte,bthe->bhgt", turned, keys, precision=_EXACT) / (2 * head_dim)
        return first + second

    return concatenate_tiles(of_tile, k)


def _turn(
    x: Float32[Array, "*lead d"], cos: Float32[Array, "*angles half"], sin: Float32[Array, "*angles half"]
) -> Float32[Array, "*lead d"]:
    """The pairs (i, i + d / 2) of the last axis times cos + i sin, which broadcast against the other axes."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
