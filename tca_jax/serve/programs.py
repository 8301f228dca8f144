"""Programs of a serving engine: prefill, rows of the batch, steps, moves of pages.

One pool has the pages of documents, another those of answers: a step reads the first and writes the second in place.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, Key, UInt8

from tca_jax.engine.cache import CacheLayout, PagedCache, before, continued, joined_into
from tca_jax.engine.decode import STATE, DecodingState, decode_step, draw
from tca_jax.engine.extend import extend
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import CACHES, ROWS, SAME, OverMesh
from tca_jax.engine.read import Read, Reading, begin_reading, end_reading, read_layers, read_prompts
from tca_jax.engine.sampling import Sampling
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.pallas_kernels.kv import empty
from tca_jax.programs import Program
from tca_jax.serve.pages import PageNumbers, RowTable, TableWidths, pool_only, widened


@typing.no_type_check  # as a pytree it may hold whatever a transformation puts in its leaves
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "seen", "stop_tokens", "min_new_tokens", "allowed"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """How a row's tokens are drawn, beside `Sampling`."""

    key: Key[Array, ""]  # token t is drawn with `fold_in(key, t)`
    seen: Bool[Array, " V"] | None  # tokens of the row; None without a repetition penalty in the batch
    stop_tokens: Int32[Array, " S"]  # padded with the vocabulary's size
    min_new_tokens: Int32[Array, ""]
    allowed: UInt8[Array, " W"] | None  # packed mask of its first token; None for all tokens


class Row(NamedTuple):
    """A row of the batch."""

    number: Int[Array, ""]
    tokens: Int[Array, ""]  # before the answer
    prompt_tokens: Int[Array, ""]  # of the first prefill


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


class PrefillResult(NamedTuple):
    """Prompts that were read."""

    cache: PagedCache  # with a pool of its own
    logits: Float32[Array, "B V"]  # of the token after each
    finite: Bool[Array, " B"]  # whether these are
    attended_share: Float32[Array, " B"]  # see `engine.read.Read`


def _empty_pool(lm: LM, *, pages: int, dtype: jnp.dtype) -> PagedCache:
    shape = pages, lm.method.cache.block_size, lm.config.head_dim
    k, v = (empty(shape, dtype) for _ in range(2))
    nothing: Any = None
    return PagedCache(k, v, (), (), nothing, nothing, ())


def _empty_batch(lm: LM, pool: PagedCache, *, rows: int, stops: int) -> tuple[DecodingState, PagedCache]:
    """The state of an empty batch over the pool of answers, and the tables of its rows' documents."""
    layers = lm.config.num_layers
    heads = lm.config.num_kv_heads // (1 if lm.head_shards is None else lm.head_shards.devices)
    nothing, zeros = (jnp.zeros((rows, heads, 0), jnp.int32),) * layers, jnp.zeros(rows, jnp.int32)
    kept = (jnp.zeros((rows, heads), jnp.int32),) * layers
    cache = PagedCache(pool.k, pool.v, nothing, kept, zeros, zeros, (0,) * layers)
    return _empty_state(lm, rows, stops, cache), _without_pool(cache)


def _empty_state(lm: LM, rows: int, stops: int, cache: Any) -> DecodingState:
    """Ended rows without tokens; with room for a token of each, as the host gets the output of each step."""
    zeros = jnp.zeros(rows, jnp.int32)
    return DecodingState(
        tokens=jnp.full((rows, 1), lm.pad_token_id, jnp.int32),
        step=zeros,
        last=zeros,
        done=jnp.ones(rows, bool),
        lengths=zeros,
        prompt_lengths=zeros,
        keys=jax.random.split(jax.random.key(0), rows),
        seen=None,
        stop_tokens=jnp.full((rows, stops), lm.config.vocab_size, jnp.int32),
        min_new_tokens=zeros,
        logprobs=jnp.zeros((rows, 1), jnp.float32),
        top=None,
        finite=jnp.ones(rows, bool),
        cache=cache,
    )


def _without_pool(cache: PagedCache) -> PagedCache:
    nothing: Any = None
    return dataclasses.replace(cache, k=nothing, v=nothing)


def _over(cache: PagedCache, pool: PagedCache) -> PagedCache:
    return dataclasses.replace(cache, k=pool.k, v=pool.v)


_Tokens = Int[Array, "B L"]
_Lengths = Int[Array, " B"]
_Layers = tuple[int, int]  # first layer, end


def _read(lm: LM, tokens: _Tokens, lengths: _Lengths, *, layout: CacheLayout, backend: Backend) -> PrefillResult:
    return _result(read_prompts(lm, tokens, lengths, layout, backend=backend))


def _result(read: Read) -> PrefillResult:
    assert read.cache is not None
    return PrefillResult(read.cache, read.logits, jnp.isfinite(read.logits).all(axis=-1), read.attended_share)


