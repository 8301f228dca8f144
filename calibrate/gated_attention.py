"""Attention of a text in which a gate of each KV head lets it read more: out = (1 - g) sparse + g blocks.

By kernels, to measure a loss; and in plain JAX, to derive it. What is selected and fetched is a constant of the
derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.methods.base import last_queries
from tca_jax.methods.candidates import region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.fetching import attend_blocks, fetched_blocks_of
from tca_jax.methods.pairs import selected_pairs
from tca_jax.methods.regions import Regions, Selection
from tca_jax.methods.selection import select_by_candidates
from tca_jax.pallas_kernels.numerics import MASKED, round_up, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.select_tokens import selection_mask

# Tiles of queries at a time. The derivative adds every step's to those of all keys: few steps, little of that.
_TILES = 8


class Readings(NamedTuple):
    """Both readings of a text."""

    # Attention where every head reads sparse at row 0; `blocks` where every head reads blocks.
    sparse: Float[Array, "1 L Hq d"]
    blocks: Float[Array, "1 L Hq d"]
    pairs: Float32[Array, "Hkv 2"]  # causal pairs (query, key) that each KV head attends to under either

    def mixed(self, gates: Float32[Array, " Hkv"]) -> Float[Array, "1 L Hq d"]:
        """(1 - g) sparse + g blocks."""
        by_head = jnp.repeat(gates, self.sparse.shape[2] // gates.size)[:, None].astype(self.sparse.dtype)
        return self.sparse + by_head * (self.blocks - self.sparse)


def read_both(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    heads: Int[Array, " Hkv"],
    lengths: Int[Array, " 1"],
    config: TCAConfig,
) -> Readings:
    """Attention of a text under both readings; `heads` are the KV heads' numbers, on which density "random" depends."""
    b = config.block_size
    selection = _select(q, k, lengths, heads, config)
    capacity = region_capacity(config, 0, config.num_ranked_blocks(k.shape[1]))
    budgets, pool = Regions.plan(1, (capacity,) * k.shape[2]).fill(selection, k, v, block_size=b)
    sparse = prefill_attention(q, k, v, pool, budgets, lengths, block_size=b, window=config.window)
    blocks, pairs = attend_blocks(q, k, v, lengths, config)
    of_sparse = selected_pairs(budgets, lengths, block_size=b, window=config.window)
    return Readings(sparse, blocks, jnp.stack([of_sparse[0], pairs[0]], axis=-1))


def attend_gated(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    gates: Float32[Array, " Hkv"],
    heads: Int[Array, " Hkv"],
    lengths: Int[Array, " 1"],
    config: TCAConfig,
) -> Float[Array, "1 L Hq d"]:
    """`read_both(...).mixed(gates)` in plain JAX, differentiable in O(L) memory: a few tiles of queries at a time."""
    (_, length, kv_heads, head_dim), b, window = k.shape, config.block_size, config.window
    selected, fetched = _chosen(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k), lengths, heads, config)
    padded = round_up(length, b * _TILES)
    # What lies past the length may be anything. A weight of zero does not silence a NaN; zeros do.
    real = (jnp.arange(length) < lengths[0])[:, None, None]
    q, k, v = (jnp.where(real, x[0], 0) for x in (q, k, v))
    queries = jnp.pad(q, ((0, padded - length), (0, 0), (0, 0))).reshape(
        -1, b, kv_heads, q.shape[1] // kv_heads, head_dim
    )
    # Keys by head, behind a window's worth of nothing: every tile's window is a slice of one size.
    behind = tuple(jnp.pad(jnp.moveaxis(x, 1, 0), ((0, 0), (window, padded - length), (0, 0))) for x in (k, v))

    def pairs_at(tokens: Int[Array, "Hkv T"]) -> tuple[Array, ...]:
        return tuple(jnp.take_along_axis(x, (tokens + window)[..., None], axis=1) for x in behind)

    of_selection = pairs_at(jnp.minimum(selected, length - 1))

    @jax.checkpoint
    def one_tile(part: tuple[Array, Array]) -> Array:
        tile, queries = part
        first, far = tile * b, fetched[:, tile, :, None]
        near = first - window + jnp.arange(window + b)
        far = jnp.where(far < 0, -1, far * b + jnp.arange(b)).reshape(kv_heads, -1)
        local = (near >= 0) & (near <= (first + jnp.arange(b))[:, None])
        seen = local[None], (selected < first - window)[:, None], (far >= 0)[:, None]
        pairs = (
            tuple(jax.lax.dynamic_slice_in_dim(x, first, window + b, 1) for x in behind),
            of_selection,
            pairs_at(far),
        )
        # Window, selected and fetched keys have weights of their own; a reading weighs two of the three by their sums.
        scores = [
            jnp.where(mask[:, None], scaled_scores("qhgd,hkd->hgqk", queries, keys), MASKED)
            for mask, (keys, _) in zip(seen, pairs, strict=True)
        ]
        of_window, of_selected, of_fetched = (jax.nn.logsumexp(part, axis=-1, keepdims=True) for part in scores)
        sparse, blocks = jnp.logaddexp(of_window, of_selected), jnp.logaddexp(of_window, of_fetched)
        gate = gates[:, None, None, None]
        shares = (
            (1 - gate) * jnp.exp(of_window - sparse) + gate * jnp.exp(of_window - blocks),
            (1 - gate) * jnp.exp(of_selected - sparse),
            gate * jnp.exp(of_fetched - blocks),
        )
        attended = [
            weighted_sum("hgqk,hkd->qhgd", jax.nn.softmax(part) * share, values)
            for part, share, (_, values) in zip(scores, shares, pairs, strict=True)
        ]
        return sum(attended[1:], attended[0]).astype(q.dtype)

    out = jax.lax.map(one_tile, (jnp.arange(padded // b), queries), batch_size=_TILES)
    return jnp.where(real, out.reshape(padded, *q.shape[1:])[:length], 0)[None]


def _chosen(
    q: Array, k: Array, lengths: Array, heads: Array, config: TCAConfig
) -> tuple[Int32[Array, "Hkv S"], Int32[Array, "Hkv N F"]]:
    """What each KV head attends to left of its window: selected tokens, ascending, L behind them; and the blocks that
    every tile fetches, -1 behind them."""
    selection, length = _select(q, k, lengths, heads, config), k.shape[1]
    selected = selection_mask(selection.scores, selection.budgets, block_size=config.block_size)[0]
    size = max(1, region_capacity(config, 0, config.num_ranked_blocks(length)))
    tokens = jax.vmap(lambda mask: jnp.nonzero(mask, size=size, fill_value=length)[0])(selected)
    return tokens.astype(jnp.int32), fetched_blocks_of(q, k, lengths, config)[0]


def _select(q: Array, k: Array, lengths: Array, heads: Array, config: TCAConfig) -> Selection:
    """The selection of every head with the smallest budget."""
    rows = jnp.zeros(k.shape[2], jnp.int32)
    return select_by_candidates(last_queries(q, lengths, config.num_queries), k, rows, lengths, config, heads=heads)
