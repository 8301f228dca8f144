"""Attention of probes over what rows have left of the text before them, a tile of queries at a time.

Probes are packed into one sequence of columns; each is read behind the text alone and sees no other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from tca_jax.calibration.text_losses import LayerText
from tca_jax.methods.config import TCAConfig
from tca_jax.methods.selection import row_budgets
from tca_jax.pallas_kernels.numerics import MASKED, scaled_scores, weighted_sum
from tca_jax.pallas_kernels.select_tokens import selection_mask

_TILE_ELEMENTS = 2**27  # scores of a tile: 512 MiB
_LARGEST_TILE = 256  # queries


class KeptText(NamedTuple):
    """A text in a layer, and what heads keep of it."""

    text: LayerText  # what the layer has of it
    rows: Int32[Array, " Hkv"]  # cache rows of its heads
    # Row 0 of heads that have read sparse, which keep at least what it keeps; cache rows of others.
    prefill_rows: Int32[Array, " Hkv"]
    numbers: Int32[Array, " Hkv"]  # of the heads, in the model

    def tokens(self, lengths: Int32[Array, " 1"], config: TCAConfig) -> Bool[Array, "Hkv L"]:
        """Tokens that the rows have left of it."""
        scores, rows = self.text.scores, (self.rows, self.prefill_rows)
        budgets = jnp.maximum(*(row_budgets(scores, each, lengths, config, self.numbers) for each in rows))
        selected = selection_mask(scores.ranking, budgets, block_size=config.block_size)[0]
        position, ranked_tokens = jnp.arange(selected.shape[1]), config.num_ranked_blocks(lengths) * config.block_size
        return (selected | (position >= ranked_tokens)) & (position < lengths)


def attend_probes(
    q: Float[Array, "1 P Hq d"],  # queries of the probes after RoPE; `k` and `v` their keys and values
    k: Float[Array, "1 P Hkv d"],
    v: Float[Array, "1 P Hkv d"],
    gates: Float32[Array, " Hkv"] | None,  # of each KV head, from what it keeps at 0 to the whole text at 1; None for 0
    kept: KeptText,  # the text
    probe: Int32[Array, " P"],  # number of the probe that each column belongs to
    lengths: Int32[Array, " 1"],  # tokens of the text
    config: TCAConfig,  # hyperparameters
) -> Float[Array, "1 P Hq d"]:
    """Attention of probes' queries over what is kept of the text before them, and causally over their own probe.

    Nothing is evicted while a probe is read, so that all it misses is what the selection at the text's end dropped.
    """
    (_, count, heads, dim), (_, tokens, kv_heads, _) = q.shape, kept.text.k.shape
    size = max(1, min(count, _LARGEST_TILE, _TILE_ELEMENTS // (heads * (tokens + count))))
    # Heads first, once: what the tiles multiply is then laid out as matrix products want it.
    keys, values = (
        jnp.moveaxis(jnp.concatenate(pair, axis=1)[0], 1, 0) for pair in ((kept.text.k, k), (kept.text.v, v))
    )
    whole, kept_tokens = (jnp.arange(tokens) < lengths)[None], kept.tokens(lengths, config)

    def tiles(x: Array) -> Array:
        return jnp.pad(x, ((0, -count % size), *((0, 0),) * (x.ndim - 1))).reshape(-1, size, *x.shape[1:])

    @jax.checkpoint
    def of_tile(tile: tuple[Array, Array, Array]) -> Float32[Array, "t Hkv G d"]:
        queries, columns, probes = tile
        own = (jnp.arange(count) <= columns[:, None]) & (probe == probes[:, None])  # [t, P]
        scores = scaled_scores("hgtd,hld->hgtl", jnp.moveaxis(queries, 0, 2), keys)

        def weights(of_text: Bool[Array, "H T"]) -> Float32[Array, "Hkv G t L"]:
            """Over some tokens of the text, and the own probe's."""
            of_text = jnp.broadcast_to(of_text[:, None], (len(of_text), size, tokens))
            seen = jnp.concatenate([of_text, jnp.broadcast_to(own, (len(of_text), size, count))], axis=-1)
            return jax.nn.softmax(jnp.where(seen[:, None], scores, MASKED))

        attended = weights(kept_tokens)
        if gates is not None:
            attended += gates[:, None, None, None] * (weights(whole) - attended)
        return jnp.moveaxis(weighted_sum("hgtl,hld->hgtd", attended, values), 2, 0)

    queries = tiles(q.reshape(count, kv_heads, -1, dim))
    out = jax.lax.map(of_tile, (queries, tiles(jnp.arange(count)), tiles(probe)))
    return out.reshape(1, -1, heads, dim)[:, :count].astype(q.dtype)
