"""The reading "blocks": a tile of queries attends to its window and to the few key blocks that its queries look at.

Some heads read a text query by query: what one of their queries looks at, the next does not, so one selection for the
whole prompt does not serve them. For every block of queries the key blocks of the highest attention mass are fetched;
the mass is estimated from every `fetch_stride`-th query of the tile, over all keys up to it, never from later tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.methods.block_sparse import Listed, listed_pairs
from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.block_mass import block_mass
from tca_jax.pallas_kernels.block_sparse_attention import BlockLists
from tca_jax.pallas_kernels.numerics import cdiv


def fetched_blocks(mass: Float32[Array, "B Hkv N N"], config: TCAConfig) -> Int32[Array, "B Hkv N F"]:
    """The `config.fetch` blocks of the highest mass left of each tile's window, the nearest first; -1 behind them.

    Args:
        mass: Of every block for every tile of queries; ties go to the lower block.
        config: Hyperparameters.
    """
    tiles = mass.shape[-1]
    left = jnp.arange(tiles) < (jnp.arange(tiles) - config.window // config.block_size)[:, None]
    values, blocks = jax.lax.top_k(jnp.where(left, mass, -1.0), min(config.fetch, tiles))
    return -jnp.sort(-jnp.where(values < 0, -1, blocks), axis=-1).astype(jnp.int32)


def fetched_blocks_of(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend = "auto",
) -> Int32[Array, "B Hkv N F"]:
    """`fetched_blocks` by the estimate; no estimate is made where all blocks are fetched."""
    tiles = cdiv(k.shape[1], config.block_size)
    if config.num_ranked_blocks(tiles * config.block_size) <= config.fetch:
        return fetched_blocks(jnp.zeros((k.shape[0], k.shape[2], tiles, tiles), jnp.float32), config)
    with jax.named_scope("estimate"):
        mass = estimated_mass(q, k, lengths, config, backend)
    return fetched_blocks(mass, config)


def estimated_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend = "auto",
) -> Float32[Array, "B Hkv N N"]:
    """`block_mass` of the queries that the config samples, of each block of keys for each tile of queries."""
    b = config.block_size
    return block_mass(q, k, lengths, block_size=b, stride=min(config.fetch_stride, b), backend=backend)


def attend_blocks(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    v: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend = "auto",
) -> tuple[Float[Array, "B L Hq d"], Float32[Array, "B Hkv"]]:
    """Attention over what `fetch_lists` lists.

    Returns:
        [B, L, Hq, d], rows past a length zero; and how many causal pairs (query, key) each KV head's queries attend to.
    """
    listed = Listed(fetch_lists(q, k, lengths, config, backend))
    with jax.named_scope("fetch_attention"):
        out = listed.attend(q, k, v, lengths, block_size=config.block_size, aligned=True, backend=backend)
    pairs = listed_pairs((listed,), lengths, config.block_size)
    return out, pairs.reshape(*pairs.shape[:1], k.shape[2], -1).mean(axis=-1)


def fetch_lists(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    backend: Backend = "auto",
) -> BlockLists:
    """What the queries of each tile attend to: the blocks of its window, and those that are fetched left of it.

    Args:
        q: Queries after RoPE, of whole prompts; `k` the keys.
        lengths: Prompt lengths [B]; may be traced.
        config: Hyperparameters. Where at most `config.fetch` blocks are left of the last window this is full attention.
        backend: Kernel backend of the estimate.

    Returns:
        Lists of every query head [B, Hq, N, C], alike in a group; C is window / b + 1 + fetch.
    """
    b, group, tiles = config.block_size, q.shape[2] // k.shape[2], cdiv(k.shape[1], config.block_size)
    fetched = fetched_blocks_of(q, k, lengths, config, backend)
    tile = jnp.arange(tiles, dtype=jnp.int32)[:, None]
    local = tile - jnp.arange(config.window // b + 1, dtype=jnp.int32)  # nearest first; below 0 left of the prompt
    local = jnp.broadcast_to(local, (*fetched.shape[:2], *local.shape))
    blocks = jnp.concatenate([local, fetched], axis=-1)
    # A tile with fetched blocks has a whole window, so the blocks that count stand in front.
    counts = (blocks >= 0).sum(axis=-1, dtype=jnp.int32)
    distances = (tile - jnp.maximum(blocks, 0) + 1) * b
    return BlockLists(*(jnp.repeat(x, group, axis=1) for x in (distances, counts)))
