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
from tca_jax.lab.rivals.compression import PromptCompression, over_full
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.column_mass import column_mass


@dataclasses.dataclass(frozen=True)
class H2OCache(PromptCompression):
    """The window and the tokens that the prompt's queries gave most attention, the same number in every KV head."""

    average: bool = False  # whether a token's sum is divided by the number of queries that see it

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


h2o = over_full("h2o", H2OCache)
