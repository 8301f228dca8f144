"""Fingerprint of a model: one for a bfloat16 checkpoint in whatever dtype it is loaded, another for other weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from tca_jax.models.decoder import Decoder
from tca_jax.models.params import parameters, split


def fingerprint(decoder: Decoder) -> str:
    """Hash of the config and of every tensor of a checkpoint, rounded to what all loading dtypes can hold.

    Which tensors the decoder joins into one weight is no part of it, so profiles outlast a change of that. What all
    dtypes can hold is bfloat16 without the values below float16's normal range. A checkpoint that is stored in float32
    and loaded in float16 is rounded twice and counts as other weights.

    Reads each weight where it lies: milliseconds on a GPU.

    Returns:
        64 hexadecimal digits (SHA-256).
    """
    config = dataclasses.asdict(decoder.config)
    del config["dtype_name"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    tensors: list[tuple[str, tuple[int, ...], Array]] = []
    for parameter in parameters(decoder):
        checksums = _checksums(parameter.variable[...], groups=parameter.groups, widths=parameter.widths)
        tensors += [(*tensor, checksum) for tensor, checksum in zip(parameter.shapes.items(), checksums, strict=True)]
    for name, shape, checksum in sorted(tensors, key=lambda tensor: tensor[0]):
        digest.update(f"{name} {shape}".encode())
        digest.update(np.asarray(checksum, "<u4").tobytes())
    return digest.hexdigest()


@functools.partial(jax.jit, static_argnames=("groups", "widths"))
def _checksums(x: Float[Array, ...], *, groups: int, widths: tuple[int, ...]) -> list[UInt32[Array, 2]]:
    """Of the tensors that a weight is made of; in one program, so that none is copied out of it."""
    return [_checksum(tensor) for tensor in split(x, groups, widths)]


def _checksum(x: Float[Array, ...]) -> UInt32[Array, 2]:
    """Two sums of hashed (place, value) pairs, modulo 2^32: exact, and free of the order of summation."""
    x = x.astype(jnp.bfloat16)
    x = jnp.where(jnp.abs(x) < jnp.finfo(jnp.float16).tiny, jnp.zeros_like(x), x)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    return jnp.stack([jnp.sum(_mix(bits ^ (place * jnp.uint32(odd)))) for odd in (0x9E3779B1, 0x85EBCA77)])


def _mix(h: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """The finaliser of MurmurHash3: every input bit moves every output bit."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
