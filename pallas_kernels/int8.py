"""Queries and keys in int8: exact products, which are added to the bits of 1.5 2^23, need no conversion to float32.

Of keys the mean over the prompt is taken off, which a softmax does not see, and queries and keys are rotated by a
Hadamard matrix, which products do not see and which spreads large channels over all. Then int8 has a scale for each
query and one for each head's keys.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int8

from tca_jax.pallas_kernels.kernel_math import LOG2E

#: A float32 whose last bits count integers. Products of int8 and 128 entries stay below 2^22.
BASE = 1.5 * 2**23
BASE_BITS = np.float32(BASE).view(np.int32)
_ENTRY = 1 / 8  # of the Hadamard matrix, up to the sign: exact in bfloat16
_LEAST_SCALE = 1e-20


class Keys(NamedTuple):
    """Keys of a prompt, (codes * scale + mean) rotated back."""

    codes: Int8[Array, "B L Hkv d"]
    scale: Float32[Array, "B 1 Hkv 1"]
    mean: Float32[Array, "B 1 Hkv d"]


def round_keys(k: Float[Array, "B L Hkv d"], lengths: Int[Array, "B Hkv"]) -> Keys:
    """Keys rotated, without their mean over the prompt, in int8."""
    there = (jnp.arange(k.shape[1])[:, None] < lengths[:, None])[..., None]  # [B, L, Hkv, 1]
    k = rotate(k, jnp.float32)
    mean = jnp.where(there, k, 0).sum(axis=1, keepdims=True) / jnp.maximum(lengths, 1)[:, None, :, None]
    largest = jnp.where(there, jnp.abs(k - mean), 0).max(axis=(1, 3), keepdims=True)
    scale = jnp.maximum(largest, _LEAST_SCALE) / 127
    return Keys(to_int8(k - mean, scale), scale, mean)


def round_queries(q: Float[Array, "*n d"]) -> tuple[Int8[Array, "*n d"], Float32[Array, " *n"]]:
    """Queries rotated, in int8, and factors that with the scale of keys turn products into logits to base 2."""
    head_dim, rotated = q.shape[-1], rotate(q, q.dtype)
    scale = jnp.maximum(jnp.abs(rotated).max(axis=-1, keepdims=True).astype(jnp.float32), _LEAST_SCALE) / 127
    unit = LOG2E * head_dim**-0.5 / (head_dim * _ENTRY**2)
    return to_int8(rotated.astype(jnp.float32), scale), scale[..., 0] * unit


def rotate(x: Float[Array, "*n d"], dtype: Any) -> Float[Array, "*n d"]:
    """By the Hadamard matrix, which adds a factor of sqrt(d) / 8."""
    hadamard = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (x.shape[-1].bit_length() - 1))
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, jnp.asarray(hadamard * _ENTRY, x.dtype), axes, preferred_element_type=dtype)


def to_int8(x: Float32[Array, "*n d"], scale: Float32[Array, "*#n 1"]) -> Int8[Array, "*n d"]:
    """The nearest codes."""
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)
