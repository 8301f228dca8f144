"""The KV cache of one layer: a flat pool of selected tokens and a ring of local ones (DESIGN section 5).

Heads with different budgets cost what they keep: each (row, KV head) owns a region of the pool whose capacity is
known from its candidate alone, so shapes are static while lengths are data.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tca_jax.methods.candidates import eviction_budgets, region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import head_budgets, last_query
from tca_jax.pallas_kernels.backends import Backend, whole
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.decode_attention import decode_attention
from tca_jax.pallas_kernels.integers import round_up
from tca_jax.pallas_kernels.kv import REGION_ALIGNMENT, Pool, Ring
from tca_jax.pallas_kernels.numerics import scaled_scores
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.ranking import selection_mask
from tca_jax.pallas_kernels.select_tokens import select_tokens
from tca_jax.pallas_kernels.token_scores import token_scores


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Static shape of one layer's cache: everything that follows from candidates and sizes, before any data.

    Attributes:
        config: The method's hyperparameters.
        candidates: Row of `candidate_budgets` for each KV head, `[H_kv]`.
        batch: Rows, B.
        prompt_tokens: Padded prompt length, L.
        ring_tokens: Slots of the ring, R: w + b, or less when prompt and answer are shorter.
        capacities: Tokens that each head's region can hold, `[H_kv]`, multiples of 128.
    """

    config: TCAConfig
    candidates: tuple[int, ...]
    batch: int
    prompt_tokens: int
    ring_tokens: int
    capacities: tuple[int, ...]

    @classmethod
    def plan(
        cls, config: TCAConfig, candidates: tuple[int, ...], batch: int, prompt_tokens: int, max_new_tokens: int
    ) -> CacheLayout:
        """Sizes a layer's cache for prompts of up to `prompt_tokens` and answers of up to `max_new_tokens`."""
        b, total = config.block_size, prompt_tokens + max_new_tokens
        ranked = config.num_ranked_blocks(prompt_tokens)
        # Blocks that can leave the window while decoding: the last sampled token is never fed back, hence the -1.
        evicted = min(-(-(max_new_tokens - 1) // b), config.num_ranked_blocks(total - 1))
        growth = eviction_budgets(config)
        capacities = tuple(
            round_up(region_capacity(config, row, ranked) + evicted * int(growth[row]), REGION_ALIGNMENT)
            for row in candidates
        )
        layout = cls(
            config=config,
            candidates=candidates,
            batch=batch,
            prompt_tokens=prompt_tokens,
            ring_tokens=min(config.window + b, round_up(total, b)),
            capacities=capacities,
        )
        if layout.pool_tokens >= 2**31:
            raise ValueError(
                f"a batch of {batch} prompts of {prompt_tokens} tokens needs a KV pool of {layout.pool_tokens} tokens "
                f"a layer: at most {2**31 - 1} can be addressed; use a smaller batch"
            )
        return layout

    @property
    def offsets(self) -> np.ndarray:
        """First pool token of each region, int64 `[B, H_kv]`."""
        starts = np.concatenate([[0], np.cumsum(np.tile(np.asarray(self.capacities, np.int64), self.batch))])
        return starts[:-1].reshape(self.batch, len(self.capacities))

    @property
    def evicts(self) -> bool:
        """Whether a block can leave the window while decoding; otherwise everything fits the ring."""
        return self.ring_tokens == self.config.window + self.config.block_size

    @property
    def pool_tokens(self) -> int:
        """Tokens of the flat pool, at least one aligned region so that empty pools have an address."""
        return max(REGION_ALIGNMENT, self.batch * sum(self.capacities))

    def num_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of K and V together, pool and ring."""
        ring = self.batch * len(self.candidates) * self.ring_tokens
        return 2 * (self.pool_tokens + ring) * head_dim * jnp.dtype(dtype).itemsize


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k_pool", "v_pool", "offsets", "kept", "k_ring", "v_ring"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values.

    Attributes:
        k_pool: Selected keys of all regions, `[P, d]`; `v_pool` the values.
        offsets: First pool token of each region, int32 `[B, H_kv]`.
        kept: Tokens in each region, int32 `[B, H_kv]`.
        k_ring: Local keys, `[B, H_kv, R, d]`: position p lies in slot p mod R; `v_ring` the values.
        layout: The static shape.
    """

    k_pool: Float[Array, "P d"]
    v_pool: Float[Array, "P d"]
    offsets: Int[Array, "B Hkv"]
    kept: Int[Array, "B Hkv"]
    k_ring: Float[Array, "B Hkv R d"]
    v_ring: Float[Array, "B Hkv R d"]
    layout: CacheLayout


def prefill_layer(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    layout: CacheLayout,
    backend: str = "auto",
) -> tuple[Float[Array, "B L Hq d"], LayerCache]:
    """Attention of a prompt and the cache that decoding continues from: selection, then prefix and window.

    Args:
        q: Rotated queries, `[B, L, H_q, d]`.
        k: Rotated keys, `[B, L, H_kv, d]`; `v` the values.
        lengths: True prompt lengths, `[B]`, at least 1.
        layout: From `CacheLayout.plan` with `prompt_tokens = L`.
        backend: Kernel backend.

    Returns:
        Attention output `[B, L, H_q, d]` (zero past a length) and the cache.
    """
    config, (batch, tokens, _, head_dim) = layout.config, k.shape
    b, preferred = config.block_size, whole(backend)
    offsets = jnp.asarray(layout.offsets, jnp.int32)
    if config.num_ranked_blocks(tokens):
        with jax.named_scope("token_scores"):
            scored = token_scores(last_query(q, lengths), k, lengths, block_size=b, backend=preferred)
        with jax.named_scope("select"):
            budgets = head_budgets(scored, jnp.asarray(layout.candidates, jnp.int32), lengths, config)
            pool = select_tokens(
                scored.scores,
                budgets,
                k,
                v,
                offsets,
                block_size=b,
                pool_tokens=layout.pool_tokens,
                backend=preferred,
            )
        with jax.named_scope("prefill_attention"):
            out = prefill_attention(
                q,
                k,
                v,
                pool,
                budgets,
                lengths,
                block_size=b,
                window=config.window,
                backend=preferred,
            )
    else:  # Every prompt of this shape fits its window: exact attention, nothing to select. From there on TCA pays: on
        # an H200 a model's time to first token is full attention's at 4,608 tokens (benchmarks/results/crossover.md).
        nothing = jnp.zeros((layout.pool_tokens, head_dim), k.dtype)
        pool = Pool(nothing, nothing, offsets, jnp.zeros((batch, k.shape[2]), jnp.int32))
        out = causal_attention(q, k, v, lengths, backend=preferred)
    k_ring, v_ring = (_fill_ring(x, lengths, layout.ring_tokens) for x in (k, v))
    # The rings are filled before the model goes on. Left to itself the compiler puts that off to the end, and keeps all
    # layers' k and v until then: 17 GB at 131,072 tokens of LLaMA-3.1-8B.
    out, k_ring, v_ring = jax.lax.optimization_barrier((out, k_ring, v_ring))
    return out, LayerCache(pool.k, pool.v, offsets, pool.lengths, k_ring, v_ring, layout)


def decode_layer(
    q: Float[Array, "B 1 Hq d"],
    k: Float[Array, "B 1 Hkv d"],
    v: Float[Array, "B 1 Hkv d"],
    cache: LayerCache,
    positions: Int[Array, " B"],
    leaving: Bool[Array, " B"] | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "B 1 Hq d"], LayerCache]:
    """One decoding step: evicts the block that leaves the window, adds the new token, attends (DESIGN section 2).

    The pool and the ring are updated in place where the caller gives them away, as a loop or a donation does.

    Args:
        q: The new token's rotated query, `[B, 1, H_q, d]`; `k` and `v` likewise with H_kv heads.
        cache: The layer's cache.
        positions: Position of the new token, `[B]`.
        leaving: Rows in which a block leaves the window, from `rows_with_leaving_block`; None where there are none,
            which spares the work of looking for what to keep.
        backend: Kernel backend.

    Returns:
        Attention output `[B, 1, H_q, d]` and the cache with the token in it.
    """
    layout, preferred = cache.layout, whole(backend)
    if leaving is not None and layout.evicts:
        with jax.named_scope("evict_block"):
            cache = _evict_block(q[:, 0], k[:, 0], cache, positions, leaving, preferred)
    rows, slots = jnp.arange(layout.batch), positions % layout.ring_tokens
    cache = dataclasses.replace(
        cache,
        k_ring=cache.k_ring.at[rows, :, slots].set(k[:, 0]),
        v_ring=cache.v_ring.at[rows, :, slots].set(v[:, 0]),
    )
    with jax.named_scope("decode_attention"):
        out, _ = attend_cache(q[:, 0], cache, positions, preferred)
    return out[:, None], cache


def rows_with_leaving_block(
    config: TCAConfig, positions: Int[Array, " B"], prompt_lengths: Int[Array, " B"]
) -> Bool[Array, " B"]:
    """Rows in which the token at `positions` starts a block and so pushes the oldest block out of the window, `[B]`.

    Prefill has already dealt with the block that leaves when the very first new token starts a block.
    """
    return (positions % config.block_size == 0) & (positions > config.window) & (positions > prompt_lengths)


def attend_cache(
    q: Float[Array, "B Hq d"], cache: LayerCache, positions: Int[Array, " B"], backend: Backend
) -> tuple[Float[Array, "B Hq d"], Float[Array, "B Hq"]]:
    """Attention of a token over pool and ring, with the log-sum-exp; `backend` is `decode_attention`'s own."""
    layout = cache.layout
    return decode_attention(
        q,
        Pool(cache.k_pool, cache.v_pool, cache.offsets, cache.kept),
        Ring(cache.k_ring, cache.v_ring),
        positions,
        block_size=layout.config.block_size,
        window=layout.config.window,
        capacity=max(layout.capacities),
        backend=backend,
    )


def _fill_ring(x: Float[Array, "B L Hkv d"], lengths: Int[Array, " B"], ring_tokens: int) -> Float[Array, "B Hkv R d"]:
    """The last tokens of each row, token p in slot p mod R. Slots that no local token owns hold other tokens of the
    prompt; attention knows from the position which slots count."""
    slots = jnp.arange(ring_tokens)
    last = lengths[:, None] - 1
    positions = last - (last - slots) % ring_tokens  # [B, R], negative where the row is shorter than the ring
    positions = jnp.maximum(positions, 0)
    return jnp.take_along_axis(x, positions[:, :, None, None], axis=1).transpose(0, 2, 1, 3)


def _evict_block(
    q: Float[Array, "B Hq d"],
    k_new: Float[Array, "B Hkv d"],
    cache: LayerCache,
    positions: Int[Array, " B"],
    leaving: Bool[Array, " B"],
    backend: Backend,
) -> LayerCache:
    """Moves the best tokens of the block that leaves the window from the ring to the pool, in rows where one does.

    Its tokens are scored by the current query's attention probabilities over all it can see at this step: the pool,
    the ring with the leaving block still in it, and itself.
    """
    layout = cache.layout
    b, ring = layout.config.block_size, layout.ring_tokens
    batch, heads, _, head_dim = cache.k_ring.shape
    queries = q.reshape(batch, heads, -1, head_dim)
    # The ring as the previous token saw it still has the leaving block as its oldest.
    _, lse_before = attend_cache(q, cache, positions - 1, backend)
    own = scaled_scores("bhgd,bhd->bhg", queries, k_new)
    lse = jnp.logaddexp(lse_before.reshape(own.shape), own)

    # Block-aligned and one ring behind: the leaving block starts in the slot that the new token is about to take.
    slots = (positions % ring // b * b)[:, None] + jnp.arange(b)
    k_block, v_block = (jnp.take_along_axis(x, slots[:, None, :, None], axis=2) for x in (cache.k_ring, cache.v_ring))
    scores = jnp.exp(scaled_scores("bhgd,bhtd->bhgt", queries, k_block) - lse[..., None]).mean(axis=2)  # [B, H_kv, b]

    budgets = eviction_budgets(layout.config)[np.asarray(layout.candidates)]
    budgets = jnp.where(leaving[:, None], jnp.asarray(budgets, jnp.int32), 0)[..., None]  # [B, H_kv, one block]
    chosen = selection_mask(scores, budgets, block_size=b)
    place = cache.offsets[..., None] + cache.kept[..., None] + jnp.cumsum(chosen, axis=-1) - 1
    place = jnp.where(chosen, place, layout.pool_tokens)  # out of range: dropped
    return dataclasses.replace(
        cache,
        k_pool=cache.k_pool.at[place].set(k_block, mode="drop"),
        v_pool=cache.v_pool.at[place].set(v_block, mode="drop"),
        kept=cache.kept + jnp.sum(chosen, axis=-1, dtype=jnp.int32),
    )
