"""Caches on a mesh: which KV heads sit together on a device, and a pool that all layers share.

All devices run one program, so an array is as large on each device as on the one that needs most. KV heads are dealt
out so that devices keep about as much. Where the heads of one layer keep far more than the heads of another, a pool for
each layer would lie half empty: the layers then share a pool, as all heads of a device together keep about as much as
those of any other.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tca_jax.engine.mesh import part_of_device
from tca_jax.methods.base import CachePolicy, capacities_per_head
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.kv import REGION_ALIGNMENT, Pool

#: One pool is had where a pool for each layer takes so many times its room: filling it takes a copy of what is kept.
_PAYS = 1.05


@dataclasses.dataclass(frozen=True)
class SharedPool:
    """A layer's part of the pool that all layers share on a device; static.

    Attributes:
        tokens: Of the whole pool, alike on all devices.
        batch: Rows of regions, B.
        starts: First token of the layer's part on each device, `[devices]`. Regions lie in it as `Regions` has them.
        capacities: Tokens that each region holds, `[devices][Hkv]`, Hkv the KV heads of a device; multiples of
            `REGION_ALIGNMENT`.
        first: Whether the layer is the first, whose cache has the pool's keys and values outside of programs.
    """

    tokens: int
    batch: int
    starts: tuple[int, ...]
    capacities: tuple[tuple[int, ...], ...]
    first: bool

    @property
    def offsets(self) -> Int[np.ndarray, "devices B Hkv"]:
        """First pool token of each region on each device."""
        by_device = [Regions(self.batch, capacities).offsets for capacities in self.capacities]
        return np.asarray(self.starts)[:, None, None] + np.stack(by_device)

    def write(self, regions: Regions, pool: Pool, before: Pool | None) -> Pool:
        """The shared pool with what lies in a layer's own one; inside a program of each device.

        Args:
            regions: Of the layer's own pool: as large on all devices.
            pool: What is kept of the layer. What passes the capacity of a device's region is dropped.
            before: The shared pool with the layers before this one in it; None for the first.
        """
        own = part_of_device(np.asarray(self.capacities, np.int32))
        offsets = part_of_device(self.offsets.astype(np.int32))
        lengths = jnp.minimum(pool.lengths, own)
        k, v = (None, None) if before is None else (before.k, before.v)
        places = self._places(regions, offsets, lengths)
        return Pool(self._put(k, pool.k, places), self._put(v, pool.v, places), offsets, lengths)

    def _places(self, regions: Regions, offsets: Int[Array, "B Hkv"], lengths: Int[Array, "B Hkv"]) -> Int[Array, " P"]:
        """Where each token of a layer's own pool goes; past the shared pool, each elsewhere, where it holds none."""
        slots = [jnp.arange(capacity, dtype=jnp.int32) for capacity in regions.capacities]
        there = jnp.concatenate([offsets[:, head, None] + slot for head, slot in enumerate(slots)], axis=1)
        held = jnp.concatenate([slot < lengths[:, head, None] for head, slot in enumerate(slots)], axis=1)
        elsewhere = self.tokens + jnp.arange(there.size, dtype=jnp.int32)
        return jnp.where(held.reshape(-1), there.reshape(-1), elsewhere)

    def _put(self, shared: Array | None, own: Float[Array, "p d"], places: Int[Array, " P"]) -> Float[Array, "Q d"]:
        if shared is None:
            shared = jnp.zeros((self.tokens, own.shape[-1]), own.dtype)
        return shared.at[places].set(own[: places.size], mode="drop", unique_indices=True)


def plan_shared_pools(capacities: Int[np.ndarray, "layers devices Hkv"], batch: int) -> tuple[SharedPool, ...] | None:
    """Each layer's part of a pool that all layers share; None where a pool for each layer is as good.

    Args:
        capacities: Tokens that each KV head's region is to hold, by layer, device and place on the device.
        batch: Rows of a device, B.
    """
    aligned = -(-capacities.astype(np.int64) // REGION_ALIGNMENT) * REGION_ALIGNMENT
    tokens, of_layer = batch * together(aligned), batch * int(aligned.max(axis=1).sum(axis=1).max())
    if not _pays(aligned) or tokens + of_layer >= 2**31:  # rows are addressed in int32, also those past the pool
        return None
    of_layers = batch * aligned.sum(axis=2)  # [layers, devices]
    starts = np.cumsum(of_layers, axis=0) - of_layers
    return tuple(
        SharedPool(tokens, batch, tuple(start), tuple(map(tuple, regions)), first=layer == 0)
        for layer, (start, regions) in enumerate(zip(starts.tolist(), aligned.tolist(), strict=True))
    )


def tokens_on_device(capacities: Int[np.ndarray, "layers devices Hkv"]) -> int:
    """Tokens of a row that each device has room for in its pool or pools, for regions of at least such capacities."""
    return together(capacities) if _pays(capacities) else apart(capacities)


def together(capacities: Int[np.ndarray, "layers devices Hkv"]) -> int:
    """The same of one pool for all layers."""
    return int(capacities.sum(axis=(0, 2)).max())


def apart(capacities: Int[np.ndarray, "layers devices Hkv"]) -> int:
    """The same of a pool for each layer: at each place of a device, the most that any of them has there."""
    return int(capacities.max(axis=1).sum())


def _pays(capacities: Int[np.ndarray, "layers devices Hkv"]) -> bool:
    return apart(capacities) > _PAYS * together(capacities)


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
