"""Token selection in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from tca_jax.pallas_kernels.kv import Pool
from tca_jax.pallas_kernels.select_tokens import selection_mask


@partial(jax.jit, static_argnames=("block_size", "pool_tokens"))
@jax.named_scope("select_tokens")
def select_tokens(
    scores: Array, budgets: Array, k: Array, v: Array, offsets: Array, *, block_size: int, pool_tokens: int
) -> Pool:
    """Ranks, then gathers; see `select_tokens.select_tokens`."""
    mask = selection_mask(scores, budgets, block_size=block_size)
    rows = source_rows(mask, offsets, pool_tokens)
    head_dim = k.shape[-1]

    def gather(tokens: Array) -> Array:
        return jnp.take(tokens.reshape(-1, head_dim), rows, axis=0, mode="fill", fill_value=0)

    return Pool(gather(k), gather(v), offsets, mask.sum(axis=-1, dtype=jnp.int32))


def source_rows(mask: Bool[Array, "B Hkv L"], offsets: Int[Array, "B Hkv"], pool_tokens: int) -> Int32[Array, " P"]:
    """Source of every pool row, as a row of the tokens laid out [B, L, Hkv]; B * L * Hkv for empty rows.

    Rows, never elements, are counted: int32 holds the rows of a million tokens, their elements pass 2^31.
    """
    batch, kv_heads, length = mask.shape
    slots = offsets[..., None] + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    row, head, position = (jnp.arange(size, dtype=jnp.int32) for size in mask.shape)
    sources = (row[:, None, None] * length + position) * kv_heads + head[:, None]
    empty = jnp.full(pool_tokens, batch * length * kv_heads, jnp.int32)
    # Tokens that are not kept aim past the pool, where mode="drop" ignores them.
    return empty.at[jnp.where(mask, slots, pool_tokens)].set(sources, mode="drop")
