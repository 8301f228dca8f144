"""Tokens appended to rows, a block at a time, each as decoding would have fed it.

Rows are aligned to blocks: the token of row i at position p is in column p - (start_i // b) b, so the edges of blocks
coincide in all rows, and a layer is one scan over blocks. Where scores say what stays of a block that leaves a window,
it leaves all layers at once, before the block that takes its place is fed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tca_jax.engine.decode import evict_block, evict_scored_block
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, WEIGHTS, OverMesh
from tca_jax.engine.pages import Rows
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.read import OUT, Calls
from tca_jax.methods.base import UNBOUNDED, CachePolicy
from tca_jax.models.projections import single_twice
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.numerics import cdiv
from tca_jax.pallas_kernels.paged_attention import paged_attention
from tca_jax.programs import MANY_TOKENS, Compiled, Program, ready, shapes_of

_MOST_SHAPES = 4  # of tables whose programs a feeder holds; they seldom change
_PASS_TOKENS = 2048  # of a row in one pass over the layers, at most: enough for matrix products at full speed


def pass_tokens(policy: CachePolicy, tokens: int) -> int:
    """Columns of a pass that feeds the first of `tokens`: 1, 4, 16, ... blocks, few programs; by scores one block."""
    size = policy.block_size
    while not policy.by_scores and 2 * size < tokens and 4 * size <= _PASS_TOKENS:
        size *= 4
    return size


def num_columns(most_columns: int, block_size: int) -> int:
    """Columns that programs are compiled for: a bucket of blocks."""
    return block_size * bucket_length(cdiv(most_columns, block_size), smallest=1)


def aligned(tokens: Int[Array, "R S"], here: Where, columns: int) -> Int[Array, "R columns"]:
    """Right-padded tokens in the columns from `here.first` on, arbitrary where there are none."""
    places = (here.first - here.starts)[:, None] + jnp.arange(columns)
    return jnp.take_along_axis(tokens, jnp.clip(places, 0, tokens.shape[1] - 1), axis=1)


class Where(NamedTuple):
    """Where appended tokens of each row are."""

    first: Int[Array, " R"]  # position of column 0, a multiple of b
    starts: Int[Array, " R"]  # of the first new token: tokens that were there before
    ends: Int[Array, " R"]  # past the last


def feed(
    lm: LM,
    rows: Rows,  # overwritten
    tokens: Int[Array | np.ndarray, "R S"],  # right-padded
    starts: Int[Array | np.ndarray, " R"],  # tokens in the rows, at least 1
    lengths: Int[Array | np.ndarray, " R"],  # tokens to append; of a row of none logits mean nothing
    calls: Calls,
    *,
    keep_hidden: bool = False,  # whether to return the last layer's output, normed, arbitrary without a new token
    watch: Callable[[int, Where, Array, Rows], None] | None = None,  # gets the queries [R, n, Hq, d] of each layer
    backend: Backend = "auto",
) -> tuple[Rows, Float32[Array, "R V"], Float[Array, "R S D"] | None]:
    """Appends tokens to rows, as decoding would feed them; also returns the logits after each row's last token."""
    lm, policy, b, column = lm.for_programs, lm.method.cache, lm.method.cache.block_size, 0
    options: dict[str, Any] = {"queries": watch is not None, "backend": backend}
    bare, outer = lm.without_weights, lm.without_layers
    logits, found = jnp.zeros((tokens.shape[0], lm.config.vocab_size), jnp.float32), []
    known = isinstance(lengths, np.ndarray) and not keep_hidden
    columns = int(np.max(starts % b + lengths)) if known else tokens.shape[1]
    while column < columns:
        size = pass_tokens(policy, columns - column)
        new = tokens, starts, lengths, calls.number(column, lm.mesh), rows
        x, cos, sin, here, rows = calls(_feed_begin_program, outer, *new, columns=size)
        for layer in range(lm.config.num_layers):
            given = bare, lm.layer_params(layer), x, rows, cos, sin, here, calls.number(layer, lm.mesh)
            if layer == 0 or lm.method.layers_differ:
                number = layer if lm.method.layers_differ else None
                program = calls.wait(calls.start(_feed_program, *given, **options, layer=number))
            x, rows, begin, q = program(*given)
            if watch is not None:
                watch(layer, here, q, rows)
        hidden, logits, rows = calls(_feed_end_program, outer, x, logits, rows, begin, here)
        found += [hidden] * keep_hidden
        column += size
    return rows, logits, jnp.concatenate(found, axis=1)[:, : tokens.shape[1]] if found else None


