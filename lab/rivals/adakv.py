"""Ada-KV (arXiv 2407.11550): the KV heads of a layer share one budget, and each prompt says how they divide it.

The highest scores of all heads of a layer together say how many tokens each head has among them; a safeguard keeps
every head from having too few. A head then keeps its own highest scores. `adakv` takes SnapKV's scores and follows the
authors' code (FFY0/AdaKV at efe4e2e, `AdaptiveSnapKVCluster`), whose defaults these are; the safeguard is the one that
its scripts take for grouped queries. What differs:

- Grouped queries. The code averages the group's attention and pools the mean; here the pooled scores are averaged, as
  in `snapkv`. Under average pooling that is the same; under maximum pooling a score may be larger here.
- The window. There, the last 32 tokens observe and stay; here at least `window`, with the left edge on a block
  boundary; `capacity` counts the window in, as there.

In the cache the heads of a row share their pages: which are whose is data of the program.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from tca_jax.errors import UserError, check_not_negative
from tca_jax.lab.rivals.compression import PromptCompression, ranked_bits, threshold
from tca_jax.lab.rivals.snapkv import SnapKVCache
from tca_jax.methods.base import CachePolicy, Frequencies, Heads, Method, Wording
from tca_jax.methods.full import FullPrefill
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.backends import Backend


@dataclasses.dataclass(frozen=True)
class AdaKVCache(CachePolicy):
    """The window, and of a layer's tokens those of the highest scores, in some heads more than in others."""

    scored: PromptCompression  # scores the tokens, and says how many a head keeps in the mean
    safeguard: float
    # what the safeguard does. True: a head's first `safeguard` times the mean are chosen before all others of the
    # layer. False: a head has `safeguard` times the mean, and 1 - `safeguard` times what it would have without,
    # rounded.
    protects: bool

    def __post_init__(self) -> None:
        check_not_negative("safeguard", self.safeguard)
        if self.safeguard > 1:
            raise UserError(f"safeguard = {self.safeguard}: must lie in [0, 1]")

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.scored.block_size

    @property
    def window(self) -> int:  # type: ignore[override]
        return self.scored.window

    @property
    def num_queries(self) -> int | None:  # type: ignore[override]
        return self.scored.num_queries

    def for_model(self, num_layers: int, frequencies: Frequencies | None, wording: Wording | None) -> AdaKVCache:
        scored = self.scored.for_model(num_layers, frequencies, wording)
        return dataclasses.replace(self, scored=cast(PromptCompression, scored))

    def validate_for(self, num_layers: int, num_kv_heads: int) -> None:
        self.scored.validate_for(num_layers, num_kv_heads)

    def capacities(self, layer: int, prompt_tokens: int) -> int:
        return self.num_ranked_blocks(prompt_tokens) * self.block_size

    def shared_capacities(self, prompt_tokens: int, num_layers: int, num_kv_heads: int) -> tuple[int, ...]:
        # Each head's number is rounded.
        of_heads = (self.scored.capacities(layer, prompt_tokens) + (not self.protects) for layer in range(num_layers))
        return tuple(num_kv_heads * each for each in of_heads)

    def growth(self, layer: int, prompt_tokens: int, new_tokens: int) -> int:
        return self.scored.growth(layer, prompt_tokens, new_tokens)

    def select(
        self, layer: int, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Selection:
        def counts(scores: Float32[Array, "B Hkv L"], mean: Int[Array, " B"]) -> Int[Array, "B Hkv"]:
            ranked_tokens = self.num_ranked_blocks(lengths) * self.block_size
            if self.protects:
                least = jnp.floor(self.safeguard * mean).astype(jnp.int32)
                return divided(scores, ranked_tokens, mean * heads.of_model, heads, least)
            found = divided(scores, ranked_tokens, mean * heads.of_model, heads, jnp.zeros_like(mean))
            floor = jnp.floor(mean * self.safeguard)[:, None]
            blended = jnp.round(found * (1 - self.safeguard) + floor).astype(jnp.int32)
            return jnp.where((mean == ranked_tokens)[:, None], found, blended)  # a prompt that fits is held whole

        return self.scored.select_counted(layer, heads, q, k, v, lengths, backend, counts)

    def evict(self, layer: int, heads: Heads, attention: Array, blocks: Array) -> Selection:
        return self.scored.evict(layer, heads, attention, blocks)


def divided(
    scores: Float32[Array, "B Hkv L"],
    ranked_tokens: Int[Array, " B"],
    wanted: Int[Array, " B"],
    heads: Heads,
    least: Int[Array, " B"],
) -> Int32[Array, "B Hkv"]:
    """How many of the highest scores of all of a layer's heads together are each head's.

    Args:
        scores: Finite and not negative `[B, Hkv, L]`.
        ranked_tokens: Tokens to choose from, the first of each row `[B]`.
        wanted: Tokens of all heads of the model together `[B]`; at most all ranked ones.
        heads: The KV heads that `scores` has. Of equal scores those of lower heads count first.
        least: Tokens that every head has at least `[B]`; of all heads together at most `wanted`.
    """
    bits = ranked_bits(scores, ranked_tokens)

    def at_least(score: Int32[Array, "B 1 1"]) -> Int32[Array, "B Hkv"]:
        return jnp.maximum((bits >= score).sum(axis=-1, dtype=jnp.int32), least[:, None])

    def enough(score: Int32[Array, "B 1 1"]) -> Array:
        return (heads.total(at_least(score)) >= wanted)[:, None, None]

    found = threshold(enough, jnp.zeros((len(scores), 1, 1), jnp.int32), scores, ranked_tokens, wanted)
    above = jnp.maximum((bits > found).sum(axis=-1, dtype=jnp.int32), least[:, None])
    tied = at_least(found) - above
    room = wanted[:, None] - heads.total(above)[:, None] - heads.total_before(tied)
    return above + jnp.clip(room, 0, tied)


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
    """Full attention for the prompt's queries, Ada-KV's selection by SnapKV's scores in the cache.

    Args:
        capacity: Tokens of a prompt that a KV head holds, the mean over a layer's heads, the window counted as
            `window`; the code's `base_capacity`.
        share: Instead: kept share of the tokens left of the window, the mean over a layer's heads, in (0, 1].
        safeguard: Part of the mean budget that every head has, in [0, 1]; the code's `floor_alpha`.
        observation: Last prompt queries that vote, at most `window`; the code's `window_size`.
        kernel: Neighbours that scores are pooled over, odd.
        pooling: "avg" or "max".
        window: Least number of local tokens, a multiple of `block_size`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    scored = SnapKVCache(capacity, share, window, block_size, observation, kernel, pooling)
    return Method("adakv", FullPrefill(), AdaKVCache(scored, safeguard, protects=False))
