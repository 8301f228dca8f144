"""Rows of budgets: the choice by calibration scores (Algorithm 1), and what rows keep of a prompt."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32

from tca_jax.errors import UserError
from tca_jax.methods.candidates import budget_counts, budget_sizes
from tca_jax.methods.checks import least_share
from tca_jax.methods.config import TCAConfig

#: In place of a row: none, as of a head whose reading selects nothing.
NO_ROW = -1


def choose_candidates(scores: Float[Array, "*heads M1"], tau: float) -> Int32[Array, "*heads"]:
    """The sparsest candidate whose score reaches `tau`; the last one, dense, where none does."""
    reached = (scores >= tau).at[..., -1].set(True)
    return jnp.argmax(reached, axis=-1).astype(jnp.int32)


def require_fit(kept: float, tokens: int, config: TCAConfig) -> None:
    """Raises ValueError if row 0 in every head takes more than a kept share of the cache of so many tokens."""
    row0 = np.zeros(1, np.int32)
    least = kept_share(config, tokens, row0, row0).mean()
    if least > kept:
        raise UserError(
            f"kept = {kept}: must be at least {least_share(least)}, what window, reserve and row 0 take of the cache "
            f"of {tokens} tokens; a smaller window takes less"
        )


def kept_share(
    config: TCAConfig,
    tokens: int,
    rows: Int32[np.ndarray, "*heads"],
    prefill_rows: Int32[np.ndarray, "*heads"],
) -> Float64[np.ndarray, "*heads"]:
    """Share of a full cache's tokens that a prompt leaves in the cache of heads with such rows.

    Kept are at each rank the larger budget of the two rows, the reserve (which may hold tokens that the budgets hold
    too, so this is a bound), and every token right of the ranked blocks. A prefill row of `NO_ROW` asks for nothing.
    """
    ranked = config.num_ranked_blocks(tokens)
    ranked_tokens = ranked * config.block_size
    # Budgets ascend with rank: blocks of at most k tokens under the larger of two are the fewer of either.
    at_most = np.cumsum(budget_counts(config, ranked).astype(np.int64), axis=-1)
    beside = np.where(prefill_rows == NO_ROW, rows, prefill_rows)
    blocks = np.diff(np.minimum(at_most[rows], at_most[beside]), axis=-1, prepend=0)
    selected = np.minimum(blocks @ budget_sizes(config) + config.reserve_tokens, ranked_tokens)
    return (selected + tokens - ranked_tokens) / np.float64(tokens)
