"""TOVA (arXiv 2401.06104): a layer keeps what the prompt's last query attends to, the same tokens in all of its heads.

A token's score is the attention of the last query, the mean over all query heads of the layer. Follows NVIDIA/kvpress
at 08a43bf (`TOVAPress`), which applies it to the prompt once, as this does. What differs:

- The paper's own code (schwartz-lab-NLP/TOVA) evicts at every step, from the first token past the budget on; here the
  last query of the prompt decides alone, and what follows the prompt stays.
- The window. There, at most the last token stays whatever its score; here at least `window`, with the left edge on a
  block boundary.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32

from tca_jax.lab.rivals.compression import PromptCompression, over_full
from tca_jax.lab.rivals.observation import observed_attention
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.backends import Backend


@dataclasses.dataclass(frozen=True)
class TOVACache(PromptCompression):
    """The window and the tokens that the last query attends to most, the same ones in every KV head of a layer."""

    def scores(
        self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Float32[Array, "B Hkv L"]:
        attention = observed_attention(q, k, lengths, lambda probabilities: probabilities[..., 0, :]).mean(axis=2)
        return jnp.broadcast_to(heads.mean(attention)[:, None], attention.shape)


tova = over_full("tova", TOVACache)
