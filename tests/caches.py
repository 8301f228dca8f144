"""Random caches of the decoding kernels' tests: pools with regions of unequal length, and rings."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tca_jax.pallas_kernels.kv import Pool, Ring


def random_pool(rng, lengths, head_dim, *, outside=np.nan, shared=False):
    """A pool of NumPy arrays, its regions in any order; `outside` fills the rows that belong to none.

    `shared` gives all rows the regions of the first.
    """
    lengths = np.array(lengths, np.int32)
    room = -(-max(1, lengths.max()) // 16) * 16
    offsets = (rng.permutation(lengths.size) * room).reshape(lengths.shape).astype(np.int32)
    if shared:
        lengths[:], offsets[:] = lengths[0], offsets[0]
    tokens = rng.standard_normal((2, lengths.size * room + 8, head_dim))
    held = np.zeros(tokens.shape[1], bool)
    for start, length in zip(offsets.ravel(), lengths.ravel(), strict=True):
        held[start : start + length] = True
    tokens[:, ~held] = outside
    return Pool(*tokens, offsets, lengths)


def random_ring(rng, positions, kv_heads, head_dim, slots, *, block_size, window, outside=np.nan):
    """A ring of NumPy arrays whose latest tokens are at `positions`; `outside` fills slots that are not local."""
    rings = rng.standard_normal((2, len(positions), kv_heads, slots, head_dim))
    for row, position in enumerate(positions):
        held = position - (position - np.arange(slots)) % slots
        rings[:, row, :, held < max(0, position // block_size * block_size - window)] = outside
    return Ring(*rings)


def on_device(cached, dtype=jnp.float32):
    """A pool or a ring as JAX arrays, its tokens of a type."""
    return type(cached)(*(jnp.asarray(x, x.dtype if x.dtype == np.int32 else dtype) for x in cached))
