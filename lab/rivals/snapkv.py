"""SnapKV (arXiv 2404.14469): a head keeps what the last queries of the prompt attend to, pooled over neighbours.

Follows the published code (FasterDecoding/SnapKV at 557aff1), whose defaults these are; its LongBench runs use kernel 7
and maximum pooling. What differs:

- Query heads. The code repeats keys and values for every query head and lets each keep tokens of its own, which gives
  up what grouped queries save; the paper does not speak of groups. Here a KV head keeps one set, by the mean over its
  group of the pooled scores, as NVIDIA's kvpress does.
- The window. There, the last `observation` tokens are those that observe and those that stay. Here at least `window`
  tokens stay, with the left edge on a block boundary; `capacity` counts the window in, as there.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32

from tca_jax.lab.rivals.compression import PromptCompression, over_full
from tca_jax.lab.rivals.observation import check_observation, check_pooling, observed_attention, pool
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.backends import Backend


@dataclasses.dataclass(frozen=True)
class SnapKVCache(PromptCompression):
    """The window and the tokens that the last queries attend to most, the same number in every KV head."""

    observation: int = 32  # last prompt queries that vote, at most `window`; the code's `window_size`
    kernel: int = 5  # neighbours that scores are pooled over, odd
    pooling: str = "avg"  # or "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_observation(self.observation, self.kernel, self.window)
        check_pooling(self.pooling)

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.observation

    def scores(
        self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Float32[Array, "B Hkv L"]:
        votes = observed_attention(q, k, lengths, lambda probabilities: jnp.sum(probabilities, axis=-2))
        return pool(votes, self.kernel, self.pooling).mean(axis=2)


snapkv = over_full("snapkv", SnapKVCache)
