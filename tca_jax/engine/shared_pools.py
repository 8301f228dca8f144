"""One pool for all layers on each device of a mesh, where a pool for each layer would lie half empty.

All devices run one program, so an array is as large on each of them as on the one that needs most. Of one layer's heads
some keep far more than others, and the device that has these decides for all. A device's heads of all layers together
keep about as much as those of any other.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tca_jax.engine.mesh import part_of_device
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
