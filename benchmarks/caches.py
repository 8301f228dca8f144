"""KV caches at the sizes of long contexts, filled with random keys and values: what decoding benchmarks read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import tca_jax
from tca_jax.benchmarks.common import Layer, random_normal
from tca_jax.benchmarks.shares import Share
from tca_jax.engine.cache import LayerCache
from tca_jax.engine.layouts import CacheLayout
from tca_jax.methods.base import CachePolicy, per_head
from tca_jax.pallas_kernels.kv import Pool, Ring


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A layer's cache behind a prompt.

    Attributes:
        layout: Its static shape.
        selected: Tokens that each KV head keeps beside the window, `[H_kv]`.
    """

    layout: CacheLayout
    selected: tuple[int, ...]

    @property
    def attended_tokens(self) -> int:
        """Tokens that a step reads, over all rows and KV heads: what is kept, the window, and the new token."""
        local = min(self.layout.prompt_tokens, self.layout.window) + 1
        return self.layout.batch * (sum(self.selected) + local * len(self.selected))


def plan(config: tca_jax.TCAConfig, layer: Layer, share: Share, batch: int, tokens: int) -> CachePlan:
    """The cache behind a prompt of `tokens` whose ranked blocks keep a share, unequally."""
    return plan_layer(share.method(config, layer.kv_heads).cache, 0, layer.kv_heads, batch, tokens, 1)


def plan_layer(policy: CachePolicy, layer: int, kv_heads: int, batch: int, tokens: int, new_tokens: int) -> CachePlan:
    """The cache of a layer behind a prompt of `tokens`, with room for `new_tokens`."""
    layout = CacheLayout.plan(policy, layer, kv_heads, batch, tokens, new_tokens)
    selected = per_head(policy.capacities(layer, tokens), kv_heads, "capacities")
    return CachePlan(layout, selected)


def random_caches(
    plans: list[CachePlan], head_dim: int, seed: int, dtype: DTypeLike = jnp.bfloat16
) -> list[LayerCache]:
    """Caches as planned, holding what they keep, out of the same random keys and values."""
    layouts = [plan.layout for plan in plans]
    heads, batch = layouts[0].num_kv_heads, layouts[0].batch
    most = max(max(layout.regions.pool_tokens, batch * heads * layout.ring_tokens) for layout in layouts)
    keys = jax.random.split(jax.random.key(seed))
    drawn = [random_normal(key, (most, head_dim), dtype) for key in keys]  # one program for all shapes
    caches = []
    for plan in plans:
        layout = plan.layout
        ring = (batch, heads, layout.ring_tokens, head_dim)
        k_pool, v_pool = (x[: layout.regions.pool_tokens] for x in drawn)
        k_ring, v_ring = (x[most - batch * heads * layout.ring_tokens :].reshape(ring) for x in drawn)
        kept = jnp.asarray(np.tile(plan.selected, (batch, 1)), jnp.int32)
        offsets = jnp.asarray(layout.regions.offsets, jnp.int32)
        cache = LayerCache(Pool(k_pool, v_pool, offsets, kept), None, Ring(k_ring, v_ring), layout)
        caches.append(cache.with_growth(layout.growth))
    return caches
