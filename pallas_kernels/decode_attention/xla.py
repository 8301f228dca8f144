"""Decode attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.online_softmax import KeyValues, OnlineSoftmax, Span, attend_span
from tca_jax.pallas_kernels.tiles import tile_map

#: Keys of a tile of a region.
DECODE_KEYS = 1024


@partial(jax.jit, static_argnames=("block_size", "window", "capacity"))
@jax.named_scope("decode_attention")
def decode_attention(
    q: Float[Array, "B Hq d"],
    pool: Pool,
    ring: Ring,
    positions: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    capacity: int,
) -> tuple[Float[Array, "B Hq d"], Float32[Array, "B Hq"]]:
    """One softmax over ring and region; see `decode_attention.decode_attention`."""
    batch, kv_heads, slots, head_dim = ring.k.shape
    grouped = q.reshape(batch, kv_heads, -1, head_dim)
    edge = jnp.maximum(0, positions // block_size * block_size - window)
    local = ring_positions(positions, slots) >= edge[:, None]  # [B, R]
    state = _attend_ring(grouped, ring, local)
    if capacity:
        state = state.merge(_attend_pool(grouped, pool))
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
    pooled = KeyValues(pool.k, pool.v)

    def one_region(index: Array) -> OnlineSoftmax:
        row, head = jnp.divmod(index, kv_heads)
        length = jnp.broadcast_to(pool.lengths[row, head], group)
        span = Span(pool.offsets[row, head], jnp.int32(0), pool.lengths[row, head], jnp.zeros_like(length), length)
        return attend_span(q[row, head], pooled, span, OnlineSoftmax.empty(group, head_dim), DECODE_KEYS)

    parallel = 1 if jax.default_backend() == "cpu" else batch * kv_heads
    state = tile_map(one_region, batch * kv_heads, parallel)
    return jax.tree.map(lambda part: part.reshape(batch, kv_heads, *part.shape[1:]), state)
