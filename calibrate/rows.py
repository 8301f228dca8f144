"""The choice among candidates: each head's prefill row by calibration scores, its cache row by probe scores."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int32

from tca_jax.methods.candidates import budget_counts, budget_sizes
from tca_jax.methods.config import TCAConfig

_SPARSEST = np.zeros(1, np.int32)


def choose_candidates(scores: Float[Array, "*heads M1"], tau: float) -> Int32[Array, "*heads"]:
    """The sparsest candidate whose score reaches `tau`; the last one, dense, where none does."""
    reached = (scores >= tau).at[..., -1].set(True)
    return jnp.argmax(reached, axis=-1).astype(jnp.int32)


def choose_cache_rows(
    probe_scores: Float[np.ndarray, "*heads M1"], prefill_rows: Int32[np.ndarray, "*heads"], tau_probe: float
) -> Int32[np.ndarray, "*heads"]:
    """The sparsest row at or above the prefill row whose probe score reaches `tau_probe`; dense where none does."""
    reached = (probe_scores >= tau_probe) & (np.arange(probe_scores.shape[-1]) >= prefill_rows[..., None])
    reached[..., -1] = True
    return np.argmax(reached, axis=-1).astype(np.int32)


def densest_within(
    kept: float,
    tokens: int,
    probe_scores: Float[np.ndarray, "layers Hkv M1"],
    prefill_rows: Int32[np.ndarray, "layers Hkv"],
    config: TCAConfig,
    needed_rows: Int32[np.ndarray, "layers Hkv"] | None = None,
) -> Int32[np.ndarray, "layers Hkv"]:
    """Cache rows of which as many are dense as fit into a kept share; the heads of the worst probe scores come first.

    Args:
        kept: Largest mean share of a full cache's tokens, in (0, 1].
        tokens: Tokens of the prompt that the share is of.
        probe_scores: Probe score of every row; that of a head's prefill row ranks it, ties to the lower head.
        prefill_rows: What the heads keep that are not made dense.
        config: The method's hyperparameters.
        needed_rows: What they keep instead where that fits: rows between the sparsest and the dense one serve several
            heads for what one dense head takes.

    Raises:
        ValueError: the rows do not fit even with no dense head; the message tells the share that they take.
    """
    scores = np.take_along_axis(probe_scores, prefill_rows[..., None], axis=-1).ravel()
    prefill = prefill_rows.ravel()
    rows = prefill.copy()
    require_fit(kept, tokens, config, prefill)
    if needed_rows is not None and kept_share(config, tokens, needed_rows.ravel(), prefill).mean() <= kept:
        rows = needed_rows.ravel().copy()
    for head in np.argsort(scores, kind="stable"):
        denser = rows.copy()
        denser[head] = config.num_candidates
        if kept_share(config, tokens, denser, prefill).mean() > kept:
            break
        rows = denser
    return rows.reshape(prefill_rows.shape)


def require_fit(
    kept: float, tokens: int, config: TCAConfig, prefill_rows: Int32[np.ndarray, " heads"] = _SPARSEST
) -> None:
    """Raises ValueError if the prefill rows, by default the sparsest, take more than a kept share even of the cache."""
    least = kept_share(config, tokens, prefill_rows, prefill_rows).mean()
    if least > kept:
        raise ValueError(
            f"kept = {kept}: must be at least {least:.4f}, what window, reserve and prefill rows take of the "
            f"cache of {tokens} tokens"
        )


def kept_share(
    config: TCAConfig,
    tokens: int,
    rows: Int32[np.ndarray, "*heads"],
    prefill_rows: Int32[np.ndarray, "*heads"],
) -> Float64[np.ndarray, "*heads"]:
    """Share of a full cache's tokens that a prompt leaves in the cache of heads with such rows.

    Kept are at each rank the larger budget of the two rows, the reserve (which may hold tokens that the budgets hold
    too, so this is a bound), and every token right of the ranked blocks.
    """
    ranked = config.num_ranked_blocks(tokens)
    ranked_tokens = ranked * config.block_size
    # Budgets ascend with rank: blocks of at most k tokens under the larger of two are the fewer of either.
    at_most = np.cumsum(budget_counts(config, ranked).astype(np.int64), axis=-1)
    blocks = np.diff(np.minimum(at_most[rows], at_most[prefill_rows]), axis=-1, prepend=0)
    selected = np.minimum(blocks @ budget_sizes(config) + config.reserve_tokens, ranked_tokens)
    return (selected + tokens - ranked_tokens) / np.float64(tokens)
