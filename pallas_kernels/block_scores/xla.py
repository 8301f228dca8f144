"""Block scores in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from tca_jax.pallas_kernels.block_scores import sampled_positions
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, scaled_scores


@partial(jax.jit, static_argnames=("block_size", "stride"))
@jax.named_scope("block_scores")
def block_scores(q: Array, k: Array, lengths: Array, *, block_size: int, stride: int) -> Array:
    """The softmax over the blocks' largest logits of a tile's sampled queries, a tile at a time."""
    (batch, length, kv_heads, head_dim), group = k.shape, q.shape[2] // k.shape[2]
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0, 0), jnp.float32)
    tiles = cdiv(length, block_size)
    positions = sampled_positions(lengths, tiles, block_size, stride)  # [B, N, S]
    keys = jnp.pad(jnp.moveaxis(k, 1, 2), ((0, 0), (0, 0), (0, -length % block_size), (0, 0)))  # [B, Hkv, N b, d]

    def one_tile(tile: Array) -> Float32[Array, "B Hkv N"]:
        places = positions[:, tile]
        rows = jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(q, places)
        rows = rows.reshape(batch, -1, kv_heads, group, head_dim)
        seen = (jnp.arange(tiles * block_size) <= places[..., None])[:, None, :, None]  # [B, 1, S, 1, N b]
        logits = jnp.where(seen, scaled_scores("bshgd,bhld->bhsgl", rows, keys), MASKED)
        peaks = logits.reshape(*logits.shape[:-1], tiles, block_size).max(axis=-1)  # [B, Hkv, S, G, N]
        scores = jnp.where(peaks > MASKED, jax.nn.softmax(peaks, axis=-1), 0).max(axis=(2, 3))
        return jnp.where((tile * block_size < lengths)[:, None, None], scores, 0)

    return jnp.moveaxis(jax.lax.map(one_tile, jnp.arange(tiles)), 0, 2)
