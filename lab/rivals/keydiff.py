"""KeyDiff (arXiv 2504.15364): a head keeps the tokens whose keys differ most from the others, for any query.

A token's score is 1 less the cosine of its key and the anchor, the mean over the prompt of all keys at length 1.
Follows the published code (NVIDIA/kvpress at 08a43bf, `KeyDiffPress`), keys after RoPE; that code's score is less by
the 1, which changes no order. What differs:

- The window. There is none there; here the last tokens stay whatever their scores.
- Reading. The paper also compresses a prompt that is read in blocks, block after block; here the whole prompt has one
  anchor.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.lab.rivals.compression import PromptCompression, over_full
from tca_jax.lab.rivals.tiles import concatenate_tiles, sum_tiles
from tca_jax.methods.base import Heads
from tca_jax.pallas_kernels.backends import Backend

_LEAST_LENGTH = 1e-8  # of a key or an anchor: an anchor of zeros is as far from all keys


@dataclasses.dataclass(frozen=True)
class KeyDiffCache(PromptCompression):
    """The window and the tokens whose keys are least like the mean key, the same number in every KV head."""

    def scores(
        self, heads: Heads, q: Array, k: Array, v: Array, lengths: Array, backend: Backend
    ) -> Float32[Array, "B Hkv L"]:
        return key_difference(k, lengths)


keydiff = over_full("keydiff", KeyDiffCache)


def key_difference(k: Array, lengths: Int[Array, " B"]) -> Float32[Array, "B Hkv L"]:
    """1 less the cosine of each key and the anchor of its head.

    Args:
        k: Prompt keys after RoPE `[B, L, Hkv, d]`, right-padded.
        lengths: Prompt lengths `[B]`.
    """

    def directions(positions: Array, keys: Array) -> Float32[Array, "B Hkv d"]:
        inside = (positions < lengths[:, None])[..., None, None]
        return jnp.sum(jnp.where(inside, _unit(keys), 0), axis=1)

    anchor = _unit(sum_tiles(directions, k))  # the mean's direction is the sum's

    def difference(positions: Array, keys: Array) -> Float32[Array, "B Hkv t"]:
        return 1 - jnp.einsum("bthd,bhd->bht", _unit(keys), anchor, precision="highest")

    return jnp.maximum(concatenate_tiles(difference, k), 0)


def _unit(x: Float[Array, "*s d"]) -> Float32[Array, "*s d"]:
    """Vectors along the last axis at length 1."""
    wide = x.astype(jnp.float32)
    return wide / jnp.maximum(jnp.linalg.norm(wide, axis=-1, keepdims=True), _LEAST_LENGTH)
