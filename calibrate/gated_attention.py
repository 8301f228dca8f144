"""Attention of a text in which a gate of each KV head lets it read more: the forward pass by kernels, its derivative.

out = (1 - g) sparse + g blocks, the two readings of a head. Which tokens are selected and which blocks are fetched is a
constant of the derivative. The backward pass takes the reading that a head has, sparse at g = 0 and blocks at g = 1, so
derivatives are exact there, which is all that a search asks for.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.methods.candidates import region_capacity
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.fetching import attend_blocks, fetched_blocks_of
from tca_jax.methods.queries import last_queries
from tca_jax.methods.regions import Regions, Selection
from tca_jax.methods.selection import select_by_candidates
from tca_jax.methods.sparse import selected_pairs
from tca_jax.pallas_kernels.integers import cdiv, round_up
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.ranking import selection_mask


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


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def attend_gated(
    q: Float[Array, "1 L Hq d"],
    k: Float[Array, "1 L Hkv d"],
    v: Float[Array, "1 L Hkv d"],
    gates: Float32[Array, " Hkv"],
    lengths: Int[Array, " 1"],
    heads: Int[Array, " Hkv"],
    config: TCAConfig,
) -> Float[Array, "1 L Hq d"]:
    """`read_both(...).mixed(gates)`, differentiable by q, k, v and gates where every gate is 0 or 1."""
    return read_both(q, k, v, lengths, heads, config).mixed(gates)


def _forward(q: Any, k: Any, v: Any, gates: Any, lengths: Any, heads: Any, config: TCAConfig) -> tuple[Any, Any]:
    both = read_both(q, k, v, lengths, heads, config)
    return both.mixed(gates), (q, k, v, gates, lengths, heads, both.blocks - both.sparse)


def _backward(config: TCAConfig, saved: Any, cotangent: Float[Array, "1 L Hq d"]) -> tuple[Any, ...]:
    q, k, v, gates, lengths, heads, difference = saved
    by_head = (cotangent.astype(jnp.float32) * difference).sum(axis=(0, 1, 3))
    selection = _select(q, k, lengths, heads, config)
    selected = selection_mask(selection.scores, selection.budgets, block_size=config.block_size)[0]
    far = FarTokens.create(selected, fetched_blocks_of(q, k, lengths, config)[0], gates > 0, config)
    # A weight of zero does not silence a NaN among the padding; zeros do.
    real = (jnp.arange(k.shape[1]) < lengths[0])[:, None, None]
    own = (jnp.where(real, x[0], 0) for x in (q, k, v))
    _, pullback = jax.vjp(lambda q, k, v: attend_far(q, k, v, far, config), *own)
    of_operands = pullback(jnp.where(real, cotangent[0], 0).astype(q.dtype))
    return (*(x[None] for x in of_operands), by_head.reshape(gates.size, -1).sum(axis=-1), None, None)


attend_gated.defvjp(_forward, _backward)


def _select(q: Array, k: Array, lengths: Array, heads: Array, config: TCAConfig) -> Selection:
    """What every head selects at row 0."""
    rows = jnp.zeros(k.shape[2], jnp.int32)
    return select_by_candidates(last_queries(q, lengths, config.num_queries), k, rows, lengths, config, heads=heads)


class FarTokens(NamedTuple):
    """What each KV head attends to left of its window.

    Attributes:
        selected: Its selected tokens in ascending order; L behind them.
        blocks: Blocks that it fetches for every tile; -1 behind them.
        fetches: Whether it attends to the latter, or else to the former.
    """

    selected: Int32[Array, "Hkv S"]
    blocks: Int32[Array, "Hkv N F"]
    fetches: Bool[Array, " Hkv"]

    @classmethod
    def create(
        cls,
        selected: Bool[Array, "Hkv L"],
        blocks: Int32[Array, "Hkv N F"],
        fetches: Bool[Array, " Hkv"],
        config: TCAConfig,
    ) -> FarTokens:
        """From marks of the selected tokens, at most as many as row 0 has."""
        length = selected.shape[-1]
        size = max(1, region_capacity(config, 0, config.num_ranked_blocks(length)))
        places = jax.vmap(lambda mask: jnp.nonzero(mask, size=size, fill_value=length)[0])(selected)
        return cls(places.astype(jnp.int32), blocks, fetches)

    def of_tile(self, tile: Int[Array, ""], edge: Int[Array, ""], block_size: int) -> Int32[Array, "Hkv T"]:
        """Tokens of a tile of queries whose window begins at `edge`; -1 for none."""
        blocks = self.blocks[:, tile, :, None]
        fetched = jnp.where(blocks < 0, -1, blocks * block_size + jnp.arange(block_size)).reshape(blocks.shape[0], -1)
        selected = jnp.where(self.selected < edge, self.selected, -1)
        size = max(fetched.shape[1], selected.shape[1])
        fetched, selected = (
            jnp.pad(x, ((0, 0), (0, size - x.shape[1])), constant_values=-1) for x in (fetched, selected)
        )
        return jnp.where(self.fetches[:, None], fetched, selected)


def attend_far(
    q: Float[Array, "L Hq d"],
    k: Float[Array, "L Hkv d"],
    v: Float[Array, "L Hkv d"],
    far: FarTokens,
    config: TCAConfig,
) -> Float[Array, "L Hq d"]:
    """Attention over window and far tokens in plain JAX, differentiable in O(L) memory, a tile of queries at a time."""
    length, kv_heads, head_dim = k.shape
    b, window = config.block_size, config.window
    tiles, padded = cdiv(length, b), round_up(length, b)
    queries = jnp.pad(q, ((0, padded - length), (0, 0), (0, 0))).reshape(tiles, b, kv_heads, -1, head_dim)
    # Keys by head, behind a window's worth of nothing: every tile's window is a slice of one size.
    keys, values = (jnp.pad(jnp.moveaxis(x, 1, 0), ((0, 0), (window, padded - length), (0, 0))) for x in (k, v))

    @jax.checkpoint
    def one_tile(part: tuple[Array, Array]) -> Array:
        tile, queries = part
        first = tile * b
        tokens = far.of_tile(tile, first - window, b)
        places = jnp.maximum(tokens, 0)[..., None] + window
        near = first - window + jnp.arange(window + b)
        seen = (near >= 0) & (near <= (first + jnp.arange(b))[:, None])
        seen = jnp.concatenate(
            [
                jnp.broadcast_to(seen, (kv_heads, b, window + b)),
                jnp.broadcast_to((tokens >= 0)[:, None], (kv_heads, b, tokens.shape[1])),
            ],
            axis=-1,
        )
        own_keys, own_values = (
            jnp.concatenate(
                [jax.lax.dynamic_slice_in_dim(x, first, window + b, axis=1), jnp.take_along_axis(x, places, axis=1)],
                axis=1,
            )
            for x in (keys, values)
        )
        scores = jnp.where(seen[:, :, None], scaled_scores("qhgd,hkd->hqgk", queries, own_keys), MASKED)
        return weighted_sum("hqgk,hkd->qhgd", jax.nn.softmax(scores), own_values).astype(q.dtype)

    out = jax.lax.map(one_tile, (jnp.arange(tiles), queries))
    return out.reshape(padded, *q.shape[1:])[:length]
