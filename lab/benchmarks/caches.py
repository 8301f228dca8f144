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
from tca_jax.engine.cache import CacheLayout, PagedCache, kept_of_prompt
from tca_jax.engine.mesh import CACHES, SAME, HeadShards, num_devices, over_mesh
from tca_jax.lab.benchmarks.common import Layer, random_normal
from tca_jax.lab.benchmarks.layer_mesh import heads_over
from tca_jax.lab.benchmarks.shares import Share
from tca_jax.methods.base import CachePolicy
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.pallas_kernels.kv import CODES, encode


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """A cache behind a prompt.

    Attributes:
        layout: Its static shape, on a mesh a device's.
        selected: Tokens that each KV head keeps beside the window, in the order in which heads lie, `[layers][H_kv]`.
        batch: Rows of all devices.
        mesh: The devices; None for one.
    """

    layout: CacheLayout
    selected: tuple[tuple[int, ...], ...]
    batch: int
    mesh: Mesh | None = None

    @property
    def attended_tokens(self) -> int:
        """Tokens that a step reads, over all rows, layers and KV heads: what is kept, the window, and the new token."""
        local = min(self.layout.prompt_tokens, self.layout.window) + 1
        return self.batch * (sum(map(sum, self.selected)) + local * sum(map(len, self.selected)))

    def num_bytes(self, head_dim: int, dtype: DTypeLike) -> int:
        """Bytes of it, on all devices together."""
        return num_devices(self.mesh) * self.layout.num_bytes(head_dim, dtype)


def plan(
    config: tca_jax.TCAConfig, layer: Layer, share: Share, batch: int, tokens: int, mesh: Mesh | None = None
) -> CachePlan:
    """The cache of one layer behind a prompt of `tokens` whose ranked blocks keep a share, unequally."""
    policy = share.method(config, layer.kv_heads).cache
    heads = heads_over(mesh, policy, layer.kv_heads)
    return plan_layers(policy, 1, layer.kv_heads, batch, tokens, 1, mesh, heads)


def plan_layers(
    policy: CachePolicy,
    num_layers: int,
    kv_heads: int,
    batch: int,
    tokens: int,
    fed_tokens: int,
    mesh: Mesh | None = None,
    heads: HeadShards | None = None,
) -> CachePlan:
    """The cache of layers behind a prompt of `tokens`, with room for more; `heads` are dealt over `mesh`."""
    rows = batch // axis_size(mesh, DATA)
    layout = CacheLayout.plan(policy, num_layers, kv_heads, rows, tokens, fed_tokens, heads)
    selected = [kept_of_prompt(policy, layer, tokens, kv_heads) for layer in range(num_layers)]
    if heads is not None:
        selected = [of_layer[list(heads.order[layer])] for layer, of_layer in enumerate(selected)]
    return CachePlan(layout, tuple(tuple(of_layer.tolist()) for of_layer in selected), batch, mesh)


def random_cache(plan: CachePlan, head_dim: int, seed: int, dtype: DTypeLike = jnp.bfloat16) -> PagedCache:
    """A cache as planned, holding what it keeps, out of random keys and values, alike on all devices."""
    kept = [jnp.asarray(np.tile(of_layer, (plan.batch, 1)), jnp.int32) for of_layer in plan.selected]
    keys = jax.random.split(jax.random.key(seed))
    return _program(plan.layout, head_dim, jnp.dtype(dtype), plan.mesh)(keys, kept)


@functools.cache
def _program(layout: CacheLayout, head_dim: int, dtype: jnp.dtype, mesh: Mesh | None) -> Any:
    """What fills a cache."""
    filled = functools.partial(_filled, layout, head_dim, dtype)
    return filled if mesh is None else jax.jit(over_mesh(filled, mesh, (SAME, CACHES), CACHES))


def _filled(layout: CacheLayout, head_dim: int, dtype: DTypeLike, keys: Array, kept: list[Array]) -> PagedCache:
    """A device's cache of random keys and values, which keeps so many tokens `[B, H_kv]` of each layer."""
    starts = layout.window_start(jnp.full(layout.batch, layout.prompt_tokens, jnp.int32))
    empty = layout.empty(head_dim, dtype, starts)
    wide = jnp.bfloat16 if jnp.dtype(dtype) == CODES else dtype
    k, v = (encode(random_normal(key, empty.k.shape, wide), empty.k) for key in keys)
    return dataclasses.replace(empty, k=k, v=v, kept=tuple(kept))
