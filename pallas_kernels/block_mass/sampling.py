"""Which queries of a tile are sampled."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


def sampled_positions(lengths: Int[Array, " B"], tiles: int, block_size: int, stride: int) -> Int32[Array, "B N S"]:
    """The last query of every `stride` queries of each tile; past a length, the prompt's last query."""
    samples = jnp.arange(tiles * (block_size // stride), dtype=jnp.int32).reshape(tiles, -1)
    return jnp.minimum(samples * stride + stride - 1, jnp.maximum(lengths, 1)[:, None, None] - 1)
