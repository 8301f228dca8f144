"""Which KV heads sit together on a device: dealt so that their caches take as little room as can be.

All devices of a mesh run one program, so a layer's regions are as large on each of them as the largest at that place.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

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
        current: The orders that the weights are in; None for the model's own. A layer stays in its order where no
            other one takes less room.
    """
    tokens, orders = min(max_context, _TOKENS), []
    for layer in range(num_layers):
        source = f"{type(policy).__name__}.capacities({layer}, {tokens})"
        loads = np.asarray(per_head(policy.capacities(layer, tokens), num_kv_heads, source))
        own = tuple(range(num_kv_heads)) if current is None else current[layer]
        balanced = balanced_order(loads, devices)
        orders.append(balanced if _room(loads, balanced, devices) < _room(loads, own, devices) else own)
    return tuple(orders)


def balanced_order(loads: Int[np.ndarray, " Hkv"], devices: int) -> tuple[int, ...]:
    """Heads by device, as many on each: the largest first, each to the device that has least and is not full.

    On a device the largest stands first, so that places of different devices hold about as much.
    """
    held: list[list[int]] = [[] for _ in range(devices)]
    for head in np.argsort(-loads, kind="stable").tolist():
        free = [of_device for of_device in held if len(of_device) < len(loads) // devices]
        min(free, key=lambda of_device: int(loads[of_device].sum())).append(head)
    return tuple(head for of_device in held for head in of_device)


def _room(loads: Int[np.ndarray, " Hkv"], order: tuple[int, ...], devices: int) -> int:
    """Tokens that every device has room for: at each place, the most that any of them has there."""
    return int(loads[np.asarray(order)].reshape(devices, -1).max(axis=0).sum())
