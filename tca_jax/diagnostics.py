"""Diagnostics: the attention mass that TCA drops, and the error bounds of Theorem 1 that follow from it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.functional import checked, select
from tca_jax.methods.base import last_queries
from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.checks import AnyArray, check_shapes
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores

_TILE_ELEMENTS = 2**26  # scores of a tile of queries: 256 MiB


class ErrorBounds(NamedTuple):
    """Bounds on |Att - Att~| of every query (Theorem 1)."""

    max_norm: Float32[Array, "B Hq L"]  # on the largest component: 2 gamma max|V|
    # On the sum of the components: 2 gamma max_j |V_j|_1. The paper has max|V| here, which lacks a factor of up to d.
    l1_norm: Float32[Array, "B Hq L"]


def dropped_mass(
    q: Float[AnyArray, "B L Hq d"],
    k: Float[AnyArray, "B L Hkv d"],
    candidates: Int[AnyArray, " Hkv"],
    lengths: Int[AnyArray, " B"],
    config: TCAConfig,
) -> Float32[Array, "B Hq L"]:
    """Gamma of Theorem 1: every query's full-attention mass on tokens that are neither local nor selected.

    Args:
        q: Queries after RoPE [B, L, Hq, d]; query head h belongs to KV head h // (Hq // Hkv).
        k: Keys after RoPE [B, L, Hkv, d], right-padded.
        candidates: Row of `candidate_budgets` for every KV head [Hkv]; may be traced.
        lengths: Prompt lengths [B], at least 1; may be traced.
        config: The method's hyperparameters; static under `jax.jit`.

    Returns:
        float32 [B, Hq, L] in [0, 1]; 0 past a length.

    Raises:
        ValueError: a shape is not allowed, or a candidate or length, where known, is out of range.
        TypeError: something is no array of its type, the types of q and k differ, or `config` is no TCAConfig.
    """
    tokens = {"q": (q, "B L Hq d"), "k": (k, "B L Hkv d")}
    q, k, candidates, lengths = checked(tokens, candidates, lengths, config)
    selected = select(last_queries(q, lengths, config.num_queries), k, candidates, lengths, config)
    return _dropped_mass(q, k, selected, lengths, config)


def error_bounds(
    gamma: Float[AnyArray, "B Hq L"], v: Float[AnyArray, "B L Hkv d"], lengths: Int[AnyArray, " B"]
) -> ErrorBounds:
    """Theorem 1: how far attention over the kept tokens can be from full attention.

    Args:
        gamma: Dropped attention mass of every query, from `dropped_mass` [B, Hq, L].
        v: Values [B, L, Hkv, d]; padding does not matter.
        lengths: Prompt lengths [B]; may be traced.

    Returns:
        Both bounds, each float32 [B, Hq, L].

    Raises:
        ValueError: a shape is not allowed.
    """
    check_shapes({"gamma": (gamma, "B Hq L"), "v": (v, "B L Hkv d"), "lengths": (lengths, "B")})
    gamma, v, lengths = jnp.asarray(gamma), jnp.asarray(v), jnp.asarray(lengths)
    valid = (jnp.arange(v.shape[1]) < lengths[:, None])[..., None, None]
    sizes = jnp.where(valid, jnp.abs(v.astype(jnp.float32)), 0)
    group = gamma.shape[1] // v.shape[2]

    def bound(norm: Float[Array, "B Hkv"]) -> Float32[Array, "B Hq L"]:
        return 2 * gamma * jnp.repeat(norm, group, axis=1)[..., None]

    return ErrorBounds(bound(sizes.max(axis=(1, 3))), bound(sizes.sum(axis=-1).max(axis=1)))


@partial(jax.jit, static_argnames=("config",))
@jax.named_scope("dropped_mass")
def _dropped_mass(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    selected: Bool[Array, "B Hkv L"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
) -> Float32[Array, "B Hq L"]:
    batch, length, heads, head_dim = q.shape
    tokens = jnp.arange(length)

    def one_query(query: tuple[Array, Array]) -> Float32[Array, "B Hkv G"]:
        position, heads = query
        edge = jnp.maximum(0, position // config.block_size * config.block_size - config.window)
        scores = jnp.where(tokens <= position, scaled_scores("bhgd,blhd->bhgl", heads, k), MASKED)
        dropped = ~selected[:, :, None] & (tokens < edge)
        return jnp.minimum(jnp.where(dropped, jax.nn.softmax(scores, axis=-1), 0).sum(axis=-1), 1)

    queries = q.reshape(batch, length, k.shape[2], -1, head_dim).swapaxes(0, 1)
    tile = max(1, min(length, _TILE_ELEMENTS // (batch * heads * length)))  # memory stays O(L)
    gamma = jax.lax.map(one_query, (tokens, queries), batch_size=tile).reshape(length, batch, heads)
    return jnp.where(tokens < lengths[:, None, None], jnp.moveaxis(gamma, 0, 2), 0)
