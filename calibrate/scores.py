"""Calibration scores: how much of a text's attention each candidate keeps (Algorithm 1)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from tca_jax.methods.config import TCAConfig
from tca_jax.methods.queries import last_queries
from tca_jax.methods.selection import row_budgets, score_prompt
from tca_jax.pallas_kernels.checks import AnyArray, as_int32, check_range, check_shapes
from tca_jax.pallas_kernels.column_mass import column_mass
from tca_jax.pallas_kernels.ranking import selection_mask


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
    over the queries that have tokens left of their window (1 where none has) and over the group; "worth", which no
    layer's attention tells, gets the same.
    "column_mean" is Eq. 5, normalised: column averages summed over the selected tokens and those right of the
    ranked blocks, divided by their sum over all columns.

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
    masks = selected_by_row(q, k, lengths, config, heads)
    near, far = column_mass(q, k, lengths, block_size=config.block_size, window=config.window)
    score = _column_mean if config.criterion == "column_mean" else _retained_mass
    scores = jax.vmap(lambda mask: score(mask, near, far, lengths, config))(masks)
    return jnp.moveaxis(scores, 0, -1)


def selected_by_row(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    heads: Int[Array, " Hkv"] | None = None,
) -> Bool[Array, "M1 B Hkv L"]:
    """The tokens that every row of `candidate_budgets` selects from a text, the reserve among them.

    Args:
        q: Queries after RoPE; what lies past a length does not matter.
        k: Keys after RoPE.
        lengths: Tokens of each text, traced; the selection is made at its end.
        config: The method's hyperparameters.
        heads: As for `calibration_scores`.
    """
    scores = score_prompt(last_queries(q, lengths, config.num_queries), k, lengths, config)

    def of_row(row: Int32[Array, ""]) -> Bool[Array, "B Hkv L"]:
        budgets = row_budgets(scores, jnp.broadcast_to(row, k.shape[2]), lengths, config, heads)
        return selection_mask(scores.ranking, budgets, block_size=config.block_size)

    return jax.vmap(of_row)(jnp.arange(config.num_candidates + 1, dtype=jnp.int32))


def _retained_mass(
    mask: Bool[Array, "B Hkv L"],
    near: Float32[Array, "B Hkv L"],
    far: Float32[Array, "B Hkv L"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
) -> Float32[Array, "B Hkv"]:
    # Query i has tokens left of its window iff B(i) b > w, that is i >= w + b.
    queries = jnp.maximum(0, lengths - config.window - config.block_size)[:, None]
    return 1 - jnp.where(mask, 0, far).sum(axis=-1) / jnp.maximum(queries, 1)


def _column_mean(
    mask: Bool[Array, "B Hkv L"],
    near: Float32[Array, "B Hkv L"],
    far: Float32[Array, "B Hkv L"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
) -> Float32[Array, "B Hkv"]:
    position = jnp.arange(mask.shape[-1])
    means = (near + far) / jnp.maximum(1, lengths[:, None] - position)[:, None]  # [B, Hkv, L]; zero past a length
    ranked = config.num_ranked_blocks(lengths)
    kept = mask | (position >= ranked[:, None] * config.block_size)[:, None]
    # One minus what is dropped: exactly 1 where nothing is.
    return 1 - jnp.where(kept, 0, means).sum(axis=-1) / means.sum(axis=-1)
