"""The method's selection arithmetic: block density, budgets by rank (Eq. 6, 7), and the reserve beside them."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.methods.candidates import budget_count_table
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.regions import Selection
from tca_jax.pallas_kernels.observation_scores import observation_scores
from tca_jax.pallas_kernels.reserve_tokens import reserve_tokens
from tca_jax.pallas_kernels.token_scores import TokenScores, token_scores

_AHEAD = 2.0  # added to the score of a reserved token, which puts it in front of all others: no score passes 1


class PromptScores(NamedTuple):
    """All that a selection needs to know of a prompt, whatever the budgets."""

    scored: TokenScores  # token scores and block statistics
    # tokens of ranked blocks that every row of budgets keeps; None without a reserve or ranked blocks of this shape
    reserved: Bool[Array, "B Hkv L"] | None

    @property
    def ranking(self) -> Float32[Array, "B Hkv L"]:
        """Scores by which a block's tokens are ranked: reserved ones in front of all others."""
        scores = self.scored.scores
        return scores if self.reserved is None else jnp.where(self.reserved, scores + _AHEAD, scores)


def score_prompt(
    q_last: Float[Array, "B O Hq d"],  # `q_last[:, -a]` is at position length - a; ignored where that is negative
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
) -> PromptScores:
    """Scores every token of a prompt by its last query, and chooses the reserve by the last `config.observation`."""
    b = config.block_size
    with jax.named_scope("token_scores"):
        scored = token_scores(q_last[:, -1], k, lengths, block_size=b)
    if not (config.reserve_tokens and config.num_ranked_blocks(k.shape[1])):
        return PromptScores(scored, None)
    with jax.named_scope("reserve"):
        observed = observation_scores(q_last[:, -config.observation :], k, lengths, spread=config.spread)
        ranked_tokens = config.num_ranked_blocks(lengths) * b
        reserved = reserve_tokens(observed, ranked_tokens, reserve=config.reserve_tokens)
    return PromptScores(scored, reserved)


def row_budgets(
    prompt_scores: PromptScores,
    rows: Int[Array, " Hkv"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    heads: Int[Array, " Hkv"] | None = None,
) -> Int32[Array, "B Hkv nb"]:
    """Tokens that every ranked block keeps: Psi at its rank (Eq. 7), or its reserved tokens where these are more."""
    scored, reserved = prompt_scores
    ranked, b = config.num_ranked_blocks(lengths), config.block_size
    density = block_density(scored, ranked, config, heads)
    order = jnp.argsort(density, axis=-1, stable=True)  # ties go to the lower block
    rank = jnp.argsort(order, axis=-1)  # the inverse permutation
    # Psi[r] = 2^i for the first i whose counts up to and including i exceed r.
    table = jnp.asarray(budget_count_table(config, config.num_ranked_blocks(scored.scores.shape[-1])))
    ends = jnp.cumsum(table[ranked[:, None], rows], axis=-1)
    exponent = (rank[..., None] >= ends[..., None, :]).sum(axis=-1).astype(jnp.int32)
    is_ranked = jnp.arange(density.shape[-1]) < ranked[:, None, None]
    budgets = jnp.where(is_ranked, jnp.left_shift(jnp.int32(1), exponent), 0)
    if reserved is None:
        return budgets
    complete = reserved[..., : budgets.shape[-1] * b].reshape(*budgets.shape, b)
    return jnp.maximum(budgets, complete.sum(axis=-1, dtype=jnp.int32))


def block_density(
    token_scores: TokenScores,
    num_ranked: Int[Array, " B"],
    config: TCAConfig,
    heads: Int[Array, " Hkv"] | None = None,  # numbers in the model, on which "random" depends; None: all heads
) -> Float32[Array, "B Hkv nb"]:
    """Density by which blocks are ordered; the lowest gets the smallest budget (Eq. 6). +inf past the ranked blocks."""
    scores, mass, hhi = token_scores
    num_blocks = mass.shape[-1]
    if config.density == "random":
        heads = jnp.arange(mass.shape[1]) if heads is None else heads
        density = jnp.broadcast_to(_random_density(config.seed, heads, num_blocks), mass.shape)
    else:
        index = hhi if config.index == "hhi" else _entropy_index(scores, mass, config.block_size)
        density = (1 - config.alpha) * mass + config.alpha * (1 - index if config.density == "paper" else index)
    return jnp.where(jnp.arange(num_blocks) < num_ranked[:, None, None], density, jnp.inf)


def select_by_candidates(
    q_last: Float[Array, "B O Hq d"],
    k: Float[Array, "B L Hkv d"],
    candidates: Int[Array, " Hkv"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    heads: Int[Array, " Hkv"] | None = None,
) -> Selection:
    """Scores a prompt's tokens once and distributes each head's budgets over its blocks."""
    scores = score_prompt(q_last, k, lengths, config)
    with jax.named_scope("select"):
        return Selection(scores.ranking, row_budgets(scores, candidates, lengths, config, heads))


def _entropy_index(
    scores: Float32[Array, "B Hkv L"], mass: Float32[Array, "B Hkv nb"], block_size: int
) -> Float32[Array, "B Hkv nb"]:
    """One minus the normalised entropy: 1 for a single token, 0 for a flat block and where the mass is 0."""
    if block_size == 1:
        return jnp.ones_like(mass)
    blocks = scores[..., : mass.shape[-1] * block_size].reshape(*mass.shape, block_size)
    shares = blocks / jnp.where(mass > 0, mass, 1)[..., None]
    entropy = jax.scipy.special.entr(shares).sum(axis=-1)
    return jnp.where(mass > 0, 1 - entropy / math.log(block_size), 0)


def _random_density(seed: int, heads: Int[Array, " Hkv"], num_blocks: int) -> Float32[Array, "Hkv nb"]:
    """Uniform draws that depend on (seed, head, block) alone, not on padding or a row's place in a batch."""

    def draw(head: Array, block: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), head), block))

    over_blocks = jax.vmap(draw, in_axes=(None, 0))
    return jax.vmap(over_blocks, in_axes=(0, None))(heads, jnp.arange(num_blocks))
