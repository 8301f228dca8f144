"""Attention of a text in which a gate of each KV head lets it read more: out = (1 - g) sparse + g blocks.

By kernels, to measure a loss; and in plain JAX, to derive it. What is selected and fetched is a constant of the
derivative.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.methods.candidates import region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.fetching import attend_blocks, fetched_blocks_of
from tca_jax.methods.queries import last_queries
from tca_jax.methods.regions import Regions, Selection
from tca_jax.methods.selection import select_by_candidates
from tca_jax.methods.sparse import selected_pairs
from tca_jax.pallas_kernels.integers import round_up
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.ranking import selection_mask

# Tiles of queries at a time. The derivative adds every step's to those of all keys: few steps, little of that.
_TILES = 8


class Readings(NamedTuple):
    """Both readings of a text.

    Attributes:
        sparse: Attention where every head reads sparse at row 0; `blocks` where every head reads blocks.
        pairs: Causal pairs (query, key) that each KV head attends to under either.
    """

    sparse: Float[Array, "1 L Hq d"]
    blocks: Float[Array, "1 L Hq d"]
    pairs: Float32[Array, "Hkv 2"]

    def mixed(self, gates: Float32[Array, " Hkv"]) -> Float[Array, "1 L Hq d"]:
        """(1 - g) sparse + g blocks."""
        by_head = jnp.repeat(gates, self.sparse.shape[2] // gates.size)[:, None].astype(self.sparse.dtype)
        return self.sparse + by_head * (self.blocks - self.sparse)


def read_both(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    lengths: Int[Array, " 1"],
    heads: Int[Array, " Hkv"],
    config: TCAConfig,
) -> Readings:
    """Attention under both readings.

    Args:
        q: Queries after RoPE, of one text; `k` and `v` keys and values.
        lengths: Tokens of the text.
        heads: Numbers of the KV heads in the model, on which density "random" depends.
        config: Hyperparameters.
    """
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
    lengths: Int[Array, " 1"],
    heads: Int[Array, " Hkv"],
    config: TCAConfig,
) -> Float[Array, "1 L Hq d"]:
    """`read_both(...).mixed(gates)` in plain JAX, differentiable in O(L) memory: a few tiles of queries at a time."""
    (_, length, kv_heads, head_dim), b, window = k.shape, config.block_size, config.window
    chosen = _chosen_tokens(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k), lengths, heads, config)
    padded = round_up(length, b * _TILES)
    # What lies past the length may be anything. A weight of zero does not silence a NaN; zeros do.
    real = (jnp.arange(length) < lengths[0])[:, None, None]
    q, k, v = (jnp.where(real, x[0], 0) for x in (q, k, v))
    queries = jnp.pad(q, ((0, padded - length), (0, 0), (0, 0))).reshape(
        -1, b, kv_heads, q.shape[1] // kv_heads, head_dim
    )
    # Keys by head, behind a window's worth of nothing: every tile's window is a slice of one size.
    behind = tuple(jnp.pad(jnp.moveaxis(x, 1, 0), ((0, 0), (window, padded - length), (0, 0))) for x in (k, v))
    selected = tuple(_taken(x, jnp.minimum(chosen.selected, length - 1) + window) for x in behind)

    @jax.checkpoint
    def one_tile(part: tuple[Array, Array]) -> Array:
        tile, queries = part
        first = tile * b
        near, fetched = first - window + jnp.arange(window + b), chosen.fetched(tile, b)
        local = (near >= 0) & (near <= (first + jnp.arange(b))[:, None])
        seen = local[None], (chosen.selected < first - window)[:, None], (fetched >= 0)[:, None]
        in_window = tuple(jax.lax.dynamic_slice_in_dim(x, first, window + b, 1) for x in behind)
        pairs = in_window, selected, tuple(_taken(x, fetched + window) for x in behind)
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


def _taken(x: Float[Array, "Hkv L d"], places: Int[Array, "Hkv T"]) -> Float[Array, "Hkv T d"]:
    return jnp.take_along_axis(x, places[..., None], axis=1)


class _Chosen(NamedTuple):
    """What each KV head attends to left of its window.

    Attributes:
        selected: Its selected tokens in ascending order; L behind them.
        blocks: Blocks that it fetches for every tile; -1 behind them.
    """

    selected: Int32[Array, "Hkv S"]
    blocks: Int32[Array, "Hkv N F"]

    def fetched(self, tile: Int[Array, ""], block_size: int) -> Int32[Array, "Hkv T"]:
        """Tokens that a tile of queries fetches; -1 for none."""
        blocks = self.blocks[:, tile, :, None]
        return jnp.where(blocks < 0, -1, blocks * block_size + jnp.arange(block_size)).reshape(blocks.shape[0], -1)


def _chosen_tokens(q: Array, k: Array, lengths: Array, heads: Array, config: TCAConfig) -> _Chosen:
    selection, length = _select(q, k, lengths, heads, config), k.shape[1]
    selected = selection_mask(selection.scores, selection.budgets, block_size=config.block_size)[0]
    size = max(1, region_capacity(config, 0, config.num_ranked_blocks(length)))
    places = jax.vmap(lambda mask: jnp.nonzero(mask, size=size, fill_value=length)[0])(selected)
    return _Chosen(places.astype(jnp.int32), fetched_blocks_of(q, k, lengths, config)[0])


def _select(q: Array, k: Array, lengths: Array, heads: Array, config: TCAConfig) -> Selection:
    """What every head selects at row 0."""
    rows = jnp.zeros(k.shape[2], jnp.int32)
    return select_by_candidates(last_queries(q, lengths, config.num_queries), k, rows, lengths, config, heads=heads)
