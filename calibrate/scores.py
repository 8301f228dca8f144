"""Calibration as in the paper (Algorithm 1): how much of a text's attention each candidate keeps, and the choice."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from tca_jax.methods.base import last_queries
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import row_budgets, score_prompt
from tca_jax.pallas_kernels.checks import AnyArray, as_int32, check_range, check_shapes
from tca_jax.pallas_kernels.column_mass import column_mass
from tca_jax.pallas_kernels.select_tokens import selection_mask


def choose_candidates(scores: Float[Array, "*heads M1"], tau: float) -> Int32[Array, "*heads"]:
    """The sparsest candidate whose score reaches `tau`; the last one, dense, where none does."""
    reached = (scores >= tau).at[..., -1].set(True)
    return jnp.argmax(reached, axis=-1).astype(jnp.int32)


def calibration_scores(
    q: Float[AnyArray, "B L Hq d"],
    k: Float[AnyArray, "B L Hkv d"],
    lengths: Int[AnyArray, " B"],
    config: TCAConfig,
    *,
    heads: Int[Array, " Hkv"] | None = None,
) -> Float32[Array, "B Hkv M1"]:
    """Scores every candidate of every KV head on one layer's queries and keys (Algorithm 1).

    `config.criterion` says which score. "retained_mass" is the attention mass on local and selected tokens, averaged
    over the queries that have tokens left of their window (1 where none has) and over the group. "column_mean" is
    Eq. 5, normalised: column averages summed over the selected tokens and those right of the ranked blocks, divided by
    their sum over all columns.

    Args:
        q: Queries after RoPE [B, L, Hq, d].
        k: Keys after RoPE [B, L, Hkv, d].
        lengths: Lengths [B], at least 1; may be traced.
        config: The method's hyperparameters.
        heads: Numbers of the KV heads in the model, on which density "random" depends; None: they are all of them.

    Returns:
        float32 [B, Hkv, M + 1], in the order of `candidate_budgets`; the last, dense, is 1.

    Raises:
        ValueError: a shape is not allowed, or a length, where it is known, lies outside [1, L].
    """
    check_shapes({"q": (q, "B L Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B")})
    check_range("lengths", lengths, 1, k.shape[1])
    return _scores(jnp.asarray(q), jnp.asarray(k), as_int32("lengths", lengths), config, heads)


@partial(jax.jit, static_argnames=("config",))
@jax.named_scope("calibration_scores")
def _scores(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    heads: Int[Array, " Hkv"] | None,
) -> Float32[Array, "B Hkv M1"]:
    position = jnp.arange(k.shape[1])
    near, far = column_mass(q, k, lengths, block_size=config.block_size, window=config.window)
    if config.criterion == "column_mean":
        columns = (near + far) / jnp.maximum(1, lengths[:, None] - position)[:, None]  # zero past a length
        everything = columns.sum(axis=-1)
    else:
        # Query i has tokens left of its window iff B(i) b > w, that is i >= w + b; they are of ranked blocks.
        columns, everything = far, jnp.maximum(1, lengths - config.window - config.block_size)[:, None]
    scores = score_prompt(last_queries(q, lengths, config.num_queries), k, lengths, config)
    right = (position >= config.num_ranked_blocks(lengths)[:, None] * config.block_size)[:, None]

    def of_row(row: Int32[Array, ""]) -> Float32[Array, "B Hkv"]:
        budgets = row_budgets(scores, jnp.broadcast_to(row, k.shape[2]), lengths, config, heads)
        kept = selection_mask(scores.ranking, budgets, block_size=config.block_size) | right
        return 1 - jnp.where(kept, 0, columns).sum(axis=-1) / everything  # exactly 1 where nothing is dropped

    return jax.vmap(of_row, out_axes=-1)(jnp.arange(config.num_candidates + 1, dtype=jnp.int32))
