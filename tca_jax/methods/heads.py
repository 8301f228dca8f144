"""Which KV heads a program sees: all of a model's, or over a mesh those of its device.

A policy that tells heads apart (by budgets of their own, by draws of their own) asks here which ones it is given. On
one device these are the model's heads in their order, and nothing below becomes part of a program. It asks outside of
functions that it jits itself: their traces would be kept for other orders of the heads.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from tca_jax.methods.base import per_head


@dataclasses.dataclass(frozen=True)
class HeadShards:
    """How a model's KV heads are dealt out to the devices of a mesh axis, as many to each.

    Attributes:
        axis: Name of the mesh axis.
        devices: Devices along it, n.
        order: For each layer the KV heads as they lie on the devices, `[layers][H_kv]`: those of device i are at the
            places from i H_kv / n on.
    """

    axis: str
    devices: int
    order: tuple[tuple[int, ...], ...]

    def widest(self, layer: int, values: tuple[int, ...]) -> tuple[int, ...]:
        """Of a number for each KV head, the largest that any device has at each of its places: shapes of all devices
        are the same."""
        return tuple(self.by_device(layer, values).max(axis=0).tolist())

    def by_device(self, layer: int, values: tuple[int, ...]) -> Int[np.ndarray, "devices Hkv"]:
        """A number for each KV head, by the device that has the head and its place there."""
        return np.asarray(values)[np.asarray(self.order[layer])].reshape(self.devices, -1)

    @property
    def inverse(self) -> Int[np.ndarray, "layers Hkv"]:
        """The place of each KV head."""
        return np.argsort(np.asarray(self.order), axis=1)


_shards: contextvars.ContextVar[HeadShards | None] = contextvars.ContextVar("head_shards", default=None)
_numbers: contextvars.ContextVar[Array | None] = contextvars.ContextVar("head_numbers", default=None)


@contextlib.contextmanager
def dealt_out(shards: HeadShards | None, numbers: Int[Array, " Hkv"] | None = None) -> Iterator[None]:
    """What is traced inside is the program of each device, under `jax.shard_map` over `shards.axis`.

    Args:
        shards: How heads are dealt out; None on one device.
        numbers: Of a program that serves all layers: which heads it sees, whatever layer it is traced for.
    """
    tokens = _shards.set(shards), _numbers.set(numbers)
    try:
        yield
    finally:
        _shards.reset(tokens[0])
        _numbers.reset(tokens[1])


def heads_of_model(num_kv_heads: int) -> int:
    """KV heads of the whole model, of which a program sees `num_kv_heads`."""
    shards = _shards.get()
    return num_kv_heads if shards is None else num_kv_heads * shards.devices


def head_numbers(layer: int, num_kv_heads: int) -> Int[Array, " Hkv"]:
    """Which of the model's KV heads a program sees in a layer, `num_kv_heads` of them."""
    if (numbers := _numbers.get()) is not None:
        return numbers
    if _shards.get() is None:
        return jnp.arange(num_kv_heads)
    return jnp.asarray(of_heads(layer, np.arange(heads_of_model(num_kv_heads), dtype=np.int32), num_kv_heads))


def of_heads(
    layer: int, values: Shaped[np.ndarray, "H ..."], num_kv_heads: int
) -> Shaped[Array | np.ndarray, "Hkv ..."]:
    """Of something for each of the model's KV heads, that of the `num_kv_heads` which a program sees in a layer."""
    shards = _shards.get()
    if shards is None:
        return values
    dealt = jnp.asarray(values[np.asarray(shards.order[layer])])
    start = jax.lax.axis_index(shards.axis) * num_kv_heads
    return jax.lax.dynamic_slice_in_dim(dealt, start, num_kv_heads)


def places_where(layer: int, mask: Bool[np.ndarray, " H"], num_kv_heads: int) -> Int[Array | np.ndarray, " n"]:
    """Places, among the KV heads that a program sees in a layer, of those for which a mask of the model's heads holds.

    Over a mesh there are as many as on the device that has most: a device that has fewer gets `num_kv_heads`, which is
    no head's place, for the rest.
    """
    shards = _shards.get()
    if shards is None:
        return np.flatnonzero(mask)
    by_device = mask[np.asarray(shards.order[layer])].reshape(shards.devices, -1)
    places = np.full((shards.devices, int(by_device.sum(axis=1).max())), num_kv_heads, np.int32)
    for device, own in enumerate(by_device):
        places[device, : own.sum()] = np.flatnonzero(own)
    return of_device(places)


def of_device(values: Shaped[np.ndarray, "devices ..."]) -> Shaped[Array, ...]:
    """Of something for each device of the mesh axis, that of the device which runs a program.

    Raises:
        RuntimeError: what is traced is no program of a mesh.
    """
    shards = _shards.get()
    if shards is None:
        raise RuntimeError("values of devices are known to programs of a mesh alone: trace inside of `dealt_out`")
    return jax.lax.dynamic_index_in_dim(jnp.asarray(values), jax.lax.axis_index(shards.axis), keepdims=False)


def sum_of_devices(x: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
    """What a program has summed over the heads that it sees, summed over all of the model's."""
    shards = _shards.get()
    return x if shards is None else jax.lax.psum(x, shards.axis)


def capacities_of_heads(layer: int, value: Any, num_kv_heads: int, source: str) -> tuple[int, ...]:
    """`per_head` for the heads that a program sees: over a mesh, room for those of every device.

    Raises:
        ValueError: `value` is neither one number nor one for each of the model's KV heads.
    """
    shards = _shards.get()
    values = per_head(value, heads_of_model(num_kv_heads), source)
    return values if shards is None else shards.widest(layer, values)
