"""SnapKV (arXiv 2404.14469): a head keeps the tokens that the last queries attend to, pooled over neighbours.

Follows the published code (FasterDecoding/SnapKV at 557aff1), whose defaults these are; its LongBench runs use kernel 7
and maximum pooling.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from tca_jax.errors import check_integer, require, require_name
from tca_jax.lab.rivals.compression import PromptCompression, rival
from tca_jax.lab.rivals.scores import last_attention


@dataclasses.dataclass(frozen=True)
class ObservingCache(PromptCompression):
    """Scores are the attention of the last queries, pooled over neighbours."""

    observation: int = 32  # last prompt queries that count, at most `window`; the code's `window_size`
    kernel: int = 5  # neighbours that scores are pooled over, odd

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("observation", self.observation, at_least=1)
        limit = f"must be at most window = {self.window}, whose tokens are kept"
        require(self.observation <= self.window, f"observation = {self.observation}: {limit}")
        check_integer("kernel", self.kernel, at_least=1)
        require(self.kernel % 2, f"kernel = {self.kernel}: must be odd")

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.observation

    def pooled(
        self, votes: Float32[Array, "B G L"], lengths: Int[Array, " B"], pooling: str = "avg"
    ) -> Float32[Array, "B L"]:
        """The group's mean of attention by the observing queries, pooled; means divide by `kernel` at ends, too."""
        before = jnp.arange(votes.shape[-1]) < (lengths - self.observation)[:, None, None]
        operation = jax.lax.max if pooling == "max" else jax.lax.add
        votes = jnp.where(before, votes, 0)
        votes = jax.lax.reduce_window(votes, 0.0, operation, (1, 1, self.kernel), (1, 1, 1), "SAME")
        return (votes if pooling == "max" else votes / self.kernel).mean(axis=1)


@dataclasses.dataclass(frozen=True)
class SnapKVCache(ObservingCache):
    pooling: str = "avg"  # or "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_name(f"pooling = {self.pooling!r}", self.pooling, ("avg", "max"))

    def score(self, q: Array, k: Array, v: Array, lengths: Array) -> Array:
        return self.pooled(last_attention(q, k, lengths).sum(axis=2), lengths, self.pooling)


snapkv = rival("snapkv", SnapKVCache)
