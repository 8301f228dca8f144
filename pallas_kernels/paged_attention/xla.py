"""Paged attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.kv import Pages, decode
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, varying_like
from tca_jax.pallas_kernels.online_softmax import OnlineSoftmax
from tca_jax.pallas_kernels.tiles import tile_map

_TOKENS = 1024  # that are taken at once


@partial(jax.jit, static_argnames=("window",))
@jax.named_scope("paged_attention")
def paged_attention(
    q: Array, caches: tuple[Pages, ...], first: Array, newest: Array, *, window: int
) -> tuple[Array, Array]:
    """One online softmax a head, over kept tokens, then local ones; see `paged_attention.paged_attention`."""
    caches = tuple(cache.sliced() for cache in caches)
    batch, columns, q_heads, head_dim = q.shape
    kv_heads = caches[0].table.shape[1]
    group = q_heads // kv_heads
    grouped = q.reshape(batch, columns, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)

    def one_region(index: Array) -> tuple[Array, Array]:
        row, head = jnp.divmod(index, kv_heads)
        queries = grouped[row, head].reshape(-1, head_dim)
        positions = jnp.repeat(first[row] + jnp.arange(columns), group)
        state = OnlineSoftmax.empty(*queries.shape)
        for cache in caches:
            own = row // (batch // cache.table.shape[0])
            state = _attend_pages(queries, positions, cache, own, head, newest[row], window, state)
        asked = positions <= newest[row]
        out = jnp.where(asked[:, None], state.attention(), 0)
        return out, jnp.where(asked, state.log_sum_exp(), MASKED)

    # A CPU takes one region at a time, each at the cost of its own tokens; any other device all at once.
    regions = batch * kv_heads
    out, lse = tile_map(one_region, regions, 1 if jax.default_backend() == "cpu" else regions)
    out = out.reshape(grouped.shape).transpose(0, 2, 1, 3, 4).reshape(q.shape)
    lse = lse.reshape(grouped.shape[:-1]).transpose(0, 2, 1, 3).reshape(q.shape[:3])
    return out.astype(q.dtype), lse


def _attend_pages(
    queries: Float[Array, "R d"],
    positions: Int[Array, " R"],
    cache: Pages,
    row: Array,
    head: Array,
    newest: Array,
    window: int,
    state: OnlineSoftmax,
) -> OnlineSoftmax:
    """Takes the pages of a row and KV head through the softmax: those of kept tokens, then those of the window."""
    b, c, kept = cache.page_size, cache.kept_columns, cache.kept[row, head]
    start, end = cache.start[row], jnp.minimum(cache.end[row], newest + 1)
    edge = jnp.maximum(start, jnp.maximum(newest, 0) // b * b - window)
    asked = newest >= positions[0]
    kept_pages = jnp.where(asked, divide_up(kept, b), 0)
    local_pages = jnp.where(asked, divide_up(jnp.maximum(end - edge, 0), b), 0)
    at_once = min(max(1, _TOKENS // b), cache.table.shape[-1])

    def step(i: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        number = i * at_once + jnp.arange(at_once)  # of the region's pages
        is_kept = (number < kept_pages)[:, None]
        column = jnp.where(is_kept[:, 0], number, c + (edge - start) // b + number - kept_pages)
        pages = cache.table[row, head].at[column].get(mode="clip")
        found = jax.tree.map(lambda x: x.at[pages].get(mode="clip"), (cache.k, cache.v))
        k, v = (decode(x, queries.dtype).reshape(-1, x.shape[-1]) for x in found)
        slots = jnp.arange(b)
        token = jnp.where(is_kept, number[:, None] * b, edge + (number[:, None] - kept_pages) * b) + slots
        limit = jnp.where(is_kept, kept, jnp.minimum(end, positions[:, None, None] + 1))
        seen = (token < limit) & (number < kept_pages + local_pages)[:, None]
        seen = seen.reshape(len(positions), -1)
        scores = scaled_scores("rd,kd->rk", queries, k)
        if cache.bias is not None:
            of_kept = cache.bias[row, head].at[token.reshape(-1)].get(mode="clip")
            scores += jnp.where(jnp.repeat(is_kept[:, 0], b), of_kept, 0)
        v = jnp.where(seen.any(axis=0)[:, None], v, 0)  # slots that no token fills may hold anything
        return state.attend(scores, seen, v)

    trips = divide_up(kept_pages + local_pages, at_once)  # dynamic: unequal heads cost what they hold
    return jax.lax.fori_loop(0, trips, step, varying_like(state, queries, positions, cache, newest))
