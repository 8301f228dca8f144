"""KeyDiff (arXiv 2504.15364): a head keeps the tokens whose keys differ most from the others, for any query.

A token's score is 1 less the cosine of its key and the anchor, the mean over the prompt of all keys at length 1.
Follows NVIDIA/kvpress at 08a43bf, `KeyDiffPress`, keys after RoPE. The paper also compresses a prompt block after
block; here it has one anchor.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from tca_jax.lab.rivals.compression import PromptCompression, rival

_LEAST_LENGTH = 1e-8  # of a key or an anchor: an anchor of zeros is as far from all keys


@dataclasses.dataclass(frozen=True)
class KeyDiffCache(PromptCompression):
    def score(self, q: Array, k: Array, v: Array, lengths: Array) -> Array:
        inside = (jnp.arange(k.shape[1]) < lengths[:, None])[..., None]
        anchor = _unit(jnp.where(inside, _unit(k), 0).sum(axis=1))  # the mean's direction is the sum's
        return jnp.maximum(1 - jnp.einsum("bld,bd->bl", _unit(k), anchor, precision="highest"), 0)


def _unit(x: Float[Array, "*s d"]) -> Float32[Array, "*s d"]:
    """Vectors along the last axis at length 1."""
    wide = x.astype(jnp.float32)
    return wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), _LEAST_LENGTH)


keydiff = rival("keydiff", KeyDiffCache)
