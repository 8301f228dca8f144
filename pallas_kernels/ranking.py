"""Which tokens of a block are its best: what selection, eviction and calibration share."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int


def selection_mask(
    scores: Float32[Array, "B Hkv L"], budgets: Int[Array, "B Hkv nb"], *, block_size: int
) -> Bool[Array, "B Hkv L"]:
    """Marks the `budgets[j]` highest scores of every whole block j, ties to the lower position."""
    *lead, length = scores.shape
    num_blocks = length // block_size
    blocks = scores[..., : num_blocks * block_size].reshape(*lead, num_blocks, block_size)
    # Rank by counting instead of sorting: one fused pass, and candidates share it under vmap over budgets.
    ahead = blocks[..., None, :] > blocks[..., :, None]
    tied = (blocks[..., None, :] == blocks[..., :, None]) & jnp.tri(block_size, k=-1, dtype=bool)
    rank = (ahead | tied).sum(axis=-1, dtype=jnp.int32)
    mask = (rank < budgets[..., None]).reshape(*lead, num_blocks * block_size)
    return jnp.pad(mask, [(0, 0)] * len(lead) + [(0, length - num_blocks * block_size)])
