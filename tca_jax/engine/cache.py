"""The KV cache of one layer: a flat pool of kept tokens and a ring of local ones.

Heads with different budgets cost what they keep: each (row, KV head) owns a region of the pool whose capacity its cache
policy names in advance, so shapes are static while lengths are data.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.methods.base import CachePolicy, Method, per_head
from tca_jax.methods.blocks import num_ranked_blocks
from tca_jax.methods.queries import last_queries
from tca_jax.methods.regions import Regions, Selected
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.decode_attention import decode_attention
from tca_jax.pallas_kernels.integers import round_up
from tca_jax.pallas_kernels.kv import Pool, Ring
from tca_jax.pallas_kernels.numerics import scaled_scores
from tca_jax.pallas_kernels.ranking import selection_mask


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static shape of one layer's cache: everything that follows from the method and sizes, before any data.

    Attributes:
        block_size: Tokens in a block, b.
        window: Least number of local tokens, w, a multiple of b.
        prompt_tokens: Padded prompt length, L.
        ring_tokens: Slots of the ring, R: w + b, or less when prompt and answer are shorter.
        regions: Regions of the pool.
    """

    block_size: int
    window: int
    prompt_tokens: int
    ring_tokens: int
    regions: Regions

    @classmethod
    def plan(
        cls, policy: CachePolicy, layer: int, num_kv_heads: int, batch: int, prompt_tokens: int, new_tokens: int
    ) -> CacheLayout:
        """Sizes a layer's cache for prompts of up to `prompt_tokens` and answers of up to `new_tokens`.

        Raises:
            ValueError: the policy names no capacity for each KV head, ranks other blocks than those left of its
                window, or the pool is too large to be addressed.
        """
        b, total = policy.block_size, prompt_tokens + new_tokens
        window = policy.local_window(total)
        if num_ranked_blocks(prompt_tokens, b, window) != policy.num_ranked_blocks(prompt_tokens):
            raise ValueError(
                f"{type(policy).__name__}.local_window({total}) = {window}, but its num_ranked_blocks({prompt_tokens}) "
                f"is {policy.num_ranked_blocks(prompt_tokens)}: blocks must be ranked exactly left of the window"
            )
        capacities = policy.capacities(layer, prompt_tokens, new_tokens)
        name = f"{type(policy).__name__}.capacities({layer}, {prompt_tokens}, {new_tokens})"
        return cls(
            block_size=b,
            window=window,
            prompt_tokens=prompt_tokens,
            ring_tokens=min(window + b, round_up(total, b)),
            regions=Regions.plan(batch, per_head(capacities, num_kv_heads, name)),
        )

    @property
    def batch(self) -> int:
        """Rows, B."""
        return self.regions.batch

    @property
    def num_kv_heads(self) -> int:
        """KV heads, H_kv."""
        return len(self.regions.capacities)

    @property
    def ranks(self) -> bool:
        """Whether a prompt of this shape can have ranked blocks; otherwise it fits its window."""
        return num_ranked_blocks(self.prompt_tokens, self.block_size, self.window) > 0

    @property
    def evicts(self) -> bool:
        """Whether a block can leave the window while decoding; otherwise everything fits the ring."""
        return self.ring_tokens == self.window + self.block_size

    def num_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of K and V together, pool and ring."""
        ring = self.batch * self.num_kv_heads * self.ring_tokens
        return 2 * (self.regions.pool_tokens + ring) * head_dim * jnp.dtype(dtype).itemsize

    def local_tokens(self, fed: Int[np.ndarray, " B"], *, decoded: bool) -> Int[np.ndarray, " B"]:
        """Tokens in the window after `fed` of them; behind a bare prompt it is already the next token's window."""
        last = fed - 1 if decoded else fed
        return fed - np.maximum(0, last // self.block_size * self.block_size - self.window)


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(jax.tree_util.register_dataclass, data_fields=["pool", "ring"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
        pool: What is kept left of the window.
        ring: The local tokens.
        layout: The static shape.
    """

    pool: Pool
    ring: Ring
    layout: CacheLayout

    def repeat_rows(self, times: int) -> LayerCache:
        """Every row `times` times, side by side: several answers to one prompt."""
        regions = dataclasses.replace(self.layout.regions, batch=self.layout.batch * times)

        def repeat_pool(x: Float[Array, "P d"]) -> Float[Array, "P d"]:
            if not regions.row_tokens:
                return x
            rows = x.reshape(self.layout.batch, regions.row_tokens, x.shape[-1])
            return jnp.repeat(rows, times, axis=0).reshape(-1, x.shape[-1])

        pool = Pool(
            repeat_pool(self.pool.k),
            repeat_pool(self.pool.v),
            jnp.asarray(regions.offsets, jnp.int32),
            jnp.repeat(self.pool.lengths, times, axis=0),
        )
        ring = Ring(*(jnp.repeat(x, times, axis=0) for x in self.ring))
        return LayerCache(pool, ring, dataclasses.replace(self.layout, regions=regions))


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
) -> tuple[Float[Array, "B M Hq d"], LayerCache]:
    """Attention of a prompt, and the cache that decoding continues from.

    Args:
        method: Attention method.
        layer: The layer.
        q: Rotated queries of the whole prompt (M = L), or with `tail` of the last M positions.
        k: Rotated keys, `[B, L, H_kv, d]`; `v` the values.
        lengths: True prompt lengths, `[B]`, at least 1.
        layout: From `CacheLayout.plan` with `prompt_tokens = L`.
        backend: Kernel backend.
        tail: Whether only the last query is answered, from the cache, where `tail_queries` allows it; those before are
            there for the selection to look at, and get zeros.

    Returns:
        Attention output `[B, M, H_q, d]` (zero past a length) and the cache.
    """
    policy, selected = method.cache, None
    if layout.ranks:
        queries = last_queries(q, lengths, policy.num_queries) if not tail else q
        selection = policy.select(layer, queries, k, v, lengths, backend)
        with jax.named_scope("select"):
            selected = layout.regions.fill(selection, k, v, block_size=layout.block_size, backend=backend)
    pool = layout.regions.empty(k.shape[-1], k.dtype) if selected is None else selected.pool
    ring = Ring(*(_fill_ring(x, lengths, layout.ring_tokens) for x in (k, v)))
    if tail:
        with jax.named_scope("prefill_attention"):
            last = _attend_last(q[:, -1], pool, ring, selected, lengths, layout, backend)
        out = jnp.zeros_like(q).at[:, -1].set(last)
    else:
        readable = selected if method.prefill_reads_cache else None
        out = method.prefill.attend(layer, q, k, v, lengths, readable, backend)
    # The rings are filled before the model goes on. Left to itself the compiler puts that off to the end, and keeps all
    # layers' k and v until then: 17 GB at 131,072 tokens of LLaMA-3.1-8B.
    out, ring = jax.lax.optimization_barrier((out, ring))
    return out, LayerCache(pool, ring, layout)


def tail_queries(method: Method) -> int | None:
    """Last queries that a prefill's last layer needs, or None where it needs all of them.

    Where prompt queries attend to what the cache keeps, the last of them can be answered from the cache, and nobody
    reads what the others would give.
    """
    return method.cache.num_queries if method.prefill_reads_cache else None


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

    The pool and the ring are updated in place where the caller gives them away, as a loop or a donation does.

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
            cache = _evict_block(method.cache, layer, q[:, 0], k[:, 0], cache, positions, leaving, backend)
    rows, slots = jnp.arange(layout.batch), positions % layout.ring_tokens
    ring = Ring(*(x.at[rows, :, slots].set(new[:, 0]) for x, new in zip(cache.ring, (k, v), strict=True)))
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
    """Attention of a token over pool and ring, with the log-sum-exp."""
    layout = cache.layout
    return decode_attention(
        q,
        cache.pool,
        cache.ring,
        positions,
        block_size=layout.block_size,
        window=layout.window,
        capacity=max(layout.regions.capacities),
        backend=backend,
    )


def _attend_last(
    q: Float[Array, "B Hq d"],
    pool: Pool,
    ring: Ring,
    selected: Selected | None,
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    backend: Backend,
) -> Float[Array, "B Hq d"]:
    """Attention of each prompt's last query, from the cache.

    The pool may hold a block more than is left of this query's window: the one that leaves before the next token.
    """
    if selected is not None:
        edge = jnp.maximum(0, (lengths - 1) // layout.block_size - layout.window // layout.block_size)
        left = jnp.arange(selected.budgets.shape[-1]) < edge[:, None, None]
        pool = pool._replace(lengths=jnp.sum(selected.budgets, axis=-1, where=left, dtype=jnp.int32))
    out, _ = attend_cache(q, LayerCache(pool, ring, layout), lengths - 1, backend)
    return out


def _fill_ring(x: Float[Array, "B L Hkv d"], lengths: Int[Array, " B"], ring_tokens: int) -> Float[Array, "B Hkv R d"]:
    """The last tokens of each row, token p in slot p mod R. Slots that no local token owns hold other tokens of the
    prompt; attention knows from the position which slots count."""
    slots = jnp.arange(ring_tokens)
    last = lengths[:, None] - 1
    positions = last - (last - slots) % ring_tokens  # [B, R], negative where the row is shorter than the ring
    positions = jnp.maximum(positions, 0)
    return jnp.take_along_axis(x, positions[:, :, None, None], axis=1).transpose(0, 2, 1, 3)


def _evict_block(
    policy: CachePolicy,
    layer: int,
    q: Float[Array, "B Hq d"],
    k_new: Float[Array, "B Hkv d"],
    cache: LayerCache,
    positions: Int[Array, " B"],
    leaving: Bool[Array, " B"],
    backend: Backend,
) -> LayerCache:
    """Moves what the policy keeps of the leaving block from the ring to the pool, in rows where one leaves.

    The policy sees the current query's attention probabilities over all that it can see at this step: the pool, the
    ring with the leaving block still in it, and itself.
    """
    layout, pool = cache.layout, cache.pool
    b, ring = layout.block_size, layout.ring_tokens
    batch, heads, _, head_dim = cache.ring.k.shape
    queries = q.reshape(batch, heads, -1, head_dim)
    # The ring as the previous token saw it still has the leaving block as its oldest.
    _, lse_before = attend_cache(q, cache, positions - 1, backend)
    own = scaled_scores("bhgd,bhd->bhg", queries, k_new)
    lse = jnp.logaddexp(lse_before.reshape(own.shape), own)

    # Block-aligned and one ring behind: the leaving block starts in the slot that the new token is about to take.
    slots = (positions % ring // b * b)[:, None] + jnp.arange(b)
    k_block, v_block = (jnp.take_along_axis(x, slots[:, None, :, None], axis=2) for x in cache.ring)
    attention = jnp.exp(scaled_scores("bhgd,bhtd->bhgt", queries, k_block) - lse[..., None])  # [B, H_kv, G, b]

    selection = policy.evict(layer, attention, positions // b - layout.window // b - 1)
    budgets = jnp.where(leaving[:, None, None], selection.budgets, 0)
    chosen = selection_mask(selection.scores, budgets, block_size=b)
    slot = pool.lengths[..., None] + jnp.cumsum(chosen, axis=-1) - 1
    # A region that is full takes nothing more; its policy has named too small a capacity.
    chosen &= slot < jnp.asarray(layout.regions.capacities, jnp.int32)[:, None]
    place = jnp.where(chosen, pool.offsets[..., None] + slot, layout.regions.pool_tokens)  # out of range: dropped
    pool = pool._replace(
        k=pool.k.at[place].set(k_block, mode="drop"),
        v=pool.v.at[place].set(v_block, mode="drop"),
        lengths=pool.lengths + jnp.sum(chosen, axis=-1, dtype=jnp.int32),
    )
    return dataclasses.replace(cache, pool=pool)
