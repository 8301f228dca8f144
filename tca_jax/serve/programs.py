"""Programs of a serving engine, beside those that read prompts and append tokens: rows of the batch, steps, moves.

Tables without pool have no `k` and `v`, and no `free` unless a row has free pages of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, Key, UInt8

from tca_jax.engine.decode import STATE, DecodingState, Steps, draw
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, SAME, OverMesh
from tca_jax.engine.pages import Rows
from tca_jax.engine.sampling import Sampling
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import empty
from tca_jax.programs import Program


class RowSampling(NamedTuple):
    """How a row's tokens are drawn, beside `Sampling`."""

    key: Key[Array, ""]  # token t is drawn with `fold_in(key, t)`
    seen: Bool[Array, " V"] | None  # tokens of the row; None without a repetition penalty in the batch
    stop_tokens: Int32[Array, " S"]  # padded with the vocabulary's size
    min_new_tokens: Int32[Array, ""]
    allowed: UInt8[Array, " W"] | None  # packed mask of its first token; None for all tokens


class PackedOutput(NamedTuple):
    """Per-row output of a step. On the device it is one array: ten small copies to the host cost ten times one."""

    step: list[int]  # tokens that each row has drawn
    done: list[bool]  # whether a stop token was among them
    finite: list[bool]  # see `DecodingState`
    last: list[int]  # the last token

    @staticmethod
    def packed(state: DecodingState) -> Int32[Array, "4 R"]:
        """The array on the device."""
        return jnp.stack([x.astype(jnp.int32) for x in (state.step, state.done, state.finite, state.last)])

    @classmethod
    def of(cls, packed: Int32[np.ndarray, "4 R"]) -> PackedOutput:
        """The inverse, of an array on the host."""
        step, done, finite, last = packed
        return cls(step.tolist(), (done > 0).tolist(), (finite > 0).tolist(), last.tolist())


#: Fields of `Rows` that are a pool alone.
NO_TABLE: Any = dict.fromkeys(("free", "pages", "kept", "start", "own", "length", "scored"))
NO_TABLE |= {"window_pages": 0, "in_runs": False}


def _empty_pool(lm: LM, *, pages: int, dtype: jnp.dtype) -> Rows:
    k, v = (empty((pages, lm.method.cache.block_size, lm.config.head_dim), dtype) for _ in range(2))
    return Rows(k, v, **NO_TABLE)


def empty_state(lm: LM, rows: int, stops: int, cache: Any) -> DecodingState:
    """Ended rows without tokens; with room for a token of each, as the host gets the output of each step."""
    zeros = jnp.zeros(rows, jnp.int32)
    return DecodingState(
        tokens=jnp.full((rows, 1), lm.pad_token_id, jnp.int32),
        step=zeros,
        last=zeros,
        done=jnp.ones(rows, bool),
        lengths=zeros,
        keys=jax.random.split(jax.random.key(0), rows),
        seen=None,
        stop_tokens=jnp.full((rows, stops), lm.config.vocab_size, jnp.int32),
        min_new_tokens=zeros,
        logprobs=jnp.zeros((rows, 1), jnp.float32),
        top=None,
        finite=jnp.ones(rows, bool),
        cache=cache,
    )


def _empty_batch(lm: LM, table: Rows, *, stops: int) -> DecodingState:
    return empty_state(lm, len(table.start), stops, table)


def _place(lm: LM, pool: Rows, pages: Rows) -> Rows:
    """The pool with pages written to the numbers of its free ones; a number past its end drops the page."""
    to = pool.free.numbers
    k, v = jax.tree.map(lambda old, x: old.at[to].set(x, mode="drop"), (pool.k, pool.v), (pages.k, pages.v))
    return dataclasses.replace(pool, k=k, v=v)


def _fetch(lm: LM, pool: Rows) -> Rows:
    """Copies of the pages that are called free."""
    k, v = jax.tree.map(lambda x: x.at[pool.free.numbers].get(mode="clip"), (pool.k, pool.v))
    return Rows(k, v, **NO_TABLE)


