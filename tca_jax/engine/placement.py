"""Where a model goes: a mesh from its name, and orders of KV heads in which its devices have about as much to do."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from tca_jax.engine.mesh import Orders
from tca_jax.errors import UserError, require
from tca_jax.models.names import MODEL
from tca_jax.models.sharding import DATA, whole_mesh

BALANCED_TOKENS = 2**17  # most tokens of the prompts whose caches are balanced


def parse_mesh(text: str, argument: str) -> Mesh:
    """The mesh of the first devices for a text such as "1x4": devices on "data" x devices on "model"."""
    shape = parse_mesh_shape(text, argument)
    wanted, there = math.prod(shape), jax.device_count()
    verb = "is" if there == 1 else "are"
    require(wanted <= there, f"{argument} {text}: needs {wanted} devices, there {verb} {there}")
    return whole_mesh(jax.make_mesh(shape, (DATA, MODEL), devices=jax.devices()[:wanted]))


def parse_mesh_shape(text: str, argument: str) -> tuple[int, int]:
    """Devices on "data" and on "model" in such a text. Raises ValueError."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise UserError(f"{argument} {text}: must be devices on 'data' x devices on 'model', such as 1x4")
    return int(sizes[1]), int(sizes[2])


def balanced_orders(kept: Float[np.ndarray, "layers Hkv"], devices: int) -> Orders:
    """An order of each layer's KV heads in which the devices' caches are about as large, in each layer and in all.

    In a layer, heads sit together as in `_balanced_order`, for devices wait for each other there. Such groups are dealt
    out, the largest first, each to the device that has least and none of that layer. The model's own order stays where
    the other has devices neither wait less for each other, nor as long and hold less. `kept` are shares of tokens.
    """
    (num_layers, num_kv_heads), loads = kept.shape, np.rint(BALANCED_TOKENS * kept).astype(np.int64)

    def by_device(orders: Int[np.ndarray, "layers Hkv"]) -> Int[np.ndarray, "layers devices"]:
        return np.take_along_axis(loads, orders, axis=1).reshape(num_layers, devices, -1).sum(axis=2)

    def cost(orders: Int[np.ndarray, "layers Hkv"]) -> tuple[int, int]:
        """Tokens that layers wait for, and tokens that a device holds: those of the largest."""
        sums = by_device(orders)
        return int(sums.max(axis=1).sum()), int(sums.sum(axis=0).max())

    grouped = np.array([_balanced_order(of_layer, devices) for of_layer in loads])
    sums = by_device(grouped)
    held, dealt = np.zeros(devices, np.int64), np.full(sums.shape, -1)  # dealt: the group of a layer on a device
    for item in np.argsort(-sums, axis=None, kind="stable").tolist():
        layer, group = divmod(item, devices)
        device = min(np.flatnonzero(dealt[layer] < 0).tolist(), key=held.__getitem__)
        dealt[layer, device] = group
        held[device] += sums[layer, group]
    found = np.take_along_axis(grouped.reshape(num_layers, devices, -1), dealt[..., None], axis=1).reshape(loads.shape)
    own = np.tile(np.arange(num_kv_heads), (num_layers, 1))
    return tuple(map(tuple, (own if cost(own) <= cost(found) else found).tolist()))


def _balanced_order(loads: Int[np.ndarray, " Hkv"], devices: int) -> tuple[int, ...]:
    """Heads by device, as many on each: the largest first, each to the device that has least and is not full."""
    held: list[list[int]] = [[] for _ in range(devices)]
    for head in np.argsort(-loads, kind="stable").tolist():
        free = [of_device for of_device in held if len(of_device) < len(loads) // devices]
        min(free, key=lambda of_device: int(loads[of_device].sum())).append(head)
    return tuple(head for of_device in held for head in of_device)
