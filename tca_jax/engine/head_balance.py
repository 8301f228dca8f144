"""Which KV heads sit together on a device: dealt so that their caches take as little room as can be.

All devices of a mesh run one program, so their arrays are of one size: a layer's regions as large as the largest at
that place on any device, or where that wastes room, one pool for all layers as large as any device's (`shared_pools`).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from tca_jax.engine.shared_pools import apart, tokens_on_device
from tca_jax.methods.base import CachePolicy, per_head

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
        current: The orders that the weights are in; None for the model's own. Heads stay where they are while no other
            order takes less room: those of a layer that balances by itself, and those of all layers.
    """
    loads = _loads(policy, num_layers, num_kv_heads, min(max_context, _TOKENS))
    own = (tuple(range(num_kv_heads)),) * num_layers if current is None else current
    by_layer = []
    for of_layer, stays in zip(loads, own, strict=True):
        orders = stays, balanced_order(of_layer, devices)
        rooms = [apart(_by_device(of_layer[None], (order,), devices)) for order in orders]
        by_layer.append(orders[int(np.argmin(rooms))])
    found = own, tuple(by_layer), balanced_together(loads, devices)
    # Of equal ones the first: heads stay.
    return min(found, key=lambda orders: tokens_on_device(_by_device(loads, orders, devices)))


def balanced_order(loads: Int[np.ndarray, " Hkv"], devices: int) -> tuple[int, ...]:
    """Heads by device, as many on each: the largest first, each to the device that has least and is not full.

    On a device the largest stands first, so that places of different devices hold about as much.
    """
    return balanced_together(loads[None], devices)[0]


def balanced_together(loads: Int[np.ndarray, "layers Hkv"], devices: int) -> Orders:
    """The same of all layers at once: in each of them a device has as many heads, and it has least of all layers."""
    layers, heads = loads.shape
    dealt: list[list[list[int]]] = [[[] for _ in range(devices)] for _ in range(layers)]
    held = [0] * devices
    for item in np.argsort(-loads, axis=None, kind="stable").tolist():
        layer, head = divmod(item, heads)
        free = [device for device in range(devices) if len(dealt[layer][device]) < heads // devices]
        device = min(free, key=held.__getitem__)
        dealt[layer][device].append(head)
        held[device] += int(loads[layer, head])
    return tuple(tuple(head for of_device in of_layer for head in of_device) for of_layer in dealt)


def _loads(policy: CachePolicy, num_layers: int, num_kv_heads: int, tokens: int) -> Int[np.ndarray, "layers Hkv"]:
    """Tokens that a policy's caches have room for behind a prompt."""
    name = type(policy).__name__
    return np.array(
        [
            per_head(policy.capacities(layer, tokens), num_kv_heads, f"{name}.capacities({layer}, {tokens})")
            for layer in range(num_layers)
        ]
    )


def _by_device(
    loads: Int[np.ndarray, "layers Hkv"], orders: Orders, devices: int
) -> Int[np.ndarray, "layers devices places"]:
    """The heads' tokens as orders deal them out."""
    return np.take_along_axis(loads, np.asarray(orders), axis=1).reshape(len(loads), devices, -1)