def _feed_begin(
    lm: LM,
    tokens: Int[Array, "R S"],
    starts: Int[Array, " R"],
    lengths: Int[Array, " R"],
    column: Int[Array, ""],
    rows: Rows,
    *,
    columns: int,
) -> tuple[Array, Array, Array, Where, Rows]:
    """Embeds tokens; by scores, blocks leave full windows first, for those that these tokens begin."""
    policy, b = lm.method.cache, lm.method.cache.block_size
    here = Where(starts // b * b + column, starts, starts + lengths)
    positions = jnp.minimum(here.first[:, None] + jnp.arange(columns), here.ends[:, None] - 1)
    if policy.by_scores and policy.window < UNBOUNDED:
        rows = evict_scored_block(lm, rows, _leaving(rows, rows.start, here.first, here))
    return lm.decoder.embed(aligned(tokens, here, columns)), *lm.decoder.angles(positions), here, rows


def _leaving(rows: Rows, start: Int[Array, " R"], first: Int[Array, " R"], here: Where) -> Bool[Array, " R"]:
    """Rows whose window is full when a new block begins at `first`."""
    return rows.are_full(first, start) & (first >= here.starts) & (first < here.ends)


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
    backend: Backend,
    queries: bool,
    layer: int | None,
) -> tuple[Array, Rows, Array, Array | None]:
    """A layer of appended tokens: for each block evicts, unless by scores, writes the new tokens, attends."""
    module, index, policy = lm.layer(weights), number if layer is None else layer, lm.method.cache
    b, scores = rows.page_size, lm.scores(index, module.attention_norm(x), here.first[:, None] + jnp.arange(x.shape[1]))
    scores = None if scores is None else scores.swapaxes(1, 2)

    def one_block(state: tuple[Rows, Array], block: tuple[Any, ...]) -> tuple[tuple[Rows, Array], Array]:
        (rows, start), (q, k, v, first, scores) = state, block
        if policy.window < UNBOUNDED and not policy.by_scores:
            leaving = _leaving(rows, start, first, here)
            given = lm.heads(index), q[:, 0], k[:, 0], rows, start, first, leaving
            rows = evict_block(policy, index, *given, backend, rare=True)
            start = start + jnp.where(leaving, b, 0)
        positions = first[:, None] + jnp.arange(b)
        new = (positions >= here.starts[:, None]) & (positions < here.ends[:, None])
        rows = rows.with_tokens(index, k, v, positions, new, start, scores)
        newest = jnp.minimum(here.ends, first + b) - 1
        pages = rows.of_layer(index, start, sliced=False)
        out, _ = paged_attention(q, pages, first, newest, window=policy.window, backend=backend)
        return (rows, start), out

    def attention(q: Array, k: Array, v: Array, _: None) -> tuple[Array, tuple[Rows, Array, Array | None]]:
        count = q.shape[1] // b
        blocks = jax.tree.map(lambda y: y.reshape(len(y), count, b, *y.shape[2:]).swapaxes(0, 1), (q, k, v, scores))
        firsts = here.first + b * jnp.arange(count)[:, None]
        state, out = jax.lax.scan(one_block, (rows, rows.start), (*blocks[:3], firsts, blocks[3]))
        return jnp.swapaxes(out, 0, 1).reshape(q.shape), (*state, q if queries else None)

    x, filled = module(x, cos, sin, attention, None)
    return x, *filled


def _feed_end(
    lm: LM, x: Float[Array, "R S D"], logits: Float32[Array, "R V"], rows: Rows, start: Int[Array, " R"], here: Where
) -> tuple[Array, Array, Rows]:
    hidden, place = lm.decoder.final_norm(x), here.ends - 1 - here.first
    picked = single_twice(jnp.take_along_axis(hidden, jnp.clip(place, 0, x.shape[1] - 1)[:, None, None], axis=1))
    logits = jnp.where(((place >= 0) & (place < x.shape[1]))[:, None], lm.decoder.logits(picked)[:, 0], logits)
    length = jnp.clip(here.first + x.shape[1], here.starts, here.ends)
    return hidden, logits, dataclasses.replace(rows, start=start, length=length)


_BEGUN: Any = ROWS, ROWS, ROWS, ROWS, CACHES
_feed_begin_program = Program(OverMesh(_feed_begin, (ROWS, ROWS, ROWS, SAME, CACHES), _BEGUN), donate=(5,))
_feed_over_mesh = OverMesh(_feed_layer, (WEIGHTS, ROWS, CACHES, ROWS, ROWS, ROWS, SAME), (ROWS, CACHES, ROWS, OUT))
_feed_program = Program(_feed_over_mesh, donate=(2, 3), on_gpu=MANY_TOKENS)
_feed_end_program = Program(OverMesh(_feed_end, (ROWS, ROWS, CACHES, ROWS, ROWS), (ROWS, ROWS, CACHES)), donate=(3,))


def _feed_block(
    lm: LM, rows: Rows, tokens: Array, starts: Array, lengths: Array, *, backend: Backend
) -> tuple[Rows, Float32[Array, "R V"]]:
    """`feed` of tokens that are of one block."""
    return feed(lm, rows, tokens, starts, lengths, Calls(traced=True), backend=backend)[:2]


_feed_block_program = Program(_feed_block, donate=(1,), on_gpu=MANY_TOKENS)


class Feeder:
    """`feed` for rows of a server. A GPU computes a block before the host has called its layers: one program has all.

    A thread compiles it, and until then the host calls layers, so that answers do not wait for it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._calls, self._started = backend, Calls(), dict[Any, Future[Compiled]]()

    def __call__(
        self, lm: LM, rows: Rows, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Rows, Float32[Array, "R V"]]:
        is_block = tokens.shape[1] == rows.page_size and _calls_are_slow(lm)
        given = lm, rows, tokens, starts, lengths
        program = self._program(*given) if is_block else None
        return program(*given) if program is not None else feed(*given, self._calls, backend=self._backend)[:2]

    def _program(self, lm: LM, rows: Rows, *tokens: np.ndarray) -> Compiled | None:
        key = rows.widths, rows.free.numbers.shape
        started = self._started.pop(key, None)
        if started is None:
            started = _feed_block_program.start_aside(lm, shapes_of(rows), *tokens, backend=self._backend)
        self._started[key] = started  # least recently used first
        if len(self._started) > _MOST_SHAPES:
            del self._started[next(iter(self._started))]
        return ready(started)


def _calls_are_slow(lm: LM) -> bool:
    return lm.mesh is None and jax.default_backend() == "gpu"
