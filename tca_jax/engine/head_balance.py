"""Which KV heads sit together on a device: dealt so that their caches take as little room as can be.

All devices of a mesh run one program, so their arrays are of one size: a layer's regions as large as the largest at
that place on any device, or where that wastes room, one pool for all layers as large as any device's (`shared_pools`).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from tca_jax.engine.shared_pools import apart, tokens_on_device
from tca_jax.methods.base import CachePolicy, capacities_per_head

#: Most tokens of the prompts whose caches are balanced.
_TOKENS = 2**17

Orders = tuple[tuple[int, ...], ...]


def balanced_orders(
    policy: CachePolicy, num_layers: int, num_kv_heads: int, devices: int, max_context: int, current: Orders | None
) -> Orders:
    """An order of each layer's KV heads in which the caches of the devices are about as large.

    Args:
        policy: What the caches keep of a long prompt.
        num_layers: Layers of the model.
        num_kv_heads: KV heads of the model, a multiple of `devices`.
        devices: How many share them.
        max_context: Positions of the model.
        current: The orders that the weights are in; None for the model's own. A layer stays in its order where no
            other one takes less room, by itself or together with those of the other layers.
    """
    loads = _loads(policy, num_layers, num_kv_heads, min(max_context, _TOKENS))
    own = (tuple(range(num_kv_heads)),) * num_layers if current is None else current
    by_layer = []
    for of_layer, stays in zip(loads, own, strict=True):
        orders = stays, balanced_order(of_layer, devices)
        rooms = [apart(_by_device(of_layer[None], (order,), devices)) for order in orders]
        by_layer.append(orders[int(np.argmin(rooms))])
    found = tuple(by_layer), balanced_together(loads, devices)
    return min(found, key=lambda orders: tokens_on_device(_by_device(loads, orders, devices)))  # the first of equals


def balanced_order(loads: Int[np.ndarray, " Hkv"], devices: int) -> tuple[int, ...]:
    """Heads by device, as many on each: the largest first, each to the device that has least and is not full.

    On a device the largest stands first, so that places of different devices hold about as much.
    """
    held: list[list[int]] = [[] for _ in range(devices)]
    for head in np.argsort(-loads, kind="stable").tolist():
        free = [of_device for of_device in held if len(of_device) < len(loads) // devices]
        min(free, key=lambda of_device: int(loads[of_device].sum())).append(head)
    return tuple(head for of_device in held for head in of_device)


def balanced_together(loads: Int[np.ndarray, "layers Hkv"], devices: int) -> Orders:
    """Orders in which devices hold as much of all layers together.

    In each layer the same heads sit together as in `balanced_order`, for devices wait for each other there. Such groups
    are dealt out, the largest first, each to the device that has least and none of that layer.
    """
    groups = np.array([balanced_order(of_layer, devices) for of_layer in loads]).reshape(len(loads), devices, -1)
    sums = _by_device(loads, groups.reshape(loads.shape), devices).sum(axis=2)
    held, dealt = np.zeros(devices, np.int64), np.full(sums.shape, -1)  # dealt: the group of a layer on a device
    for item in np.argsort(-sums, axis=None, kind="stable").tolist():
        layer, group = divmod(item, devices)
        device = min(np.flatnonzero(dealt[layer] < 0).tolist(), key=held.__getitem__)
        dealt[layer, device] = group
        held[device] += sums[layer, group]
    orders = np.take_along_axis(groups, dealt[..., None], axis=1).reshape(loads.shape)
    return tuple(map(tuple, orders.tolist()))


def _loads(policy: CachePolicy, num_layers: int, num_kv_heads: int, tokens: int) -> Int[np.ndarray, "layers Hkv"]:
    """Tokens that a policy's caches have room for behind a prompt."""
    return np.array([capacities_per_head(policy, layer, tokens, num_kv_heads) for layer in range(num_layers)])


def _by_device(
    loads: Int[np.ndarray, "layers Hkv"], orders: Orders | Int[np.ndarray, "layers Hkv"], devices: int
) -> Int[np.ndarray, "layers devices places"]:
    """The heads' tokens as orders deal them out."""
    return np.take_along_axis(loads, np.asarray(orders), axis=1).reshape(len(loads), devices, -1)
