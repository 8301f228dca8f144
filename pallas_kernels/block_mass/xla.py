"""Block mass in plain JAX: the oracle of the operation and its path on any device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from tca_jax.pallas_kernels.block_mass import Representatives, sampled_positions
from tca_jax.pallas_kernels.numerics import MASKED, cdiv, scaled_scores


@partial(jax.jit, static_argnames=("block_size", "window", "stride"))
@jax.named_scope("block_mass")
def block_mass(
    q: Array, k: Array, representatives: Representatives, lengths: Array, *, block_size: int, window: int, stride: int
) -> Array:
    """The softmax of a tile's sampled queries over representatives and window, a tile at a time."""
    (batch, length, kv_heads, head_dim), group = k.shape, q.shape[2] // k.shape[2]
    if length == 0:
        return jnp.zeros((batch, kv_heads, 0, 0), jnp.float32)
    tiles, local = cdiv(length, block_size), window + block_size
    positions = sampled_positions(lengths, tiles, block_size, stride)  # [B, N, S]
    # [B, Hkv, w + N b, d]: tile t's window begins at row t b.
    keys = jnp.pad(jnp.moveaxis(k, 1, 2), ((0, 0), (0, 0), (window, -length % block_size), (0, 0)))

    def one_tile(tile: Array) -> Float32[Array, "B Hkv N"]:
        places, begin = positions[:, tile], tile * block_size - window
        rows = jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(q, places)
        rows = rows.reshape(batch, -1, kv_heads, group, head_dim)
        near = jax.lax.dynamic_slice_in_dim(keys, begin + window, local, axis=2)
        token = begin + jnp.arange(local)
        seen = ((token >= 0) & (token <= places[..., None]))[:, None, :, None]  # [B, 1, S, 1, w + b]
        near_scores = jnp.where(seen, scaled_scores("bshgd,bhld->bhsgl", rows, near), MASKED)
        scores = scaled_scores("bshgd,bhnrd->bhsgnr", rows, representatives.k) + representatives.bias[:, :, None, None]
        before = jnp.arange(tiles) * block_size < begin
        of_block = jnp.where(before, jax.nn.logsumexp(scores, axis=-1), -jnp.inf)
        total = jnp.logaddexp(
            jax.nn.logsumexp(of_block, axis=-1, keepdims=True), jax.nn.logsumexp(near_scores, axis=-1, keepdims=True)
        )
        mass = jnp.exp(of_block - total).max(axis=(2, 3))
        return jnp.where((tile * block_size < lengths)[:, None, None], mass, 0)

    return jnp.moveaxis(jax.lax.map(one_tile, jnp.arange(tiles)), 0, 2)
