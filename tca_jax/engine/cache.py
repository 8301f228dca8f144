"""The KV cache of one layer: pools of kept tokens and a ring of local ones.

Heads with different budgets cost what they keep: each (row, KV head) owns regions of the pools whose capacities its
cache policy names in advance, so shapes are static while lengths are data.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.layouts import CacheLayout
from tca_jax.engine.mesh import heads_of
from tca_jax.methods.base import Attended, CachePolicy, Method
from tca_jax.methods.pairs import causal_pairs
from tca_jax.methods.queries import last_queries
from tca_jax.methods.regions import Regions, Selected
from tca_jax.methods.sparse import selected_pairs, selection_for_prefill
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.decode_attention import decode_attention
from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.numerics import scaled_scores
from tca_jax.pallas_kernels.ranking import selection_mask


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(jax.tree_util.register_dataclass, data_fields=["pool", "growth", "ring"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
        pool: What the selection from the prompt keeps left of the window. Never written after prefill, so rows may
            share regions of it.
        growth: What is kept of the blocks that have left the window since, each row's own; None where nothing is.
        ring: The local tokens.
        layout: The static shape.
    """

    pool: Pool
    growth: Pool | None
    ring: Ring
    layout: CacheLayout

    def repeat_rows(self, times: int) -> LayerCache:
        """Every row `times` times, side by side: several answers to one prompt, which share its pool."""
        if times == 1:
            return self
        layout, growth = self.layout.repeat_rows(times), self.growth
        if growth is not None and layout.growth is not None:
            k, v = (self._repeat_growth(x, times) for x in (growth.k, growth.v))
            offsets = jnp.asarray(layout.growth.offsets, jnp.int32)
            growth = Pool(k, v, offsets, jnp.repeat(growth.lengths, times, axis=0))
        pool = self.pool._replace(
            offsets=jnp.repeat(self.pool.offsets, times, axis=0), lengths=jnp.repeat(self.pool.lengths, times, axis=0)
        )
        ring = Ring(*(jnp.repeat(x, times, axis=0) for x in self.ring))
        return LayerCache(pool, growth, ring, layout)

    def _repeat_growth(self, x: Float[Array, "P d"], times: int) -> Float[Array, "P d"]:
        rows = x.reshape(self.layout.batch, -1, x.shape[-1])
        return jnp.repeat(rows, times, axis=0).reshape(-1, x.shape[-1])

    def with_keys_and_values(self, k: Any, v: Any) -> LayerCache:
        """The same with other keys and values in its pool: arrays, shapes of such, or None instead."""
        return dataclasses.replace(self, pool=self.pool._replace(k=k, v=v))

    def with_growth(self, growth: Regions | None) -> LayerCache:
        """The same with other room for what leaves the window, in which nothing is yet."""
        empty = None if growth is None else growth.empty(self.ring.k.shape[-1], self.ring.k.dtype)
        return dataclasses.replace(self, growth=empty, layout=dataclasses.replace(self.layout, growth=growth))


