"""Block-sparse attention in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tca_jax.pallas_kernels.block_sparse_attention.lists import BlockLists, Columns
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.tiles import tile_map


@partial(jax.jit, static_argnames=("block_size", "tile_size", "aligned"))
@jax.named_scope("block_sparse_attention")
def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    blocks: BlockLists,
    lengths: Array,
    *,
    columns: Columns | None = None,
    block_size: int,
    tile_size: int,
    aligned: bool = False,
) -> Array:
    """Softmax under a mask, a tile at a time: the cost is that of full attention, the memory linear in L."""
    batch, length, heads, head_dim = q.shape
    group, tiles = heads // k.shape[2], blocks.counts.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, tiles * tile_size - length), (0, 0), (0, 0)))
    # A weight of zero does not silence a NaN among the padding's values; zeros do.
    v = jnp.where((jnp.arange(length) < lengths[:, None])[..., None, None], v, 0)
    token = jnp.arange(length)

    def one_tile(index: Array) -> Float[Array, "m d"]:
        index, head = jnp.divmod(index, heads)
        row, tile = jnp.divmod(index, tiles)
        position = tile * tile_size + jnp.arange(tile_size)
        listed = _listed(blocks, columns, row, head, tile, length, block_size, tile_size)
        visible = listed & (token <= position[:, None]) & (token < lengths[row])
        queries = jax.lax.dynamic_slice_in_dim(q[row, :, head], tile * tile_size, tile_size)
        scores = jnp.where(visible, scaled_scores("qd,kd->qk", queries, k[row, :, head // group]), MASKED)
        weights = jnp.where(visible, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        total = jnp.maximum(weights.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        out = weighted_sum("qk,kd->qd", weights, v[row, :, head // group]) / total
        return jnp.where((position < lengths[row])[:, None], out, 0).astype(q.dtype)

    parallel = 1 if jax.default_backend() == "cpu" else 8
    outputs = tile_map(one_tile, batch * tiles * heads, parallel).reshape(batch, tiles, heads, tile_size, head_dim)
    return outputs.swapaxes(2, 3).reshape(batch, tiles * tile_size, heads, head_dim)[:, :length]


def _listed(
    blocks: BlockLists,
    columns: Columns | None,
    row: Array,
    head: Array,
    tile: Array,
    length: int,
    block_size: int,
    tile_size: int,
) -> Bool[Array, " L"]:
    """Whether each token is listed for a tile."""
    distances = blocks.distances[row, head, tile if blocks.distances.shape[2] > 1 else 0]
    first = (tile + 1) * tile_size - distances
    counts = jnp.arange(distances.size) < blocks.counts[row, head, tile]
    tokens = jnp.where(counts[:, None], first[:, None] + jnp.arange(block_size), length)
    marked = _mark(jnp.zeros(length, bool), tokens.ravel())
    if columns is None:
        return marked
    counts = jnp.arange(columns.tokens.shape[-1]) < columns.counts[row, head]
    return _mark(marked, jnp.where(counts, columns.tokens[row, head], length))


def _mark(marked: Bool[Array, " L"], tokens: Int[Array, " n"]) -> Bool[Array, " L"]:
    """Marks tokens; those that are not of the sequence are left out: an index below 0 would count from its end."""
    return marked.at[jnp.where(tokens < 0, marked.size, tokens)].set(True, mode="drop")
