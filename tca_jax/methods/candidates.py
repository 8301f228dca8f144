"""Candidate budget distributions (Eq. 4), and how blocks are shared out among the budgets (Eq. 7)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, Int, Int32

from tca_jax.errors import check_integer, require_type
from tca_jax.methods.config import TCAConfig


def budget_sizes(config: TCAConfig) -> Int32[np.ndarray, " K"]:
    """Tokens a block may keep, {1, 2, 4, ..., b}, ascending [K]."""
    return np.int32(2) ** np.arange(config.block_size.bit_length(), dtype=np.int32)


@functools.lru_cache
def candidate_distributions(config: TCAConfig) -> Float64[np.ndarray, "M1 K"]:
    """Shares of the blocks that get each budget (Eq. 4), from the sparsest row to "dense", which puts all on b."""
    b, num = config.block_size, config.num_candidates
    log_sizes = np.log2(budget_sizes(config).astype(np.float64))
    centers = np.log2(1 + np.arange(num) * (b - 1) / (num - 1))
    weights = np.exp(-((log_sizes - centers[:, None]) ** 2) / (2 * config.sigma**2))
    # A sigma so small that every weight underflows means: all on the nearest budget.
    nearest = np.abs(log_sizes - centers[:, None]).argmin(axis=1)
    weights[np.arange(num), nearest] = np.maximum(weights[np.arange(num), nearest], np.finfo(np.float64).tiny)
    dense = np.zeros((1, log_sizes.size))
    dense[0, -1] = 1.0
    shares = np.concatenate([weights / weights.sum(axis=1, keepdims=True), dense])
    shares.flags.writeable = False
    return shares


def budget_counts(config: TCAConfig, num_blocks: int | Int[np.ndarray, "*N"]) -> Int32[np.ndarray, "*N M1 K"]:
    """Ranked blocks that get each budget: Eq. 7 by largest remainder; ties go to the smaller budget."""
    blocks = np.asarray(num_blocks)[..., None, None]
    quotas = blocks * candidate_distributions(config)  # [..., M + 1, K]
    floors = np.floor(quotas)
    rest = blocks - floors.sum(axis=-1, keepdims=True)
    order = np.argsort(floors - quotas, axis=-1, kind="stable")  # largest remainder first
    return (floors + (np.argsort(order, axis=-1) < rest)).astype(np.int32)


@functools.lru_cache(maxsize=64)
def budget_count_table(config: TCAConfig, max_blocks: int) -> Int32[np.ndarray, "N M1 K"]:
    """`budget_counts` for 0 to `max_blocks` blocks, to be indexed by a traced n."""
    table = budget_counts(config, np.arange(max_blocks + 1))
    table.flags.writeable = False
    return table


def candidate_budgets(config: TCAConfig, num_blocks: int) -> Int32[Array, "M1 n"]:
    """Psi of every candidate: the token budgets that `num_blocks` blocks get, lowest rank first (Eq. 7).

    Args:
        config: The method's hyperparameters.
        num_blocks: Ranked blocks n of a prompt, `config.num_ranked_blocks(length)`.

    Returns:
        int32 [M + 1, num_blocks], rows ascending; the last row, "dense", is b throughout.

    Raises:
        ValueError: `num_blocks` is no integer, or negative.
        TypeError: `config` is no TCAConfig.
    """
    require_type("config", config, TCAConfig, "a TCAConfig")
    check_integer("num_blocks", num_blocks, at_least=0)
    sizes = budget_sizes(config)
    return jnp.asarray(np.stack([np.repeat(sizes, row) for row in budget_counts(config, num_blocks)]))


def eviction_budgets(config: TCAConfig) -> Int32[np.ndarray, " M1"]:
    """Tokens kept of a block that leaves the window in decode, max(1, floor(sum_k k p_k)) [M + 1]."""
    return np.maximum(1, np.floor(candidate_distributions(config) @ budget_sizes(config))).astype(np.int32)


@functools.lru_cache(maxsize=4096)
def region_capacity(config: TCAConfig, candidate: int, max_blocks: int) -> int:
    """Most tokens that a head selects from a prompt of at most `max_blocks` ranked blocks, its reserve included."""
    # Over all n, not at `max_blocks` alone: largest remainder is not monotone in n.
    at_most = np.cumsum(budget_count_table(config, max_blocks)[:, candidate], axis=-1)  # [N, K]
    return int(_most_selected(config, at_most, np.arange(max_blocks + 1)).max())


def kept_share(
    config: TCAConfig, tokens: int, candidates: Int32[np.ndarray, "*heads"]
) -> Float64[np.ndarray, "*heads"]:
    """Share of a prompt's tokens that the cache of each head keeps at most: selected tokens and the window."""
    ranked = config.num_ranked_blocks(tokens)
    at_most = np.cumsum(budget_counts(config, ranked).astype(np.int64), axis=-1)
    selected = _most_selected(config, at_most[candidates], ranked)
    return (selected + tokens - ranked * config.block_size) / np.float64(tokens)


def _most_selected(config: TCAConfig, at_most: Int[np.ndarray, "*n K"], blocks: int | np.ndarray) -> np.ndarray:
    """Most tokens that a head selects from ranked blocks, of which `at_most` get 1, 2, 4, ... tokens or fewer."""
    kept = np.diff(at_most, axis=-1, prepend=0) @ budget_sizes(config) + config.reserve_tokens
    return np.minimum(kept, blocks * config.block_size)