def gather_pools(caches: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
    """The caches of all layers as loops and programs take and return them: what they share is there once.

    The keys and values of a shared pool are those of the last layer's cache; the first one's has them alone then. An
    array that a program returned for every layer would be copied as often.
    """
    if caches[0].layout.shared is None:
        return caches
    first, *others = caches
    return (first.with_keys_and_values(*caches[-1].pool[:2]), *(x.with_keys_and_values(None, None) for x in others))


def spread_pools(caches: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
    """The inverse of `gather_pools`: each layer's cache has the keys and values that it refers to."""
    if caches[0].layout.shared is None:
        return caches
    return tuple(cache.with_keys_and_values(*caches[0].pool[:2]) for cache in caches)


def prefill_layer(
    method: Method,
    layer: int,
    q: Float[Array, "B M Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    backend: Backend = "auto",
    *,
    tail: bool = False,
    before: LayerCache | None = None,
) -> tuple[Attended, LayerCache]:
    """Attention of a prompt, and the cache that decoding continues from.

    Args:
        method: Attention method.
        layer: The layer.
        q: Rotated queries of the whole prompt (M = L), or with `tail` of the last M positions.
        k: Rotated keys, `[B, L, H_kv, d]`; `v` the values.
        lengths: True prompt lengths, `[B]`, at least 1.
        layout: From `plan_layouts` with `prompt_tokens = L`.
        backend: Kernel backend.
        tail: Whether only the last query is answered, from the cache, where `tail_queries` allows it; those before are
            there for the selection to look at, and get zeros.
        before: The cache of the layer before, whose pool is written on where layers share one.

    Returns:
        Attention, its output `[B, M, H_q, d]` (zero past a length), and the cache. With `tail` the pairs are those that
        all queries of the prompt would have attended to, by what is selected for them.
    """
    policy, selected, readable = method.cache, None, None
    heads = heads_of(layout.shards, layer, k.shape[2])
    if layout.has_ranked_blocks:
        queries = last_queries(q, lengths, policy.num_queries) if not tail else q
        selection = policy.select(layer, heads, queries, k, v, lengths, backend)
        with jax.named_scope("select"):
            selected = layout.regions.fill(selection, k, v, block_size=layout.block_size, backend=backend)
        readable = selection_for_prefill(method, layer, heads, selection, selected, k, v, backend)
    pool = layout.regions.empty(k.shape[-1], k.dtype) if selected is None else selected.pool
    ring = Ring(*(_fill_ring(x, lengths, layout.ring_tokens) for x in (k, v)))
    if tail:
        with jax.named_scope("prefill_attention"):
            last = _attend_last(q[:, -1], ring, readable, lengths, layout, backend)
        out = Attended(jnp.zeros_like(q).at[:, -1].set(last), _selected_pairs(readable, lengths, layout))
    else:
        out = method.prefill.attend(layer, heads, q, k, v, lengths, readable, backend)
    # The rings are filled before the model goes on, and so is a shared pool. Left to itself the compiler puts that off
    # to the end, and keeps all layers' k and v until then: 17 GB at 131,072 tokens of LLaMA-3.1-8B. Nor do lists of
    # blocks stay for the sake of the pairs that they have.
    if layout.shared is None:
        out, ring = jax.lax.optimization_barrier((out, ring))
    else:
        pool = layout.shared.write(layout.regions, pool, None if before is None else before.pool)
        out, ring, pool = jax.lax.optimization_barrier((out, ring, pool))
    return out, LayerCache(pool, None, ring, layout).with_growth(layout.growth)


def tail_queries(method: Method, layer: int) -> int | None:
    """Last queries that a prefill needs of its last layer, or None where it needs all of them.

    Where prompt queries attend to what the cache keeps, the last of them can be answered from the cache, and nobody
    reads what the others would give.
    """
    from_cache = method.prefill_reads_cache and method.prefill.answers_from_cache(layer)
    return method.cache.num_queries if from_cache else None


def decode_layer(
    method: Method,
    layer: int,
    q: Float[Array, "B 1 Hq d"],
    k: Float[Array, "B 1 Hkv d"],
    v: Float[Array, "B 1 Hkv d"],
    cache: LayerCache,
    positions: Int[Array, " B"],
    leaving: Bool[Array, " B"] | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Array, "B 1 Hq d"], LayerCache]:
    """One decoding step: evicts the block that leaves the window, adds the new token, attends.

    Growth and ring are updated in place where the caller gives them away, as a loop or a donation does.

    Args:
        method: Attention method.
        layer: The layer.
        q: The new token's rotated query, `[B, 1, H_q, d]`; `k` and `v` likewise with H_kv heads.
        cache: The layer's cache.
        positions: Position of the new token, `[B]`.
        leaving: Rows in which a block leaves the window, from `rows_with_leaving_block`; None where there are none,
            which spares the work of looking for what to keep.
        backend: Kernel backend.

    Returns:
        Attention output `[B, 1, H_q, d]` and the cache with the token in it.
    """
    layout = cache.layout
    if leaving is not None and layout.evicts:
        with jax.named_scope("evict_block"):
            _, lse = attend_cache(q[:, 0], cache, positions - 1, backend)
            cache = evict_block(method.cache, layer, q[:, 0], k[:, 0], cache, positions, leaving, lse)
    slots = positions % layout.ring_tokens
    ring = Ring(*(_put(x, slots, new[:, 0]) for x, new in zip(cache.ring, (k, v), strict=True)))
    cache = dataclasses.replace(cache, ring=ring)
    with jax.named_scope("decode_attention"):
        out, _ = attend_cache(q[:, 0], cache, positions, backend)
    return out[:, None], cache


def rows_with_leaving_block(
    layout: CacheLayout, positions: Int[Array, " B"], prompt_lengths: Int[Array, " B"]
) -> Bool[Array, " B"]:
    """Rows in which the token at `positions` starts a block and so pushes the oldest block out of the window, `[B]`.

    Prefill has already dealt with the block that leaves when the very first new token starts a block.
    """
    return (positions % layout.block_size == 0) & (positions > layout.window) & (positions > prompt_lengths)


def attend_cache(
    q: Float[Array, "B Hq d"], cache: LayerCache, positions: Int[Array, " B"], backend: Backend
) -> tuple[Float[Array, "B Hq d"], Float32[Array, "B Hq"]]:
    """Attention of a token over pool, growth and ring, with the log-sum-exp."""
    layout = cache.layout
    return decode_attention(
        q,
        cache.pool,
        cache.ring,
        positions,
        growth=cache.growth,
        block_size=layout.block_size,
        window=layout.window,
        **region_capacities(layout),
        backend=backend,
    )


def region_capacities(layout: CacheLayout) -> dict[str, int]:
    """The largest capacities of a region, as `decode_attention` and `extend_attention` take them."""
    growth = 0 if layout.growth is None else max(layout.growth.capacities)
    return {"capacity": max(layout.regions.capacities), "growth_capacity": growth}


def _attend_last(
    q: Float[Array, "B Hq d"],
    ring: Ring,
    readable: Selected | None,
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    backend: Backend,
) -> Float[Array, "B Hq d"]:
    """Attention of each prompt's last query over its window and what prompt queries read left of it.

    The selection may hold a block more than is left of this query's window: the one that leaves before the next token.
    """
    if readable is None:  # the prompt fits its window
        pool, capacity = Regions.plan(layout.batch, (0,) * layout.num_kv_heads).empty(q.shape[-1], q.dtype), 0
    else:
        edge = jnp.maximum(0, (lengths - 1) // layout.block_size - layout.window // layout.block_size)
        left = jnp.arange(readable.budgets.shape[-1]) < edge[:, None, None]
        kept = jnp.sum(readable.budgets, axis=-1, where=left, dtype=jnp.int32)
        pool, capacity = readable.pool._replace(lengths=kept), readable.pool.k.shape[0]
        capacity = min(capacity, max(layout.regions.capacities))
    out, _ = decode_attention(
        q,
        pool,
        ring,
        lengths - 1,
        block_size=layout.block_size,
        window=layout.window,
        capacity=capacity,
        backend=backend,
    )
    return out


def _selected_pairs(readable: Selected | None, lengths: Int[Array, " B"], layout: CacheLayout) -> Float32[Array, " B"]:
    """Causal pairs of prompts whose queries attend to their windows and to what they read left of these."""
    if readable is None:  # the prompt fits its window
        return causal_pairs(lengths)
    sizes = {"block_size": layout.block_size, "window": layout.window}
    return selected_pairs(readable.budgets, lengths, **sizes).mean(axis=1)


def _put(
    x: Float[Array, "B Hkv R d"], slots: Int[Array, " B"], new: Float[Array, "B Hkv d"]
) -> Float[Array, "B Hkv R d"]:
    """A ring with a new entry in one slot of each row."""
    if x.shape[0] == 1:  # a scatter would read what is there to keep it if the slot were out of bounds: a kernel more
        return jax.lax.dynamic_update_slice_in_dim(x, new[:, :, None], slots[0], axis=2)
    return x.at[jnp.arange(x.shape[0]), :, slots].set(new)


def _fill_ring(x: Float[Array, "B L Hkv d"], lengths: Int[Array, " B"], ring_tokens: int) -> Float[Array, "B Hkv R d"]:
    """The last tokens of each row, token p in slot p mod R. Slots that no local token owns hold other tokens of the
    prompt; attention knows from the position which slots count."""
    slots = jnp.arange(ring_tokens)
    last = lengths[:, None] - 1
    positions = last - (last - slots) % ring_tokens  # [B, R], negative where the row is shorter than the ring
    positions = jnp.maximum(positions, 0)
    return jnp.take_along_axis(x, positions[:, :, None, None], axis=1).transpose(0, 2, 1, 3)


def evict_block(
    policy: CachePolicy,
    layer: int,
    q: Float[Array, "B Hq d"],
    k_new: Float[Array, "B Hkv d"],
    cache: LayerCache,
    positions: Int[Array, " B"],
    leaving: Bool[Array, " B"],
    lse_before: Float32[Array, "B Hq"],
) -> LayerCache:
    """Moves what the policy keeps of the leaving block from the ring to the growth, in rows where one leaves.

    The policy sees the current query's attention probabilities over all that it can see at this step: what is kept, the
    ring with the leaving block still in it, and itself.

    Args:
        policy: Cache policy.
        layer: The layer.
        q: Query of the token that starts a block.
        k_new: Its key.
        cache: The layer's cache, without that token.
        positions: The token's position; a multiple of b in rows where a block leaves.
        leaving: Those rows.
        lse_before: Log-sum-exp of the query over what the token before it sees, the leaving block included.
    """
    layout, growth, regions = cache.layout, cache.growth, cache.layout.growth
    if growth is None or regions is None:
        return cache  # nothing is ever kept
    b, ring = layout.block_size, layout.ring_tokens
    batch, heads, _, head_dim = cache.ring.k.shape
    queries = q.reshape(batch, heads, -1, head_dim)
    own = scaled_scores("bhgd,bhd->bhg", queries, k_new)
    lse = jnp.logaddexp(lse_before.reshape(own.shape), own)

    # Block-aligned and one ring behind: the leaving block starts in the slot that the new token is about to take.
    slots = (positions % ring // b * b)[:, None] + jnp.arange(b)
    k_block, v_block = (jnp.take_along_axis(x, slots[:, None, :, None], axis=2) for x in cache.ring)
    attention = jnp.exp(scaled_scores("bhgd,bhtd->bhgt", queries, k_block) - lse[..., None])  # [B, H_kv, G, b]

    blocks = positions // b - layout.window // b - 1
    selection = policy.evict(layer, heads_of(layout.shards, layer, heads), attention, blocks)
    budgets = jnp.where(leaving[:, None, None], selection.budgets, 0)
    chosen = selection_mask(selection.scores, budgets, block_size=b)
    slot = growth.lengths[..., None] + jnp.cumsum(chosen, axis=-1) - 1
    # A region that is full takes nothing more; its policy has named too small a growth.
    chosen &= slot < jnp.asarray(regions.capacities, jnp.int32)[:, None]
    place = jnp.where(chosen, growth.offsets[..., None] + slot, regions.pool_tokens)  # out of range: dropped
    growth = growth._replace(
        k=growth.k.at[place].set(k_block, mode="drop"),
        v=growth.v.at[place].set(v_block, mode="drop"),
        lengths=growth.lengths + jnp.sum(chosen, axis=-1, dtype=jnp.int32),
    )
    return dataclasses.replace(cache, growth=growth)
