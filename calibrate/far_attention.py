"""Attention mass of a probe's queries on the far tokens of the text before it that each row would drop.

A tile of probe queries goes against all keys at a time, so memory is O(L) times the tile, never L x L.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.calibration.scores import selected_by_row
from tca_jax.methods.config import TCAConfig
from tca_jax.pallas_kernels.integers import cdiv
from tca_jax.pallas_kernels.kernel_math import divide_up
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores

_TILE_ELEMENTS = 2**27  # scores of a tile: 512 MiB
_LARGEST_TILE = 256  # queries


def far_tokens(starts: Int[Array, " B"], length: int, config: TCAConfig) -> Bool[Array, "B L"]:
    """Those of the ranked blocks of a text of `starts` tokens: what its selection chooses from."""
    return jnp.arange(length) < (config.num_ranked_blocks(starts) * config.block_size)[:, None]


def dropped_by_row(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    config: TCAConfig,
    most: int,
    heads: Int[Array, " Hkv"] | None = None,
) -> Float32[Array, "B Hkv P M1"]:
    """Attention mass of the probe's queries on far tokens that every row dropped at the text's end.

    The mass is that of the exact causal softmax over all tokens, the maximum over the group.

    Args:
        q: Queries after RoPE, of text and probe.
        k: Keys after RoPE.
        starts: First position of each row's probe, T; the selection is made from the text before it.
        lengths: Tokens of text and probe.
        config: The method's hyperparameters.
        most: Queries of the longest probe, P; static.
        heads: As for `calibration_scores`.

    Returns:
        In [0, 1]: column c is the query at position starts + c, 0 where the probe has ended. 0 for the dense row.
    """
    selected = jnp.moveaxis(selected_by_row(q, k, starts, config, heads), 0, -1)  # [B, Hkv, L, M + 1]
    dropped = far_tokens(starts, k.shape[1], config)[:, None, :, None] & ~selected

    def of_text(text: tuple[Array, ...]) -> Float32[Array, "Hkv P M1"]:
        q, k, dropped, start, length = text
        # A column of ones beside the rows: their sums and the softmax's normaliser come from one product.
        weights = jnp.pad(dropped.astype(jnp.float32), ((0, 0), (0, 0), (0, 1)), constant_values=1)

        def mass(scores: Float32[Array, "Hkv G t L"]) -> Float32[Array, "Hkv t M1"]:
            unscaled = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
            sums = jnp.einsum("hgtl,hlm->hgtm", unscaled, weights, precision=jax.lax.Precision.HIGHEST)
            return jnp.minimum(sums[..., :-1] / sums[..., -1:], 1).max(axis=1)

        return _over_probe(mass, dropped.shape[-1], q, k, start, length, most)

    return jax.lax.map(of_text, (q, k, dropped, starts, lengths))


def tile_size(queries: int, heads: int, keys: int) -> int:
    """Queries whose scores are computed at once."""
    return max(1, min(queries, _LARGEST_TILE, _TILE_ELEMENTS // (heads * keys)))


def _over_probe(
    of_tile: Callable[[Array], Array],
    width: int,
    q: Float[Array, "L Hq d"],
    k: Float[Array, "L Hkv d"],
    start: Int[Array, ""],
    length: Int[Array, ""],
    most: int,
) -> Float32[Array, "Hkv P width"]:
    """Maps the scores of a tile of probe queries against all keys to `width` numbers each."""
    tokens, kv_heads, dim = k.shape
    group, columns = q.shape[1] // kv_heads, jnp.arange(tokens)
    keys = jnp.moveaxis(k, 1, 0)
    size = tile_size(most, q.shape[1], tokens)

    def one_tile(tile: Array, out: Float32[Array, "Hkv N width"]) -> Float32[Array, "Hkv N width"]:
        position = start + tile * size + jnp.arange(size)
        queries = jnp.moveaxis(q.at[position].get(mode="clip").reshape(size, kv_heads, group, dim), 0, 2)
        scores = jnp.where(columns <= position[:, None], scaled_scores("hgtd,hld->hgtl", queries, keys), MASKED)
        part = jnp.where((position < length)[:, None], of_tile(scores), 0)
        return jax.lax.dynamic_update_slice_in_dim(out, part, tile * size, axis=1)

    empty = jnp.zeros((kv_heads, cdiv(most, size) * size, width), jnp.float32)
    return jax.lax.fori_loop(0, divide_up(length - start, size), one_tile, empty)[:, :most]
