"""H2O (arXiv 2306.14048): a head keeps its heavy hitters, the tokens that all queries so far gave most attention.

A score is a column's sum of the prompt's causal attention, mean over the group. In FMInference/H2O an evicted token
takes no more attention, and recent tokens are half of the budget. `average` divides by the queries that see the token,
as `ObservedAttentionPress` does (NVIDIA/kvpress at 08a43bf).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from tca_jax.errors import check_flag
from tca_jax.lab.rivals.compression import PromptCompression, Scores, rival
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.column_mass import column_mass


@dataclasses.dataclass(frozen=True)
class H2OCache(PromptCompression):
    average: bool = False  # whether a token's sum is divided by the number of queries that see it

    num_queries = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("average", self.average)

    def scores(self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Scores:
        near, far = column_mass(q, k, lengths, block_size=self.block_size, window=self.window)
        seen_by = jnp.maximum(lengths[:, None, None] - jnp.arange(k.shape[1]), 1)
        return (near + far) / seen_by if self.average else near + far


h2o = rival("h2o", H2OCache)
