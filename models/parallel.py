"""The decoder on one device of a mesh: its part of every product, and what the devices of the axis then share.

Projections are split by KV head and the MLP by its inner width, so a layer needs two sums over the devices: behind
attention's output projection and behind the MLP. What lies where is the table's of `models.sharding`. Of long prompts
the devices share the tokens, too: `models.sequence_parallel`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tca_jax.models.matmul import dot_general

if TYPE_CHECKING:
    from tca_jax.models.decoder import Decoder, DecoderLayer

# Of the part that a device has of a chunk's sums: 16 MiB in bfloat16, give or take the sixteenths by which chunks
# differ (`decoder._OVERLAPPING`). Of neighbours that have no more than 30 MiB together XLA makes one sum, and of their
# products one product, for which both then wait.
_PART_ELEMENTS = 2**23
_SMALL_SUM = 2**18  # bytes up to which a sum over devices is one kernel of XLA's, in which each reads all of the others


@dataclasses.dataclass(frozen=True)
class SummedProduct:
    """`dot_general` of this device's part of the contracted axis, summed over a mesh axis.

    Attributes:
        axis: Name of the mesh axis.
    """

    axis: str

    def __call__(self, *args: Any, **options: Any) -> Array:
        return dot_general(*args, axis=self.axis, **options)


@dataclasses.dataclass(frozen=True)
class ScatteredProduct(SummedProduct):
    """The same of rows `[L, K]`, of whose sums each device of the axis gets its part: L / n rows."""

    def __call__(self, *args: Any, **options: Any) -> Array:
        return jax.lax.psum_scatter(dot_general(*args, **options), self.axis, tiled=True)


def on_device(decoder: Decoder, axis: str, devices: int) -> Decoder:
    """The decoder as each device of a mesh axis runs it, under `jax.shard_map`, over its own part of the weights.

    Args:
        decoder: The whole one; its weights play no part, and it stays what it is.
        axis: Name of the mesh axis.
        devices: Devices along it; KV heads and the MLP's inner width are multiples of it.

    Returns:
        A decoder whose static part (`nnx.split`) fits the devices' parts.
    """
    other = nnx.merge(*nnx.split(decoder))
    for layer in other.layers:
        split_layer(layer, axis, devices)
    other.axis = axis
    if other.head is not None:
        other.head.dot_general = SummedProduct(axis)
    return other


def split_layer(layer: DecoderLayer, axis: str, devices: int) -> None:
    """Changes the static part of a layer to that of a device."""
    for product in (layer.attention.qkv, layer.mlp.gate_up):
        product.out_features = product.kernel.shape[1:]
    heads, *of_head = layer.attention.qkv.out_features
    layer.attention.qkv.out_features = (heads // devices, *of_head)
    layer.mlp.gate_up.out_features = (2, layer.mlp.gate_up.out_features[1] // devices)
    layer.attention.o.dot_general = layer.mlp.down.dot_general = SummedProduct(axis)
    layer.axis = axis
    least = -(-devices * _PART_ELEMENTS // layer.mlp.down.kernel.shape[1])
    layer.chunk = max(layer.chunk, 1 << max(0, least - 1).bit_length())


def scattering(layer: DecoderLayer, axis: str) -> DecoderLayer:
    """A device's layer whose sums over a mesh axis each give it a part of the rows."""
    other = nnx.merge(*nnx.split(layer))
    other.attention.o.dot_general = other.mlp.down.dot_general = ScatteredProduct(axis)
    return other


def join_width(x: Float[Array, "*tokens part"], axis: str) -> Float[Array, "*tokens D"]:
    """The residual stream in all of its width, of which each device of an axis has a part.

    Of few tokens it is summed, with zeros in the others' parts: for small sums XLA has a kernel of its own, gathers are
    NCCL's, whose launch takes the host longer than the rest of a step's beginning.
    """
    devices = jax.lax.axis_size(axis)
    if devices * x.size * x.dtype.itemsize > _SMALL_SUM:
        return jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
    mine = jnp.arange(devices)[:, None] == jax.lax.axis_index(axis)
    parts = jnp.where(mine, x[..., None, :], 0)
    return jax.lax.psum(parts.reshape(*x.shape[:-1], -1), axis)


def exchange_width(x: Float[Array, "all_rows part"], axis: str) -> Float[Array, "rows D"]:
    """This device's rows in all of their width, of which each device of an axis has a part.

    Args:
        x: Rows of all devices, in their order.
        axis: Name of the mesh axis.
    """
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)


def part_of_width(x: Float[Array, "*tokens D"], axis: str) -> Float[Array, "*tokens part"]:
    """This device's part of a residual stream that all devices of an axis have."""
    width = x.shape[-1] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * width, width, axis=-1)
