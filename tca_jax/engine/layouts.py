"""The static shape of a layer's cache: all that follows from method and sizes before any data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from tca_jax.engine.mesh import HeadShards
from tca_jax.engine.mesh_pools import SharedPool, plan_shared_pools
from tca_jax.errors import UserError
from tca_jax.methods.base import CachePolicy, capacities_per_head, per_head
from tca_jax.methods.blocks import num_ranked_blocks
from tca_jax.methods.regions import Regions
from tca_jax.pallas_kernels.integers import round_up


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static shape of one layer's cache.

    Attributes:
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w, a multiple of b.
        prompt_tokens: Padded length of what was read, L.
        ring_tokens: Slots of the ring, R: w + b, or less where all that is ever fed is shorter.
        batch: Rows, B. Several of them may share a row of the pool.
        regions: Regions of the pool, which is never written after prefill.
        shards: How the model's KV heads are dealt out over a mesh, whose every device has a cache of this shape; None
            on one device. Rows and heads are then a device's.
        shared: Where the regions lie in a pool that all layers share, which devices of a mesh may have: what they hold
            is then a device's own affair, and `regions` are the largest of any device. None where the layer has a pool
            of its own.
        growth: Regions, B rows of them, of what is kept of blocks that leave the window later; None where nothing is.
    """

    block_size: int
    window: int
    prompt_tokens: int
    ring_tokens: int
    batch: int
    regions: Regions
    growth: Regions | None = None
    shards: HeadShards | None = None
    shared: SharedPool | None = None

    @classmethod
    def plan(
        cls,
        policy: CachePolicy,
        layer: int,
        num_kv_heads: int,
        batch: int,
        prompt_tokens: int,
        new_tokens: int | None,
        shards: HeadShards | None = None,
    ) -> CacheLayout:
        """Sizes a layer's cache, with a pool of its own, for prompts of up to `prompt_tokens`.

        Args:
            policy: Cache policy.
            layer: The layer.
            num_kv_heads: KV heads of the model.
            batch: Prompts, B; of a device.
            prompt_tokens: Padded prompt length, L.
            new_tokens: Most tokens of an answer, for which there is room then. None for a context: its ring serves any
                number of tokens, and room for what leaves the window is planned by whoever continues it, `with_growth`.
            shards: How these heads are dealt out over a mesh; None on one device.

        Raises:
            ValueError: the policy names no capacity for each KV head, ranks other blocks than those left of its
                window, has a window that depends on the length (in a context), or the pool is too large to be
                addressed.
        """
        name, b = type(policy).__name__, policy.block_size
        total = prompt_tokens + (new_tokens or 0)
        window = policy.local_window(total)
        if new_tokens is None and window != policy.window:
            raise UserError(
                f"{name}.local_window({total}) = {window} is not its window, {policy.window}: the window of a context "
                "must not depend on its length; see CachePolicy.for_contexts"
            )
        if num_ranked_blocks(prompt_tokens, b, window) != policy.num_ranked_blocks(prompt_tokens):
            raise UserError(
                f"{name}.local_window({total}) = {window}, but its num_ranked_blocks({prompt_tokens}) "
                f"is {policy.num_ranked_blocks(prompt_tokens)}: blocks must be ranked exactly left of the window"
            )
        capacities = capacities_per_head(policy, layer, prompt_tokens, num_kv_heads)
        layout = cls(
            block_size=b,
            window=window,
            prompt_tokens=prompt_tokens,
            ring_tokens=window + b if new_tokens is None else min(window + b, round_up(total, b)),
            batch=batch,
            regions=Regions.plan(batch, tuple(_by_device(shards, layer, capacities).max(axis=0).tolist())),
            shards=shards,
        )
        # The last new token is never fed back.
        return layout if new_tokens is None else layout.with_growth(policy, layer, new_tokens - 1)

    def with_growth(self, policy: CachePolicy, layer: int, fed_tokens: int) -> CacheLayout:
        """The same with room for what is kept of the blocks that leave while up to `fed_tokens` more are fed."""
        most = self.most_growth(policy, layer, fed_tokens)
        return dataclasses.replace(self, growth=Regions.plan(self.batch, most) if any(most) else None)

    def most_growth(self, policy: CachePolicy, layer: int, fed_tokens: int) -> tuple[int, ...]:
        """Most tokens that each KV head keeps of the blocks that leave while up to `fed_tokens` more are fed; of heads
        at the same place of several devices, the most."""
        return tuple(self.growth_by_device(policy, layer, fed_tokens).max(axis=0).tolist())

    def growth_by_device(self, policy: CachePolicy, layer: int, fed_tokens: int) -> Int[np.ndarray, "devices Hkv"]:
        """The same on each device of a mesh; without one, of a single device."""
        source = f"{type(policy).__name__}.growth({layer}, {self.prompt_tokens}, {fed_tokens})"
        devices = 1 if self.shards is None else self.shards.devices
        growth = policy.growth(layer, self.prompt_tokens, fed_tokens)
        return _by_device(self.shards, layer, per_head(growth, self.num_kv_heads * devices, source))

    @property
    def capacities_by_device(self) -> Int[np.ndarray, "devices Hkv"]:
        """Tokens that each region holds, on each device of a mesh; without one, on a single device."""
        if self.shared is not None:
            return np.asarray(self.shared.capacities)
        return np.tile(self.regions.capacities, (1 if self.shards is None else self.shards.devices, 1))

    def repeat_rows(self, times: int) -> CacheLayout:
        """Every row `times` times; the pool stays what it is."""
        growth = self.growth and dataclasses.replace(self.growth, batch=self.growth.batch * times)
        return dataclasses.replace(self, batch=self.batch * times, growth=growth)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a device, H_kv."""
        return len(self.regions.capacities)

    @property
    def has_ranked_blocks(self) -> bool:
        """Whether a prompt of this shape can have ranked blocks; otherwise it fits its window."""
        return num_ranked_blocks(self.prompt_tokens, self.block_size, self.window) > 0

    @property
    def evicts(self) -> bool:
        """Whether anything can be kept of a block that leaves the window."""
        return self.growth is not None

    @property
    def pool_tokens(self) -> int:
        """Tokens of the pool that the layer's cache has, on a device."""
        if self.shared is None:
            return self.regions.pool_tokens
        return self.shared.tokens if self.shared.first else 0

    def num_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of K and V together, on a device: pool, which rows may share, growth and ring.

        A pool that all layers share counts for the first of them.
        """
        ring = self.batch * self.num_kv_heads * self.ring_tokens
        growth = 0 if self.growth is None else self.growth.pool_tokens
        return 2 * (self.pool_tokens + growth + ring) * head_dim * jnp.dtype(dtype).itemsize

    def local_tokens(self, fed: Int[np.ndarray, " B"], prompt_lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Tokens in the window after `fed` of them; behind a bare prompt it is already the next token's window."""
        last = np.where(fed > prompt_lengths, fed - 1, fed)
        return fed - np.maximum(0, last // self.block_size * self.block_size - self.window)


def plan_layouts(
    policy: CachePolicy,
    num_layers: int,
    num_kv_heads: int,
    batch: int,
    prompt_tokens: int,
    new_tokens: int | None,
    shards: HeadShards | None = None,
) -> tuple[CacheLayout, ...]:
    """The caches of all layers; arguments and errors are those of `CacheLayout.plan`.

    On a mesh whose devices' heads differ by layer, layers share a pool: see `SharedPool`.
    """
    sizes = num_kv_heads, batch, prompt_tokens, new_tokens, shards
    layouts = tuple(CacheLayout.plan(policy, layer, *sizes) for layer in range(num_layers))
    if shards is None:
        return layouts
    capacities = [
        shards.by_device(layer, capacities_per_head(policy, layer, prompt_tokens, num_kv_heads))
        for layer in range(num_layers)
    ]
    return with_capacities(layouts, capacities)


def with_capacities(
    layouts: Sequence[CacheLayout], capacities: Sequence[Int[np.ndarray, "devices Hkv"]]
) -> tuple[CacheLayout, ...]:
    """The caches of all layers with room for at least so many tokens of each KV head, by device and place there."""
    batch = layouts[0].batch
    shared = plan_shared_pools(np.stack(capacities), batch) if layouts[0].shards is not None else None
    regions = [Regions.plan(batch, tuple(of_layer.max(axis=0).tolist())) for of_layer in capacities]
    return tuple(
        dataclasses.replace(layout, regions=regions[layer], shared=None if shared is None else shared[layer])
        for layer, layout in enumerate(layouts)
    )


def total_bytes(layouts: Sequence[CacheLayout], head_dim: int, dtype: Any) -> int:
    """Bytes of the caches of all layers, on a device."""
    return sum(layout.num_bytes(head_dim, dtype) for layout in layouts)


def _by_device(shards: HeadShards | None, layer: int, values: tuple[int, ...]) -> Int[np.ndarray, "devices Hkv"]:
    return np.asarray(values)[None] if shards is None else shards.by_device(layer, values)


def memory_bytes() -> int | None:
    """Bytes that the default device may take, the host's for the CPU; None where nobody says."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not know these names
        return None


def require_memory(kv_cache_bytes: int, what: str) -> None:
    """Raises ValueError if a KV cache is larger than all of the device's memory; `what` says what it is for."""
    limit = memory_bytes()
    if limit is not None and kv_cache_bytes > limit:
        raise UserError(f"{what} need {kv_cache_bytes / 1e9:,.1f} GB of KV cache: the device has {limit / 1e9:,.1f} GB")
