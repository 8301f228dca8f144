"""Attention over a selection with gradients: kernels forward, plain XLA backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tca_jax.methods.regions import Regions, Selection
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.prefill_attention import prefill_attention
from tca_jax.pallas_kernels.select_tokens import selection_mask

_TILE_ELEMENTS = 2**26  # scores of a tile of queries in the backward pass: 256 MiB


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def attend_selection(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    selection: Selection,
    lengths: Int[Array, " B"],
    regions: Regions,
    block_size: int,
    window: int,
    backend: Backend,
) -> Float[Array, "B L Hq d"]:
    """Attention of prompts over their windows and a selection left of them; the selection is a constant of gradients.

    Rows past a length are zero. Arguments from `regions` on are static.
    """
    budgets, pool = regions.fill(selection, k, v, block_size=block_size, backend=backend)
    return prefill_attention(q, k, v, pool, budgets, lengths, block_size=block_size, window=window, backend=backend)


def _forward(q: Any, k: Any, v: Any, selection: Any, lengths: Any, *static: Any) -> tuple[Array, Any]:
    return attend_selection(q, k, v, selection, lengths, *static), (q, k, v, selection, lengths)


def _backward(
    regions: Regions, block_size: int, window: int, backend: Backend, saved: Any, cotangent: Array
) -> tuple[Any, ...]:
    q, k, v, selection, lengths = saved
    kept = selection_mask(selection.scores, selection.budgets, block_size=block_size)
    _, pullback = jax.vjp(lambda q, k, v: _masked(q, k, v, kept, lengths, block_size, window), q, k, v)
    return (*pullback(cotangent), None, None)


attend_selection.defvjp(_forward, _backward)


def _masked(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    kept: Bool[Array, "B Hkv L"],
    lengths: Int[Array, " B"],
    block_size: int,
    window: int,
) -> Float[Array, "B L Hq d"]:
    """The same attention by masks over all keys, a tile of queries at a time, recomputed in the backward pass."""
    batch, length, heads, head_dim = q.shape
    kv_heads, columns = k.shape[2], jnp.arange(length)
    valid = columns < lengths[:, None]  # [B, L]
    # A weight of zero does not silence a NaN among the padding; zeros do.
    q, k, v = (jnp.where(valid[..., None, None], x, 0) for x in (q, k, v))
    size = max(1, min(length, _TILE_ELEMENTS // (batch * heads * length)))
    tiles = cdiv(length, size)
    padded = jnp.pad(q, ((0, 0), (0, tiles * size - length), (0, 0), (0, 0)))
    by_tile = padded.reshape(batch, tiles, size, kv_heads, heads // kv_heads, head_dim).swapaxes(0, 1)

    @jax.checkpoint
    def one_tile(part: tuple[Array, Array]) -> Array:
        number, queries = part
        row = number * size + jnp.arange(size)
        edge = jnp.maximum(0, row // block_size * block_size - window)[:, None]
        local = (columns >= edge) & (columns <= row[:, None])
        seen = local | (kept[:, :, None] & (columns < edge))  # [B, Hkv, T, L]
        scores = jnp.where(seen[:, :, None], scaled_scores("bthgd,blhd->bhgtl", queries, k), MASKED)
        return weighted_sum("bhgtl,blhd->bthgd", jax.nn.softmax(scores, axis=-1), v).astype(q.dtype)

    out = jax.lax.map(one_tile, (jnp.arange(tiles), by_tile)).swapaxes(0, 1)
    out = out.reshape(batch, tiles * size, heads, head_dim)[:, :length]
    return jnp.where(valid[..., None, None], out, 0)
