"""KV caches at the sizes of long contexts, filled with random keys and values: what decoding benchmarks read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

import tca_jax
from tca_jax.engine.cache import LayerCache
from tca_jax.engine.layouts import CacheLayout
from tca_jax.engine.mesh import CACHES, SAME, HeadShards, num_devices, over_mesh
from tca_jax.lab.benchmarks.common import Layer, random_normal
from tca_jax.lab.benchmarks.layer_mesh import heads_over
from tca_jax.lab.benchmarks.shares import Share
from tca_jax.methods.base import CachePolicy, capacities_per_head
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import Pool, Ring


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A layer's cache behind a prompt.

    Attributes:
        layout: Its static shape, on a mesh a device's.
        selected: Tokens that each KV head keeps beside the window, in the order in which the heads lie, `[H_kv]`.
        batch: Rows of all devices.
        mesh: The devices; None for one.
    """

    layout: CacheLayout
    selected: tuple[int, ...]
    batch: int
    mesh: Mesh | None = None

    @property
    def attended_tokens(self) -> int:
        """Tokens that a step reads, over all rows and KV heads: what is kept, the window, and the new token."""
        local = min(self.layout.prompt_tokens, self.layout.window) + 1
        return self.batch * (sum(self.selected) + local * len(self.selected))

    def num_bytes(self, head_dim: int, dtype: DTypeLike) -> int:
        """Bytes of it, on all devices together."""
        return num_devices(self.mesh) * self.layout.num_bytes(head_dim, dtype)


def plan(
    config: tca_jax.TCAConfig, layer: Layer, share: Share, batch: int, tokens: int, mesh: Mesh | None = None
) -> CachePlan:
    """The cache behind a prompt of `tokens` whose ranked blocks keep a share, unequally."""
    policy = share.method(config, layer.kv_heads).cache
    heads = heads_over(mesh, policy, layer.kv_heads)
    return plan_layer(policy, 0, layer.kv_heads, batch, tokens, 1, mesh, heads)


def plan_layer(
    policy: CachePolicy,
    layer: int,
    kv_heads: int,
    batch: int,
    tokens: int,
    new_tokens: int,
    mesh: Mesh | None = None,
    heads: HeadShards | None = None,
) -> CachePlan:
    """The cache of a layer behind a prompt of `tokens`, with room for `new_tokens`; `heads` are dealt over `mesh`."""
    layout = CacheLayout.plan(policy, layer, kv_heads, batch // axis_size(mesh, DATA), tokens, new_tokens, heads)
    selected = capacities_per_head(policy, layer, tokens, kv_heads)
    if heads is not None:
        selected = tuple(selected[head] for head in heads.order[layer])
    return CachePlan(layout, selected, batch, mesh)


def random_caches(
    plans: list[CachePlan], head_dim: int, seed: int, dtype: DTypeLike = jnp.bfloat16
) -> list[LayerCache]:
    """Caches as planned, holding what they keep, out of the same random keys and values, alike on all devices."""
    layouts = tuple(plan.layout for plan in plans)
    kept = [jnp.asarray(np.tile(plan.selected, (plan.batch, 1)), jnp.int32) for plan in plans]
    keys = jax.random.split(jax.random.key(seed))
    return _program(layouts, head_dim, jnp.dtype(dtype), plans[0].mesh)(keys, kept)


@functools.cache
def _program(layouts: tuple[CacheLayout, ...], head_dim: int, dtype: jnp.dtype, mesh: Mesh | None) -> Any:
    """What fills caches; layers of a model are often alike."""
    filled = functools.partial(_filled, layouts, head_dim, dtype)
    return filled if mesh is None else jax.jit(over_mesh(filled, mesh, (SAME, CACHES), CACHES))


def _filled(
    layouts: tuple[CacheLayout, ...], head_dim: int, dtype: DTypeLike, keys: Array, kept: list[Array]
) -> list[LayerCache]:
    """A device's caches of random keys and values; of each layout's heads the tokens `[B, H_kv]` are kept."""
    heads, batch = layouts[0].num_kv_heads, layouts[0].batch
    most = max(max(layout.regions.pool_tokens, batch * heads * layout.ring_tokens) for layout in layouts)
    drawn = [random_normal(key, (most, head_dim), dtype) for key in keys]  # one program for all shapes
    caches = []
    for layout, lengths in zip(layouts, kept, strict=True):
        ring = (batch, heads, layout.ring_tokens, head_dim)
        k_pool, v_pool = (x[: layout.regions.pool_tokens] for x in drawn)
        k_ring, v_ring = (x[most - batch * heads * layout.ring_tokens :].reshape(ring) for x in drawn)
        offsets = jnp.asarray(layout.regions.offsets, jnp.int32)
        cache = LayerCache(Pool(k_pool, v_pool, offsets, lengths), None, Ring(k_ring, v_ring), layout)
        caches.append(cache.with_growth(layout.growth))
    return caches
