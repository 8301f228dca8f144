"""Ada-KV (arXiv 2407.11550): the KV heads of a layer share one budget, which each prompt divides.

The highest scores of all heads of a layer decide how many tokens each head keeps; a safeguard is the least. In the
cache, heads of a row share their pages. `adakv` takes SnapKV's scores and follows `AdaptiveSnapKVCluster` (FFY0/AdaKV
at efe4e2e) with its scripts' safeguard for grouped queries. What differs: pooled scores are averaged over the group,
where the code pools the mean.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Int

from tca_jax.errors import check_not_negative, require
from tca_jax.lab.rivals.compression import GrowingCache, PromptCompression, Scores, divided
from tca_jax.lab.rivals.snapkv import SnapKVCache
from tca_jax.methods.base import Frequencies, Heads, Layer, Method, Wording
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.regions import Selection


@dataclasses.dataclass(frozen=True)
class AdaKVCache(GrowingCache):
    scored: PromptCompression  # gives the scores, and the mean number of tokens of a head
    safeguard: float  # part of the mean that every head has, in [0, 1]; `floor_alpha` and `alpha_safeguard`
    # what the safeguard does. True: a head's first `safeguard` times the mean are chosen before all others of the
    # layer. False: a head has `safeguard` times the mean, and 1 - `safeguard` times what it would have without,
    # rounded.
    protects: bool

    def __post_init__(self) -> None:
        check_not_negative("safeguard", self.safeguard)
        require(self.safeguard <= 1, f"safeguard = {self.safeguard}: must lie in [0, 1]")
        for name in ("block_size", "window", "num_queries"):
            object.__setattr__(self, name, getattr(self.scored, name))

    @property
    def layers_differ(self) -> bool:  # type: ignore[override]
        return self.scored.layers_differ

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> AdaKVCache:
        scored = self.scored.for_model(num_layers, frequencies, wording)
        return dataclasses.replace(self, scored=cast(PromptCompression, scored))

    def shared_capacities(self, prompt_tokens: int, num_layers: int, num_kv_heads: int) -> tuple[int, ...]:
        # Each head's number is rounded.
        of_heads = (self.scored.capacities(layer, prompt_tokens) + (not self.protects) for layer in range(num_layers))
        return tuple(num_kv_heads * each for each in of_heads)

    def select(self, layer: Layer, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Selection:
        scores = self.scored.token_scores(heads, q, k, v, lengths)
        mean = self.scored.mean_of_heads(layer, lengths, k.shape[1])
        return self.scored.selection(scores, self._counts(scores, mean, heads, lengths), lengths)

    def _counts(self, scores: Scores, mean: Int[Array, " B"], heads: Heads, lengths: Array) -> Int[Array, "B Hkv"]:
        floor = jnp.floor(self.safeguard * mean).astype(jnp.int32)
        least = floor if self.protects else jnp.zeros_like(mean)
        found = divided(scores, self.scored.ranked(lengths, scores.shape[-1]), mean * heads.of_model, heads, least)
        if self.protects:
            return found
        blended = jnp.round(found * (1 - self.safeguard) + floor[:, None]).astype(jnp.int32)
        fits = mean == self.num_ranked_blocks(lengths) * self.block_size
        return jnp.where(fits[:, None], found, blended)


def adakv(
    capacity: int = 1024,
    share: float | None = None,
    safeguard: float = 0.2,
    observation: int = 32,
    kernel: int = 7,
    pooling: str = "max",
    window: int = 128,
    block_size: int = 128,
) -> Method:
    """Full attention in prefill, Ada-KV's selection by SnapKV's scores in the cache."""
    scored = SnapKVCache(capacity, share, window, block_size, observation, kernel, pooling)
    return Method("adakv", FullPrefill(), AdaKVCache(scored, safeguard, protects=False))
