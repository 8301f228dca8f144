"""Block mass: the most attention that sampled queries of each tile put on each block of keys left of their window."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes, is_multiple
from tca_jax.pallas_kernels.numerics import cdiv


class Representatives(NamedTuple):
    """Keys that stand for the tokens of each block: r of a block, N = ceil(L / b) blocks."""

    k: Float[Array, "B Hkv N r d"]  # finite
    bias: Float32[Array, "B Hkv N r"]  # added to their logits; -inf: the key does not count


def block_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    representatives: Representatives,
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    window: int,
    stride: int,
    backend: Backend = "auto",
) -> Float32[Array, "B Hkv N N"]:
    """The largest attention mass that sampled queries put on every block of keys left of their window.

    Tile t holds the queries [t b, (t + 1) b), block j the keys [j b, (j + 1) b). Of each run of `stride` queries of a
    tile the last one is sampled; where that lies past the prompt, the prompt's last query is. A sampled query i attends
    to the tokens [t b - window, i] and to the representatives of the blocks before them. Entry [t, j] is the largest
    probability, over the samples of tile t and over the group, of all representatives of block j together.

    Args:
        q: Queries after RoPE [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys after RoPE [B, L, Hkv, d]; what lies past a row's length does not matter.
        representatives: Of every block; what those of blocks that do not end within a row's length are does not matter.
        lengths: Prompt lengths [B]; may be traced.
        block_size: Tokens in a block and queries in a tile, b.
        window: Tokens left of a tile that its queries see, a positive multiple of b.
        stride: Divides b.
        backend: See `backends.Backend`.

    Returns:
        [B, Hkv, N, N], N = ceil(L / b); 0 where block j is not left of tile t's window or the tile is past the length.
    """
    check_blocks(block_size, window=window)
    require(is_multiple(block_size, stride), f"stride = {stride}: must divide block_size = {block_size}")
    sizes = check_shapes(
        {
            "q": (q, "B L Hq d"),
            "k": (k, "B L Hkv d"),
            "lengths": (lengths, "B"),
            "representatives.k": (representatives.k, "B Hkv N r d"),
            "representatives.bias": (representatives.bias, "B Hkv N r"),
        }
    )
    blocks = cdiv(sizes["L"], block_size)
    require(sizes["N"] == blocks, f"representatives are of {sizes['N']} blocks: must be ceil(L / b) = {blocks}")
    function = dispatch("block_mass", backend)
    return function(q, k, representatives, lengths, block_size=block_size, window=window, stride=stride)


def sampled_positions(lengths: Int[Array, " B"], tiles: int, block_size: int, stride: int) -> Int32[Array, "B N S"]:
    """The last query of every `stride` queries of each tile; past a length, the prompt's last query."""
    samples = jnp.arange(tiles * (block_size // stride), dtype=jnp.int32).reshape(tiles, -1)
    return jnp.minimum(samples * stride + stride - 1, jnp.maximum(lengths, 1)[:, None, None] - 1)
