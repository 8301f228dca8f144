"""Extend attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from tca_jax.pallas_kernels.kv import Pool, Ring, held_pools
from tca_jax.pallas_kernels.numerics import MASKED
from tca_jax.pallas_kernels.online_softmax import KeyValues, OnlineSoftmax, Span, attend_region, attend_span
from tca_jax.pallas_kernels.tiles import region_map

#: Keys of a tile.
EXTEND_KEYS = 512


@partial(jax.jit, static_argnames=("block_size", "window", "capacity", "growth_capacity"))
@jax.named_scope("extend_attention")
def extend_attention(
    q: Float[Array, "B m Hq d"],
    pool: Pool,
    ring: Ring,
    first: Int[Array, " B"],
    newest: Int[Array, " B"],
    *,
    growth: Pool | None = None,
    block_size: int,
    window: int,
    capacity: int,
    growth_capacity: int = 0,
) -> tuple[Float[Array, "B m Hq d"], Float32[Array, "B m Hq"]]:
    """One online softmax a head, over its regions, then its local tokens; see `extend_attention.extend_attention`."""
    batch, kv_heads, slots, head_dim = ring.k.shape
    columns, q_heads = q.shape[1:3]
    group = q_heads // kv_heads
    grouped = q.reshape(batch, columns, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    positions = first[:, None] + jnp.arange(columns)
    asked = first <= newest  # whether a row has any query
    pools = [
        held._replace(lengths=jnp.where(asked[:, None], held.lengths, 0))
        for held in held_pools(pool, capacity, growth, growth_capacity)
    ]
    edges = jnp.maximum(jnp.maximum(newest // block_size * block_size - window, newest - slots + 1), 0)
    ends = jnp.where(asked, newest + 1, 0)
    local = KeyValues(ring.k.reshape(-1, head_dim), ring.v.reshape(-1, head_dim))

    def one_region(row: Array, head: Array) -> tuple[Array, Array]:
        queries = grouped[row, head].reshape(-1, head_dim)
        state = OnlineSoftmax.empty(*queries.shape)
        for held in pools:
            state = attend_region(queries, held, row, head, state, EXTEND_KEYS)
        visible = jnp.repeat(positions[row] + 1, group)
        for span in _ring_spans((row * kv_heads + head) * slots, slots, edges[row], ends[row], visible):
            state = attend_span(queries, local, span, state, EXTEND_KEYS)
        return state.attention(), state.log_sum_exp()

    out, lse = region_map(one_region, batch, kv_heads)
    out = out.reshape(grouped.shape).transpose(0, 2, 1, 3, 4).reshape(q.shape)
    lse = lse.reshape(grouped.shape[:-1]).transpose(0, 2, 1, 3).reshape(q.shape[:3])
    real = (positions <= newest[:, None])[..., None]
    return jnp.where(real[..., None], out, 0).astype(q.dtype), jnp.where(real, lse, MASKED)


def _ring_spans(base: Array, slots: int, edge: Array, end: Array, visible: Int[Array, " R"]) -> tuple[Span, Span]:
    """Positions [edge, end) in a ring that begins at row `base`, older ones first; query r sees those below visible[r].

    The positions from a multiple of the ring's slots on lie at its beginning, those before at its end.
    """
    turn = jnp.maximum(end - 1, 0) // slots * slots
    lower = jnp.zeros_like(visible)
    return (
        Span(base + slots - turn, edge, jnp.minimum(turn, end), lower, visible),
        Span(base - turn, jnp.maximum(edge, turn), end, lower, visible),
    )
