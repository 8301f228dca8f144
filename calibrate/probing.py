"""Probe scores: how much of what a probe's queries need from far back each candidate keeps."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from tca_jax.calibration.far_attention import dropped_by_row
from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.checks import AnyArray, as_int32, check_range, check_shapes

_WORST_SHARE = 100  # one in so many queries counts where no probe tells which of them matter


def probe_scores(
    q: Float[AnyArray, "B L Hq d"],
    k: Float[AnyArray, "B L Hkv d"],
    lengths: Int[AnyArray, " B"],
    num_probe: Int[AnyArray, " B"],
    weights: Float[AnyArray, "B L"],
    config: TCAConfig,
) -> Float32[Array, "B Hkv M1"]:
    """Scores every candidate of every KV head on the queries of a probe behind a text.

    Every row selects at the text's end, before the probe. A query's dropped mass is that of its exact causal softmax on
    tokens of the ranked blocks that the row has not selected, the maximum over the group; the score is 1 minus its mean
    weighted by the queries' need.

    Args:
        q: Queries after RoPE, of text and probe [B, L, Hq, d].
        k: Keys after RoPE [B, L, Hkv, d].
        lengths: Tokens of text and probe [B], at least 1; may be traced.
        num_probe: How many of them, the last, are probe [B]; less than the length; may be traced.
        weights: Need of each query, at least 0 [B, L]; those of a text and past a length do not matter.
        config: The method's hyperparameters.

    Returns:
        float32 [B, Hkv, M + 1], in the order of `candidate_budgets`; the last, dense, is 1, and so are all where the
        weights sum to 0 or the text has no ranked block.

    Raises:
        ValueError: a shape is not allowed; where known, a length lies outside [1, L], or a probe leaves no text.
    """
    shapes = {"q": (q, "B L Hq d"), "k": (k, "B L Hkv d"), "lengths": (lengths, "B"), "num_probe": (num_probe, "B")}
    check_shapes({**shapes, "weights": (weights, "B L")})
    check_range("lengths", lengths, 1, k.shape[1])
    check_range("num_probe", num_probe, 0, k.shape[1] - 1)
    known = not isinstance(lengths, jax.core.Tracer) and not isinstance(num_probe, jax.core.Tracer)
    if known and (np.asarray(num_probe) >= np.asarray(lengths)).any():
        raise ValueError(
            f"num_probe = {np.asarray(num_probe).tolist()}: must be less than lengths = "
            f"{np.asarray(lengths).tolist()}, as a probe stands behind a text"
        )
    integers = as_int32("lengths", lengths), as_int32("num_probe", num_probe)
    return _probe_scores(jnp.asarray(q), jnp.asarray(k), *integers, jnp.asarray(weights), config)


@partial(jax.jit, static_argnames=("config",))
@jax.named_scope("probe_scores")
def _probe_scores(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    num_probe: Int[Array, " B"],
    weights: Float[Array, "B L"],
    config: TCAConfig,
) -> Float32[Array, "B Hkv M1"]:
    length = k.shape[1]
    starts = lengths - num_probe
    dropped = dropped_by_row(q, k, starts, lengths, config, most=length)
    columns = starts[:, None] + jnp.arange(length)
    needs = jnp.take_along_axis(weights, jnp.minimum(columns, length - 1), axis=1).astype(jnp.float32)
    needs = jnp.where(columns < lengths[:, None], needs, 0)
    # Multiplied and added in float32: a matrix product's rounding would let weights of one query shift another's.
    total = (dropped * needs[:, None, :, None]).sum(axis=2)
    return 1 - total / jnp.where(needs.sum(axis=1) > 0, needs.sum(axis=1), 1)[:, None, None]


def worst_dropped(dropped: Float32[Array, "B Hkv P M1"], counts: Int[Array, " B"]) -> Float32[Array, "B Hkv M1"]:
    """Mean dropped mass of each row's worst 1% of queries, at least one: for queries of whose need nothing is known.

    Args:
        dropped: From `dropped_by_row`.
        counts: Queries of each text, at least 1 where the result is of use.
    """
    most = -(-dropped.shape[2] // _WORST_SHARE)
    worst = -(-counts // _WORST_SHARE)[:, None, None, None]
    highest, _ = jax.lax.top_k(jnp.moveaxis(dropped, 2, 3), most)
    return jnp.where(jnp.arange(most) < worst, highest, 0).sum(axis=-1) / jnp.maximum(worst[..., 0], 1)
