"""MInference's offline search: how much of its attention each query head keeps under each candidate pattern."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import SAME, on_host
from tca_jax.engine.prompts import Prompt, encode_prompts
from tca_jax.errors import check_integer, require
from tca_jax.lab.rivals.compression import over_heads
from tca_jax.lab.rivals.minference import HeadPattern, PatternArrays, best_blocks, lines
from tca_jax.layer_passes import HEADS, TextPass, attention_program
from tca_jax.pallas_kernels.causal_attention import causal_attention
from tca_jax.pallas_kernels.numerics import cdiv, scaled_scores

#: What the published search compares. Sizes of a block-sparse head play no part: it keeps an eighth of blocks of 32.
CANDIDATES = (
    HeadPattern("a_shape", 100, 800),
    HeadPattern("vertical_slash", 30, 800),
    HeadPattern("vertical_slash", 100, 750),
    HeadPattern("vertical_slash", 500, 700),
    HeadPattern("vertical_slash", 3500, 100),
    HeadPattern("block_sparse", 8, 1),
)
#: Queries before this one do not count: what they attend to is near.
FIRST_QUERY = 2500
_SEARCH_BLOCK, _SEARCH_PARTS = 32, 8
_NEAREST_DIAGONALS = 30  # that a vertical-slash head takes first: in the search fewer than in inference
_ROWS = 64  # queries at once


def pattern_scores(
    q: Float[Array, "B L Hq d"],
    k: Float[Array, "B L Hkv d"],
    lengths: Int[Array, " B"],
    candidates: tuple[HeadPattern, ...] = CANDIDATES,
    first_query: int = FIRST_QUERY,
) -> Float32[Array, "B Hq P"]:
    """Attention mass that each head keeps under each candidate, mean over its queries from `first_query` on."""
    length, column = q.shape[1], jnp.arange(q.shape[1])

    def one_head(queries: Float[Array, "B L G d"], keys: Float[Array, "B L d"]) -> Float32[Array, "B G P"]:
        kept_by = [_kept(candidate, queries, keys, lengths) for candidate in candidates]

        def rows(step: Array) -> Float32[Array, "B G P"]:
            number = step * _ROWS + jnp.arange(_ROWS)
            counts = (number >= first_query) & (number < lengths[:, None])  # [B, R]
            position = jnp.minimum(number, length - 1)
            seen = ((column <= position[:, None]) & (column < lengths[:, None, None]))[:, None]
            scores = scaled_scores("brgd,bld->bgrl", queries[:, position], keys)
            attention = jax.nn.softmax(scores, axis=-1, where=seen)
            kept = [jnp.where(kept(position), attention, 0).sum(axis=-1) for kept in kept_by]
            return jnp.where(counts[:, None, :, None], jnp.stack(kept, axis=-1), 0).sum(axis=2)

        return jax.lax.map(rows, jnp.arange(cdiv(length, _ROWS))).sum(axis=0)

    sums = over_heads(one_head, q, k).reshape(len(q), -1, len(candidates))
    return sums / jnp.maximum(lengths - first_query, 1)[:, None, None]


def _kept(candidate: HeadPattern, q: Array, k: Array, lengths: Array) -> Callable[[Array], Bool[Array, "B G R L"]]:
    """What queries at some positions `[R]` attend to under a candidate."""
    length = q.shape[1]
    if candidate.kind == "block_sparse":
        number = max(1, cdiv(length, _SEARCH_BLOCK) // _SEARCH_PARTS)
        blocks = jnp.repeat(best_blocks(q, k, lengths, number, _SEARCH_BLOCK), _SEARCH_BLOCK, axis=-1)[..., :length]
        return lambda position: blocks[:, :, position // _SEARCH_BLOCK]
    if candidate.kind == "a_shape":  # the search's mask reaches one diagonal further
        candidate = candidate._replace(diagonals=candidate.diagonals + 1)
    own = PatternArrays(*map(jnp.asarray, PatternArrays.of((candidate,) * q.shape[2])))
    columns, diagonals = lines(q, k, lengths, own, _NEAREST_DIAGONALS)

    def of_lines(position: Int[Array, " R"]) -> Bool[Array, "B G R L"]:
        return columns[:, :, None] | diagonals[:, :, jnp.maximum(position[:, None] - jnp.arange(length), 0)]

    return of_lines


def search_patterns(
    lm: LM,
    text: Prompt,
    *,
    candidates: tuple[HeadPattern, ...] = CANDIDATES,
    first_query: int = FIRST_QUERY,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[list[Any]]]:
    """Finds a pattern for every query head by one pass of full attention over a text, layer after layer.

    Args:
        lm: The model.
        text: A text, or token ids, as long as the prompts to come; the published search takes 30,000 tokens.
        candidates: Patterns to compare; the first of equals is taken.
        first_query: Queries before this one do not count.
        progress: Called with the layers done and their number.

    Returns:
        For each layer a list with `[kind, columns, diagonals, kept]` a query head, `kept` the share of its attention
        that it keeps: what `methods.get("minference", patterns=...)` takes, and what JSON holds.
    """
    check_integer("first_query", first_query, at_least=0)
    require(candidates, "candidates = (): must hold at least one pattern")
    sequences = encode_prompts(lm, text, "text")
    require(len(sequences) == 1, f"text holds {len(sequences)} texts: must be one")
    tokens, layers = len(sequences[0]), lm.config.num_layers
    require(tokens > first_query, f"text has {tokens} tokens: must have more than first_query = {first_query}")
    tell, table = progress or (lambda done, total: None), list[list[Any]]()
    tell(0, layers)
    run = TextPass(lm, sequences[0], lambda: tell(len(table), layers))
    for kept in run.layers(_search_layer, candidates=tuple(candidates), first_query=first_query):
        by_kv_head = on_host(kept).reshape(lm.config.num_kv_heads, -1, len(candidates))
        own = lm.in_model_order(len(table), by_kv_head).reshape(-1, len(candidates))
        table.append([[*candidates[scores.argmax()], round(float(scores.max()), 6)] for scores in own])
    return table


@functools.partial(attention_program, static=("candidates", "first_query"), donate=True, outputs=(SAME, HEADS))
def _search_layer(
    q: Array, k: Array, v: Array, lengths: Array, candidates: tuple[HeadPattern, ...], first_query: int
) -> tuple[Array, Array]:
    """Full attention, and what its heads keep under each candidate."""
    scores = pattern_scores(q, k, lengths, candidates, first_query)[0]
    return causal_attention(q, k, v, lengths), scores
