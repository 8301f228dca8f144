"""KV caches at the sizes of long contexts, filled with random keys and values: what decoding benchmarks read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import tca_jax
from tca_jax.benchmarks.common import FULL, Layer, random_normal, unequal_candidates
from tca_jax.engine.cache import CacheLayout, LayerCache
from tca_jax.methods.candidates import budget_counts, budget_sizes


def plan(config: tca_jax.TCAConfig, layer: Layer, share: float, batch: int, tokens: int) -> CacheLayout:
    """Layout behind a prompt of `tokens`; the full cache is a window that holds everything, as for `LM`."""
    if share == FULL:
        config = tca_jax.TCAConfig(block_size=config.block_size, window=tokens)
        candidates = (config.num_candidates,) * layer.kv_heads
    else:
        candidates = unequal_candidates(config, layer.kv_heads, share)
    return CacheLayout.plan(config, candidates, batch, tokens, 1)


def selected_tokens(layout: CacheLayout) -> np.ndarray:
    """Tokens that each KV head keeps of the ranked blocks, int64 `[H_kv]`."""
    config = layout.config
    counts = budget_counts(config, config.num_ranked_blocks(layout.prompt_tokens))
    return (counts @ budget_sizes(config).astype(np.int64))[list(layout.candidates)]


def attended_tokens(layout: CacheLayout) -> int:
    """Tokens that a step reads, over all rows and KV heads: what is kept, the window, and the new token."""
    local = min(layout.prompt_tokens, layout.config.window) + 1
    return layout.batch * int((selected_tokens(layout) + local).sum())


def random_caches(
    layouts: list[CacheLayout], head_dim: int, seed: int, dtype: DTypeLike = jnp.bfloat16
) -> list[LayerCache]:
    """Caches of those layouts, their regions full, out of the same random keys and values."""
    heads, batch = len(layouts[0].candidates), layouts[0].batch
    most = max(max(layout.pool_tokens, batch * heads * layout.ring_tokens) for layout in layouts)
    keys = jax.random.split(jax.random.key(seed))
    drawn = [random_normal(key, (most, head_dim), dtype) for key in keys]  # one program for all shapes
    caches = []
    for layout in layouts:
        ring = (batch, heads, layout.ring_tokens, head_dim)
        k_pool, v_pool = (x[: layout.pool_tokens] for x in drawn)
        k_ring, v_ring = (x[most - batch * heads * layout.ring_tokens :].reshape(ring) for x in drawn)
        kept = jnp.asarray(np.tile(selected_tokens(layout), (batch, 1)), jnp.int32)
        offsets = jnp.asarray(layout.offsets, jnp.int32)
        caches.append(LayerCache(k_pool, v_pool, offsets, kept, k_ring, v_ring, layout))
    return caches