def _read_first(
    lm: LM, tokens: _Tokens, lengths: _Lengths, *, layers: _Layers, layout: CacheLayout, backend: Backend
) -> tuple[Reading, PagedCache]:
    """The first layers of prompts that are read in several parts; see `engine.read.read_layers`."""
    return _read_more(lm, *begin_reading(lm, tokens, lengths, layout), layers=layers, layout=layout, backend=backend)


def _read_more(
    lm: LM, reading: Reading, cache: PagedCache | None, *, layers: _Layers, layout: CacheLayout, backend: Backend
) -> tuple[Reading, PagedCache]:
    """The next layers of them."""
    reading, cache = read_layers(lm, reading, cache, layers, layout, backend=backend)
    assert cache is not None
    return reading, cache


def _read_last(
    lm: LM, reading: Reading, cache: PagedCache, *, layers: _Layers, layout: CacheLayout, backend: Backend
) -> PrefillResult:
    """The last layers of them, and the logits."""
    reading, cache = _read_more(lm, reading, cache, layers=layers, layout=layout, backend=backend)
    return _result(end_reading(lm, reading, cache))


def _place(lm: LM, pool: PagedCache, pages: PagedCache, numbers: PageNumbers) -> PagedCache:
    """The pool with pages written to these numbers; a number past its end drops the page."""
    k, v = jax.tree.map(lambda to, x: to.at[numbers.pages].set(x, mode="drop"), (pool.k, pool.v), (pages.k, pages.v))
    return dataclasses.replace(pool, k=k, v=v)


def _fetch(lm: LM, pool: PagedCache, numbers: PageNumbers) -> PagedCache:
    """Copies of pages of the pool."""
    k, v = jax.tree.map(lambda x: x.at[numbers.pages].get(mode="clip"), (pool.k, pool.v))
    return dataclasses.replace(pool, k=k, v=v)


def _extend_row(
    lm: LM,
    state: DecodingState,
    pool: PagedCache,
    document: RowTable,
    own: RowTable,
    tokens: Int[Array, "1 S"],
    held: Int[Array, " 1"],
    new: Int[Array, " 1"],
    prompt_tokens: Int[Array, " 1"],
    *,
    begins: bool,
    backend: Backend,
) -> tuple[DecodingState, RowTable, Float32[Array, "1 V"] | None]:
    """Appends tokens (none if they have no columns) to a document and a row's own pages, which are empty if `begins`.

    `held` tokens of the row are before the `new` ones. Returns the state, the row's own table, and the logits of the
    token that follows; None where nothing was appended.
    """
    shared, cache = document.cache(pool), own.cache(state.cache)
    shared, cache = continued(shared, cache) if begins else (before(shared, cache), cache)
    logits = None
    if tokens.shape[1]:
        cache, logits, _ = extend(lm, shared, cache, tokens, held, new, prompt_tokens, backend=backend)
    return dataclasses.replace(state, cache=_over(state.cache, cache)), RowTable.of(cache), logits


def _admit(
    lm: LM,
    state: DecodingState,
    shared: PagedCache,
    document: RowTable,
    own: RowTable,
    row: Row,
    logits: Float32[Array, "1 V"],
    drawing: RowSampling,
    sampling: Sampling,
) -> tuple[DecodingState, PagedCache, Int32[Array, "4 R"]]:
    """Adds a row to the batch, whose documents are `shared`, and draws its first token."""
    cache = _with_row(state.cache, row.number, own)
    alone = dataclasses.replace(
        _empty_state(lm, 1, 0, None),
        done=jnp.zeros(1, bool),
        lengths=row.tokens[None],
        prompt_lengths=row.prompt_tokens[None],
        keys=drawing.key[None],
        seen=None if drawing.seen is None else drawing.seen[None],
        stop_tokens=drawing.stop_tokens[None],
        min_new_tokens=drawing.min_new_tokens[None],
        top=jax.tree.map(lambda x: jnp.zeros_like(x[:1]), state.top),
        finite=jnp.isfinite(logits).all(axis=-1),
    )
    alone = draw(lm, alone, logits, sampling, allowed=None if drawing.allowed is None else drawing.allowed[None])
    rows = dataclasses.replace(state, cache=None)  # type: ignore[arg-type]
    rows = jax.tree.map(lambda all_rows, x: all_rows.at[row.number].set(x[0]), rows, alone)
    return dataclasses.replace(rows, cache=cache), _with_row(shared, row.number, document), PackedOutput.packed(rows)


def _with_row(cache: PagedCache, row: Int[Array, ""], table: RowTable) -> PagedCache:
    """A cache with another row."""
    tables = tuple(x.at[row].set(table.table[layer]) for layer, x in enumerate(cache.tables))
    kept = tuple(x.at[row].set(table.kept[layer]) for layer, x in enumerate(cache.kept))
    start, end = cache.start.at[row].set(table.start), cache.end.at[row].set(table.end)
    return dataclasses.replace(cache, tables=tables, kept=kept, start=start, end=end)


