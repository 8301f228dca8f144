"""Block scores: shares of the blocks of keys in the largest logits of sampled queries, for each tile of queries.

docs/worth.md, "The rule".
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend, dispatch
from tca_jax.pallas_kernels.checks import check_blocks, check_shapes, is_multiple


def block_scores(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    *,
    block_size: int,
    stride: int,
    backend: Backend = "auto",
) -> Float32[Array, "B Hkv N N"]:
    """The largest share that the largest logit of every block of keys has among those of all blocks.

    Tile t holds the queries [t b, (t + 1) b), block j the keys [j b, (j + 1) b). Of each run of `stride` queries of a
    tile the last one is sampled; where that lies past the prompt, the prompt's last query is. With m_j the largest
    q.k / sqrt(d) of a query with the keys of block j that it sees, entry [t, j] is the largest exp(m_j) / sum of exp(m)
    over all blocks, of the samples of tile t and of the group.

    Args:
        q: Queries after RoPE [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys after RoPE [B, L, Hkv, d]; what lies past a row's length does not matter.
        lengths: Prompt lengths [B]; may be traced.
        block_size: Tokens in a block and queries in a tile, b.
        stride: Divides b.
        backend: See `backends.Backend`. Triton rounds q and k of 16 bits and d 32, 64 or 128 to int8 (`rounding`).

    Returns:
        [B, Hkv, N, N], N = ceil(L / b); 0 where j > t or the tile is past the length.
    """
    check_blocks(block_size)
    require(is_multiple(block_size, stride), f"stride = {stride}: must divide block_size = {block_size}")
    check_shapes({"q": (q, "B L Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    return dispatch("block_scores", backend)(q, k, lengths, block_size=block_size, stride=stride)


def sampled_positions(lengths: Int[Array, " B"], tiles: int, block_size: int, stride: int) -> Int32[Array, "B N S"]:
    """The last query of every `stride` queries of each tile; past a length, the prompt's last query."""
    samples = jnp.arange(tiles * (block_size // stride), dtype=jnp.int32).reshape(tiles, -1)
    return jnp.minimum(samples * stride + stride - 1, jnp.maximum(lengths, 1)[:, None, None] - 1)
