"""Decode attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.pallas_kernels.kv import Pool, Ring, held_pools
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.online_softmax import OnlineSoftmax, attend_region
from tca_jax.pallas_kernels.tiles import region_map

#: Keys of a tile of a region.
DECODE_KEYS = 1024


@partial(jax.jit, static_argnames=("block_size", "window", "capacity", "growth_capacity"))
@jax.named_scope("decode_attention")
def decode_attention(
    q: Float[Array, "B Hq d"],
    pool: Pool,
    ring: Ring,
    positions: Int[Array, " B"],
    *,
    growth: Pool | None = None,
    block_size: int,
    window: int,
    capacity: int,
    growth_capacity: int = 0,
) -> tuple[Float[Array, "B Hq d"], Float32[Array, "B Hq"]]:
    """One softmax over ring and regions; see `decode_attention.decode_attention`."""
    batch, kv_heads, slots, head_dim = ring.k.shape
    grouped = q.reshape(batch, kv_heads, -1, head_dim)
    edge = jnp.maximum(0, positions // block_size * block_size - window)
    local = ring_positions(positions, slots) >= edge[:, None]  # [B, R]
    state = _attend_ring(grouped, ring, local)
    for held in held_pools(pool, capacity, growth, growth_capacity):
        state = state.merge(_attend_pool(grouped, held))
    return state.attention().astype(q.dtype).reshape(q.shape), state.log_sum_exp().reshape(q.shape[:2])


def ring_positions(positions: Int[Array, " B"], slots: int) -> Int32[Array, "B R"]:
    """Position that each slot holds: the latest p <= pos with p mod R = slot; negative if never written."""
    slot = jnp.arange(slots, dtype=jnp.int32)
    return positions[:, None] - (positions[:, None] - slot) % slots


def _attend_ring(q: Float[Array, "B Hkv G d"], ring: Ring, seen: Bool[Array, "B R"]) -> OnlineSoftmax:
    seen = seen[:, None, None]
    scores = jnp.where(seen, scaled_scores("bhgd,bhkd->bhgk", q, ring.k), MASKED)
    peak = scores.max(axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - peak[..., None]), 0)
    return OnlineSoftmax(peak, weights.sum(axis=-1), weighted_sum("bhgk,bhkd->bhgd", weights, ring.v))


def _attend_pool(q: Float[Array, "B Hkv G d"], pool: Pool) -> OnlineSoftmax:
    """Streams every region by its own length, so that unequal heads cost what they hold."""
    batch, kv_heads, group, head_dim = q.shape

    def one_region(row: Array, head: Array) -> OnlineSoftmax:
        return attend_region(q[row, head], pool, row, head, OnlineSoftmax.empty(group, head_dim), DECODE_KEYS)

    return region_map(one_region, batch, kv_heads)
