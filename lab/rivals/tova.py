"""TOVA (arXiv 2401.06104): a layer keeps the tokens that the last query attends to, the same in all of its heads.

A token's score is the attention of the last query, the mean over all query heads of the layer. Follows NVIDIA/kvpress
at 08a43bf (`TOVAPress`); the paper's code (schwartz-lab-NLP/TOVA) evicts at every step.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from tca_jax.lab.rivals.compression import PromptCompression, Scores, rival
from tca_jax.lab.rivals.scores import last_attention
from tca_jax.methods.base import Heads


@dataclasses.dataclass(frozen=True)
class TOVACache(PromptCompression):
    def score(self, q: Array, k: Array, v: Array, lengths: Array) -> Array:
        return last_attention(q, k, lengths)[:, :, 0].mean(axis=1)

    def scores(self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array) -> Scores:
        of_heads = super().scores(heads, q, k, v, lengths)
        return jnp.broadcast_to(heads.mean(of_heads)[:, None], of_heads.shape)


tova = rival("tova", TOVACache)
