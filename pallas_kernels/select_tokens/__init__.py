"""Token selection: the best tokens of every block, compacted into each head's region of the KV pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes, check_whole_blocks
from tca_jax.pallas_kernels.kv import Pool


def select_tokens(
    scores: Float32[Array, "B Hkv L"],
    budgets: Int[Array, "B Hkv nb"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    offsets: Int[Array, "B Hkv"],
    *,
    block_size: int,
    pool_tokens: int,
    backend: Backend = "auto",
) -> Pool:
    """Writes the `budgets[j]` best tokens of every block j into a fresh pool, sorted by position.

    Args:
        scores: Token scores [B, Hkv, L].
        budgets: Tokens to keep of every block [B, Hkv, L // b], 0 for blocks that are not ranked.
        k: Prompt keys [B, L, Hkv, d].
        v: Prompt values [B, L, Hkv, d].
        offsets: First pool row of every region [B, Hkv].
        block_size: Tokens in a block, b.
        pool_tokens: Rows of the pool, P. Tokens that would land past it are dropped.
        backend: See `backends.Backend`.

    Returns:
        The pool: keys and values [P, d], zero where no token lies, `offsets`, and the tokens kept, int32 [B, Hkv].
    """
    check_blocks(block_size)
    # Keys come first: wrong scores of a method are named, not the keys.
    tokens = {"k": (k, "B L Hkv d"), "v": (v, "B L Hkv d"), "scores": (scores, "B Hkv L")}
    sizes = check_shapes(tokens | {"budgets": (budgets, "B Hkv nb"), "offsets": (offsets, "B Hkv")})
    check_whole_blocks("budgets", sizes, block_size)
    implementation = dispatch("select_tokens", backend)
    return implementation(scores, budgets, k, v, offsets, block_size=block_size, pool_tokens=pool_tokens)


def selection_mask(
    scores: Float32[Array, "B Hkv L"], budgets: Int[Array, "B Hkv nb"], *, block_size: int
) -> Bool[Array, "B Hkv L"]:
    """Marks the `budgets[j]` highest scores of every full block j, ties to the lower position."""
    *lead, length = scores.shape
    complete = length // block_size * block_size
    # Computed once: of scores that XLA computes twice, and rounds otherwise, a token may be ahead of itself.
    blocks = jax.lax.optimization_barrier(scores[..., :complete]).reshape(*lead, -1, block_size)
    ahead = blocks[..., None, :] > blocks[..., :, None]  # counted, not sorted: vmap over budgets shares it
    tied = (blocks[..., None, :] == blocks[..., :, None]) & jnp.tri(block_size, k=-1, dtype=bool)
    # In float32: for a sum of integers XLA looks for a tiling for 12 seconds and more at 131,072 tokens.
    mask = (ahead | tied).sum(axis=-1, dtype=jnp.float32) < budgets[..., None]
    return jnp.pad(mask.reshape(*lead, complete), [(0, 0)] * len(lead) + [(0, length - complete)])
