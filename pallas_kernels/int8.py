"""Queries and keys in int8, for attention and the choice of blocks.

Of keys the mean over the prompt is taken off, which a softmax does not see, and queries and keys are rotated by a
Hadamard matrix, which products do not see and which spreads large channels over all. Then int8 has a scale for each
query, and one for all keys of a head or for each run of them.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int8

from tca_jax.pallas_kernels.kernel_math import LOG2E

_ENTRY = 1 / 8  # of the Hadamard matrix, up to the sign: exact in bfloat16
_LEAST_SCALE = 1e-15


class RoundedKeys(NamedTuple):
    """Keys of a prompt: codes * scale, rotated back, plus mean."""

    codes: Int8[Array, "B L Hkv d"]
    scale: Float32[Array, "B n Hkv 1"]  # of each run
    mean: Float32[Array, "B 1 Hkv d"]


def round_keys(k: Float[Array, "B L Hkv d"], lengths: Int[Array, " B #Hkv"], run: int | None = None) -> RoundedKeys:
    """Keys in int8, with a scale for each `run` of tokens, or for all; tokens past a length do not count."""
    batch, length, heads, head_dim = k.shape
    there = (jnp.arange(length)[:, None] < lengths[:, None])[..., None]  # [B, L, Hkv, 1]
    sums = jnp.where(there, k.astype(jnp.float32), 0).sum(axis=1, keepdims=True)
    mean = sums / jnp.maximum(lengths, 1)[:, None, :, None]
    run = run or length
    rotated = jnp.pad(jnp.where(there, rotate(k, mean), 0), ((0, 0), (0, -length % run), (0, 0), (0, 0)))
    runs = rotated.reshape(batch, -1, run, heads, head_dim)
    scale = scale_of(runs, (2, 4), 127)  # [B, n, 1, Hkv, 1]
    return RoundedKeys(to_int8(runs, scale).reshape(rotated.shape)[:, :length], scale[:, :, 0], mean)


def round_queries(q: Float[Array, "*n d"]) -> tuple[Int8[Array, "*n d"], Float32[Array, " *n"]]:
    """Queries in int8; and factors that make logits to base 2 of products with codes of keys, but for their scale."""
    head_dim, rotated = q.shape[-1], rotate(q)
    scale = scale_of(rotated, -1, 127)
    return to_int8(rotated, scale), scale[..., 0] * (LOG2E * head_dim**-0.5 / (head_dim * _ENTRY**2))


def rotate(x: Float[Array, "*n d"], mean: Float32[Array, "*#n d"] | None = None) -> Float[Array, "*n d"]:
    """x, without a mean, times the Hadamard matrix and sqrt(d) / 8; in float32 where it may pass float16."""
    hadamard = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (x.shape[-1].bit_length() - 1))
    dtype = x.dtype if x.dtype == jnp.bfloat16 else jnp.float32
    centred = x if mean is None else (x - mean).astype(dtype)
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(centred, jnp.asarray(hadamard * _ENTRY, centred.dtype), axes, preferred_element_type=dtype)


def scale_of(x: Float[Array, "*n d"], axes: Any, largest: float) -> Float32[Array, "*m 1"]:
    """The scale in which the largest entry along axes has the largest code."""
    return jnp.maximum(jnp.abs(x).max(axis=axes, keepdims=True).astype(jnp.float32), _LEAST_SCALE) / largest


def to_int8(x: Float[Array, "*n d"], scale: Float32[Array, "*#n 1"]) -> Int8[Array, "*n d"]:
    """The nearest codes."""
    return jnp.clip(jnp.round(x.astype(jnp.float32) / scale), -127, 127).astype(jnp.int8)