def _fork(lm: LM, rows: Rows, most: Int[Array, " 1"]) -> Rows:
    """A row that continues the only one, and will have `most` tokens."""
    return rows.forked(jnp.zeros(1, jnp.int32), most)


def _row_axis(x: Array) -> int:
    return min(1, x.ndim - 1)


def _admit(
    lm: LM,
    state: DecodingState,  # without pool
    table: Rows,  # of the row
    row: Int[Array, ""],
    tokens: Int[Array, ""],  # before the answer
    logits: Float32[Array, "1 V"],
    drawing: RowSampling,
    sampling: Sampling,
) -> tuple[DecodingState, Int32[Array, "4 R"]]:
    """Adds a row to the batch, and draws its first token."""
    cache = jax.tree.map(
        lambda all_rows, x: all_rows.at[(slice(None),) * _row_axis(x) + (row,)].set(x.take(0, axis=_row_axis(x))),
        state.cache,
        table,
    )
    alone = dataclasses.replace(
        empty_state(lm, 1, 0, None),
        done=jnp.zeros(1, bool),
        lengths=tokens[None],
        keys=drawing.key[None],
        seen=None if drawing.seen is None else drawing.seen[None],
        stop_tokens=drawing.stop_tokens[None],
        min_new_tokens=drawing.min_new_tokens[None],
        top=jax.tree.map(lambda x: jnp.zeros_like(x[:1]), state.top),
        finite=jnp.isfinite(logits).all(axis=-1),
    )
    alone = draw(lm, alone, logits, sampling, allowed=None if drawing.allowed is None else drawing.allowed[None])
    rows = dataclasses.replace(state, cache=None)  # type: ignore[arg-type]
    rows = jax.tree.map(lambda all_rows, x: all_rows.at[row].set(x[0]), rows, alone)
    return dataclasses.replace(rows, cache=cache), PackedOutput.packed(rows)


def _step(
    lm: LM,
    state: DecodingState,
    limit: Int[Array, " R"],
    sampling: Sampling,
    allowed: UInt8[Array, "R W"] | None,
    *,
    evicts: bool,
    backend: Backend,
) -> tuple[DecodingState, Int32[Array, "4 R"]]:
    """A step of the rows that have not ended and have fewer than `limit` tokens (0 for free rows).

    `allowed` as in `decode.draw`; `evicts`: whether a block may leave a window.
    """
    rows, steps = state.cache, Steps(lm, limit, sampling, allowed, backend)
    running = steps.running(state)
    # Other rows have no tokens, so that nothing of theirs is read.
    kept, start = jnp.where(running[:, None], rows.kept, 0), jnp.where(running, rows.start, 0)
    cache, lengths = (
        dataclasses.replace(rows, kept=kept, start=start),
        jnp.where(running, state.lengths, 1 - state.step),
    )
    given = dataclasses.replace(state, cache=cache, lengths=lengths)
    after = steps.take_evicting(given) if evicts else steps.take(given, steps.summaries(cache))
    kept, start = jnp.where(running[:, None], after.cache.kept, rows.kept), after.cache.start
    cache = dataclasses.replace(after.cache, kept=kept, start=jnp.where(running, start, rows.start))
    after = dataclasses.replace(after, cache=cache, lengths=state.lengths)
    return after, PackedOutput.packed(after)


def _row(lm: LM, table: Rows, row: Int[Array, ""]) -> Rows:
    """A row of a table without pool."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=_row_axis(x)), table)


empty_pool = Program(OverMesh(_empty_pool, (), CACHES))
empty_batch = Program(OverMesh(_empty_batch, (CACHES,), STATE))
place = Program(OverMesh(_place, (CACHES, CACHES), CACHES), donate=(1,))
fetch = Program(OverMesh(_fetch, (CACHES,), CACHES))
fork = Program(OverMesh(_fork, (CACHES, SAME), CACHES), donate=(1,))
admit = Program(OverMesh(_admit, (STATE, CACHES, SAME, SAME, SAME, SAME, SAME), (STATE, SAME)), donate=(1,))
step = Program(OverMesh(_step, (STATE, SAME, SAME, SAME), (STATE, SAME)), donate=(1,))
row = Program(OverMesh(_row, (CACHES, SAME), CACHES))