def _step(
    lm: LM,
    state: DecodingState,
    pool: PagedCache,
    shared: PagedCache,
    limit: Int[Array, " R"],
    sampling: Sampling,
    allowed: UInt8[Array, "R W"] | None,
    *,
    evicts: bool,
    backend: Backend,
) -> tuple[DecodingState, Int32[Array, "4 R"]]:
    """A step of the rows that have not ended and have fewer than `limit` tokens (0 for free rows).

    `allowed` as in `decode.draw`; `evicts` as in `decode_step`.
    """
    cache, running = state.cache, ~state.done & (state.step < limit)

    def of_running(cache: PagedCache, start: Int[Array, " R"]) -> PagedCache:
        """The cache without the pages of other rows, which then are not read."""
        kept = tuple(jnp.where(running[:, None], x, 0) for x in cache.kept)
        return dataclasses.replace(cache, kept=kept, start=jnp.where(running, cache.start, start))

    shared = of_running(_over(shared, pool), cache.start)
    state = dataclasses.replace(state, cache=of_running(cache, cache.start))
    after = decode_step(lm, state, shared, limit, sampling, evicts=evicts, allowed=allowed, backend=backend)
    kept = tuple(jnp.where(running[:, None], new, old) for new, old in zip(after.cache.kept, cache.kept, strict=True))
    after = dataclasses.replace(after, cache=dataclasses.replace(after.cache, kept=kept))
    return after, PackedOutput.packed(after)


def _own_row(lm: LM, state: DecodingState, row: Int[Array, ""]) -> RowTable:
    """The own table of a row of the batch."""
    table, kept = (jnp.stack([x[row] for x in parts]) for parts in (state.cache.tables, state.cache.kept))
    return RowTable(table, kept, state.cache.start[row], state.cache.end[row], state.cache.kept_columns[0])


def _join(
    lm: LM,
    pool: PagedCache,
    answers: PagedCache,
    document: RowTable,
    own: RowTable,
    out: RowTable,
    copied: tuple[PageNumbers, PageNumbers],
) -> PagedCache:
    """The pool with a document `out` of another document and a row's own pages after it.

    `out` has the kept tokens of the other document, and may share its pages. `copied` are pages of the pool that are
    copied first, and the numbers of the copies.
    """
    source, to = copied
    pool = _place(lm, pool, _fetch(lm, pool, source), to)
    shared, cache, pages = document.cache(pool), own.cache(answers), out.table.shape[-1] - out.kept_columns
    return pool_only(joined_into(out.cache(pool), before(shared, cache), cache, pages))


empty_pool = Program(OverMesh(_empty_pool, (), CACHES))
empty_batch = Program(OverMesh(_empty_batch, (CACHES,), (STATE, CACHES)), donate=(1,))
_READING: Any = Reading(ROWS, ROWS, ROWS)  # type: ignore[arg-type]
_READ: Any = PrefillResult(CACHES, ROWS, ROWS, ROWS)  # type: ignore[arg-type]
read = Program(OverMesh(_read, (ROWS, ROWS), _READ))
read_first = Program(OverMesh(_read_first, (ROWS, ROWS), (_READING, CACHES)))
read_more = Program(OverMesh(_read_more, (_READING, CACHES), (_READING, CACHES)), donate=(1, 2))
read_last = Program(OverMesh(_read_last, (_READING, CACHES), _READ), donate=(2,))
place = Program(OverMesh(_place, (CACHES, CACHES, CACHES), CACHES), donate=(1,))
fetch = Program(OverMesh(_fetch, (CACHES, CACHES), CACHES))
extend_row = Program(
    OverMesh(_extend_row, (STATE, CACHES, CACHES, CACHES, SAME, SAME, SAME, SAME), (STATE, CACHES, SAME)), donate=(1,)
)
admit = Program(
    OverMesh(_admit, (STATE, CACHES, CACHES, CACHES, SAME, SAME, SAME, SAME), (STATE, CACHES, SAME)), donate=(1, 2)
)
step = Program(OverMesh(_step, (STATE, CACHES, CACHES, SAME, SAME, SAME), (STATE, SAME)), donate=(1,))
own_row = Program(OverMesh(_own_row, (STATE, SAME), CACHES))
join = Program(OverMesh(_join, (CACHES,) * 6, CACHES), donate=(1,))


def with_widths(cache: PagedCache, widths: TableWidths, no_page: int) -> PagedCache:
    """A cache whose tables have more entries, which name no page."""
    wide = [widened(table, kept, widths, no_page) for table, kept in zip(cache.tables, cache.kept_columns, strict=True)]
    return dataclasses.replace(cache, tables=tuple(wide), kept_columns=(widths.kept,) * len(wide))


def wide_row(row: RowTable, widths: TableWidths, no_page: int) -> RowTable:
    """The same of one row; itself where it is as wide."""
    if (row.kept_columns, row.table.shape[-1]) == (widths.kept, sum(widths)):
        return row
    table = widened(row.table, row.kept_columns, widths, no_page)
    return dataclasses.replace(row, table=table, kept_columns=widths.kept)
