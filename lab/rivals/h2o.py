"""H2O (arXiv 2306.14048): a head keeps its heavy hitters, the tokens that all queries so far gave most attention.

A token's score is its column's sum of the causal attention of the whole prompt, the mean over the group. That costs a
second pass over the prompt's attention. What differs from the published code (FMInference/H2O, `H2OKVCache_LayerWise`):

- When tokens go. There, one goes at every step past the budget, and what is gone no longer takes attention; here the
  whole prompt's attention decides once, and what follows the prompt stays.
- Recent tokens. There, half of the budget; here the window, of a size of its own.
- Query heads. There, each keeps tokens of its own; here a KV head keeps one set.

With `average` the sum is divided by the number of queries that see the token, so that early tokens have no lead:
"observed attention" of NVIDIA/kvpress at 08a43bf (`ObservedAttentionPress`).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32

from tca_jax.errors import check_flag
from tca_jax.lab.rivals.compression import PromptCompression
from tca_jax.methods.base import Heads, Method
from tca_jax.methods.full import FullPrefill
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.column_mass import column_mass


@dataclasses.dataclass(frozen=True)
class H2OCache(PromptCompression):
    """The window and the tokens that the prompt's queries gave most attention, the same number in every KV head."""

    average: bool = False

    num_queries = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("average", self.average)

    def scores(
        self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Float32[Array, "B Hkv L"]:
        near, far = column_mass(q, k, lengths, block_size=self.block_size, window=self.window, backend=backend)
        if not self.average:
            return near + far
        seen_by = lengths[:, None, None] - jnp.arange(k.shape[1])
        return (near + far) / jnp.maximum(seen_by, 1)


def h2o(
    capacity: int = 2048, share: float | None = None, average: bool = False, window: int = 128, block_size: int = 128
) -> Method:
    """Full attention for the prompt's queries, H2O's heavy hitters in the cache.

    Args:
        capacity: Tokens of a prompt that each KV head holds, the window counted as `window`.
        share: Instead: kept share of the tokens left of the window, in (0, 1].
        average: Whether a token's sum is divided by the number of queries that see it.
        window: Least number of local tokens, a multiple of `block_size`; the paper's recent half is
            `window = capacity / 2`.
        block_size: Tokens in a block, a power of two.

    Raises:
        ValueError: an option is not allowed.
    """
    return Method("h2o", FullPrefill(), H2OCache(capacity, share, window, block_size, average))
