"""Fingerprint of a model: the same for a checkpoint in every dtype it is loaded in, another one for other weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, UInt32

from tca_jax.models.config import ModelConfig
from tca_jax.models.decoder import Decoder
from tca_jax.models.names import Layout, Parameter, parameters
from tca_jax.models.sharding import HeadOrders, constrained, mesh_of, reorder_heads, settled, within

_Checksum: TypeAlias = tuple[tuple[int, ...], Array]  # of a tensor: its shape `[in, out]` and its two sums


def fingerprint(decoder: Decoder, head_orders: HeadOrders | None = None) -> str:
    """SHA-256 of the architecture and of every tensor of a checkpoint, rounded to numbers that all loading dtypes hold.

    It does not depend on which tensors the decoder joins into one weight. All loading dtypes can hold bfloat16 without
    the values below float16's normal range. A checkpoint that is stored in float32 and loaded in float16 is rounded
    twice: this decoder has another fingerprint, and `load_checkpoint` returns the checkpoint's.

    Each weight is read on its device, one or those of a mesh: milliseconds on a GPU. `head_orders` are those that the
    KV heads were loaded in; the fingerprint is that of the model in its own order, as with None.
    """
    orders = None if head_orders is None else np.argsort(head_orders, axis=1).tolist()  # those that undo them
    checksums: dict[str, _Checksum] = {}
    for parameter in parameters(decoder):
        checksums |= tensor_checksums(parameter, reorder_heads(parameter.variable[...], parameter, orders))
    return combine(decoder.config, checksums)


def tensor_checksums(parameter: Parameter, value: Float[Array, ...]) -> dict[str, _Checksum]:
    """Shape and checksum of each tensor of a parameter, by name; on a mesh each device reads its own part."""
    layout, mesh = parameter.layout, mesh_of(value)
    with within(mesh):  # a user may have split it otherwise
        checksums = _checksums(settled(value, parameter, mesh), layout=layout, mesh=mesh)
    shapes = [shape[::-1] if layout.inputs == 0 else shape for shape in layout.tensor_shapes]
    return dict(zip(parameter.names, zip(shapes, checksums, strict=True), strict=True))


def combine(config: ModelConfig, checksums: Mapping[str, _Checksum]) -> str:
    """The fingerprint, of the checksums of all tensors of the checkpoint."""
    # Profiles live for years: a field of the configs that is added later may count only where it is not its default.
    architecture = dataclasses.asdict(config)
    del architecture["dtype_name"]  # a checkpoint's dtype may change
    digest = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode())
    for name, (shape, checksum) in sorted(checksums.items()):
        digest.update(f"{name} {shape}".encode())
        digest.update(np.asarray(checksum, "<u4").tobytes())
    return digest.hexdigest()


@functools.partial(jax.jit, static_argnames=("layout", "mesh"))
def _checksums(x: Float[Array, ...], *, layout: Layout, mesh: Mesh | None) -> list[UInt32[Array, " 2"]]:
    """Checksums of the tensors of a weight, kernels as `[in, out]`; in one program, so that no tensor is copied."""
    parts = [part.T if layout.inputs == 0 else part for part in layout.split(x)]
    return [constrained(_checksum(part), mesh, PartitionSpec()) for part in parts]


def _checksum(x: Float[Array, ...]) -> UInt32[Array, " 2"]:
    """Two sums of hashed (index, value) pairs, modulo 2^32: exact, and independent of the order of summation."""
    x = x.astype(jnp.bfloat16)
    x = jnp.where(jnp.abs(x) < jnp.finfo(jnp.float16).tiny, jnp.zeros_like(x), x)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = jnp.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    return jnp.stack([jnp.sum(_mix(bits ^ (index * jnp.uint32(odd)))) for odd in (0x9E3779B1, 0x85EBCA77)])


def _mix(h: UInt32[Array, ...]) -> UInt32[Array, ...]:
    """The finaliser of MurmurHash3: every input bit moves every output bit."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
