"""Tokens appended to rows, a block at a time, each as decoding would have fed it.

Rows are aligned to blocks: the token of row i at position p lies in column p - (start_i // b) b, so the edges of blocks
coincide in all rows, and a layer is one scan over blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from tca_jax.engine.decode import evict_block
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, LAYER_WEIGHTS, ROWS, SAME, OverMesh, heads_of
from tca_jax.engine.pages import Rows
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.read import OUT, Calls, static_layer
from tca_jax.methods.base import UNBOUNDED, ScoredCache
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv, round_up
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.programs import Program

_PIECE_TOKENS = 2048  # of a row in one pass over the layers: enough for matrix products at full speed


def num_columns(most_columns: int, block_size: int) -> int:
    """Columns that programs are compiled for: a bucket of blocks, or a multiple of pieces."""
    blocks = bucket_length(cdiv(most_columns, block_size), smallest=1)
    piece = _piece_blocks(block_size)
    return block_size * (blocks if blocks <= piece else round_up(blocks, piece))


def align(
    tokens: Int[np.ndarray, "B L"], starts: Int[np.ndarray, " B"], *, block_size: int, columns: int
) -> Int[np.ndarray, "B S"]:
    """Right-padded rows moved to the columns that `feed` wants them in.

    Returns:
        int32 `[B, S]`; what lies beside a row's tokens is arbitrary.
    """
    places = np.arange(columns) - (starts % block_size)[:, None]
    return np.take_along_axis(tokens, np.clip(places, 0, tokens.shape[1] - 1), axis=1)


class Fed(NamedTuple):
    """Rows with more tokens."""

    rows: Rows
    logits: Float32[Array, "R V"]  # of the token after each row's last
    # The last layer's output in every column, normed, arbitrary where there is no new token; None unless asked for.
    hidden: Float[Array, "R S D"] | None


class Where(NamedTuple):
    """Where appended tokens of each row are."""

    first: Int[Array, " R"]  # position of column 0, a multiple of b
    starts: Int[Array, " R"]  # of the first new token: tokens that were there before
    ends: Int[Array, " R"]  # past the last


def feed(
    lm: LM,
    rows: Rows,  # overwritten
    tokens: Int[Array, "R S"],  # as `align` lays them out; S is of `num_columns`
    starts: Int[Array, " R"],  # tokens in the rows, at least 1
    lengths: Int[Array, " R"],  # tokens to append; a row of none stays as it is, and its logits mean nothing
    calls: Calls,
    *,
    keep_hidden: bool = False,
    watch: Callable[[int, Where, Array, Rows], None] | None = None,  # gets the queries [R, n, Hq, d] of each layer
    backend: Backend = "auto",
) -> Fed:
    """Appends tokens to rows, as if decoding had fed them, however they are split into calls."""
    lm, b = lm.for_programs(), lm.method.cache.block_size
    piece = min(tokens.shape[1], b * _piece_blocks(b))
    options: dict[str, Any] = {"graphdef": lm.layer_graphdef, "queries": watch is not None, "backend": backend}
    bare, outer = lm.without_weights(), lm.without_layers()
    last = jnp.zeros((tokens.shape[0], lm.config.hidden_size), lm.dtype)
    where, found = Where(starts // b * b, starts, starts + lengths), []
    for place in range(0, tokens.shape[1], piece):
        here = where._replace(first=where.first + place)
        x, cos, sin = calls(_feed_begin_program, outer, tokens[:, place : place + piece], here)
        begin = rows.start
        for layer in range(lm.config.num_layers):
            given = bare, lm.layer_params(layer), x, rows, cos, sin, here, calls.number(layer)
            if layer == 0 or lm.method.layers_differ:
                program = calls.prepare(_feed_program, *given, **options, layer=static_layer(lm.method, layer))
            x, rows, begin, q = program(*given)
            if watch is not None:
                watch(layer, here, q, rows)
        hidden, last, rows = calls(_feed_end_program, outer, x, last, rows, begin, here)
        found += [hidden] * keep_hidden
    return Fed(rows, calls(_logits_program, outer, last), jnp.concatenate(found, axis=1) if found else None)


def _feed_begin(lm: LM, tokens: Int[Array, "R S"], here: Where) -> tuple[Array, Array, Array]:
    positions = here.first[:, None] + jnp.arange(tokens.shape[1])
    positions = jnp.clip(positions, 0, here.ends[:, None] - 1)
    return lm.decoder.embed(tokens), *lm.decoder.angles(positions)


def _feed_layer(
    lm: LM,  # without weights
    weights: Any,
    x: Float[Array, "R S D"],
    rows: Rows,
    cos: Array,
    sin: Array,
    here: Where,
    number: Int[Array, ""],
    *,
    graphdef: Any,
    backend: Backend,
    queries: bool,
    layer: int | None,
) -> tuple[Array, Rows, Array, Array | None]:
    """A layer of appended tokens: for each block evicts, writes the new tokens, attends."""
    module, index, policy = nnx.merge(graphdef, weights), number if layer is None else layer, lm.method.cache
    heads, settings, scores = heads_of(lm.head_shards, index, rows.kept.shape[2]), lm.settings_of(index), None
    b = rows.page_size
    if isinstance(policy, ScoredCache):
        settings = policy.of_heads(settings, heads)
        positions = here.first[:, None] + jnp.arange(x.shape[1])
        scores = policy.score(settings, module.attention_norm(x), positions).swapaxes(1, 2)

    def one_block(state: tuple[Rows, Array], block: tuple[Any, ...]) -> tuple[tuple[Rows, Array], Array]:
        (rows, start), (q, k, v, first, scores) = state, block
        if policy.window < UNBOUNDED:
            leaving = rows.are_full(first, start) & (first >= here.starts) & (first < here.ends)
            if isinstance(policy, ScoredCache):
                assert rows.scored is not None
                rows = rows.evict(index, leaving, policy.stays(settings, rows.scored.scores[index][..., :b]), start)
            else:
                token = q[:, 0], k[:, 0]
                rows = evict_block(policy, index, heads, *token, rows, start, first, leaving, backend, rare=True)
            start = start + jnp.where(leaving, b, 0)
        positions = first[:, None] + jnp.arange(b)
        new = (positions >= here.starts[:, None]) & (positions < here.ends[:, None])
        rows = rows.with_tokens(index, k, v, positions, new, start, scores)
        newest = jnp.minimum(here.ends, first + b) - 1
        pages = rows.of_layer(index, start)
        out, _ = paged_attention(q, pages, first, newest, window=policy.window, backend=backend)
        return (rows, start), out

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Rows, Array, Array | None]]:
        count = q.shape[1] // b
        parts = [
            None if y is None else jnp.swapaxes(y.reshape(y.shape[0], count, b, *y.shape[2:]), 0, 1)
            for y in (q, k, v, scores)
        ]
        firsts = here.first + b * jnp.arange(count)[:, None]
        state, out = jax.lax.scan(one_block, (rows, rows.start), (*parts[:3], firsts, parts[3]))
        return jnp.swapaxes(out, 0, 1).reshape(q.shape), (*state, q if queries else None)

    x, filled = module(x, cos, sin, attention, None)
    return x, *filled


def _feed_end(
    lm: LM, x: Float[Array, "R S D"], last: Float[Array, "R D"], rows: Rows, start: Int[Array, " R"], here: Where
) -> tuple[Array, Array, Rows]:
    hidden, place = lm.decoder.final_norm(x), here.ends - 1 - here.first
    picked = jnp.take_along_axis(hidden, jnp.clip(place, 0, x.shape[1] - 1)[:, None, None], axis=1)[:, 0]
    inside = (place >= 0) & (place < x.shape[1])
    length = jnp.clip(here.first + x.shape[1], here.starts, here.ends)
    return hidden, jnp.where(inside[:, None], picked, last), dataclasses.replace(rows, start=start, length=length)


def _logits(lm: LM, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
    return lm.decoder.logits(hidden)


_feed_begin_program = Program(OverMesh(_feed_begin, (ROWS, ROWS), (ROWS, ROWS, ROWS)))
_feed_program = Program(
    OverMesh(_feed_layer, (LAYER_WEIGHTS, ROWS, CACHES, ROWS, ROWS, ROWS, SAME), (ROWS, CACHES, ROWS, OUT)),
    donate=(2, 3),
    one_layer=True,
)
_feed_end_program = Program(OverMesh(_feed_end, (ROWS, ROWS, CACHES, ROWS, ROWS), (ROWS, ROWS, CACHES)), donate=(3,))
_logits_program = Program(OverMesh(_logits, (ROWS,), ROWS))


def _piece_blocks(block_size: int) -> int:
    return max(1, _PIECE_TOKENS // block_size)
