"""Answers that are written together: the rows of a batch on the devices, and the programs that change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.decode import DecodingState
from tca_jax.engine.extend import align, num_columns, rows_with_leaving_block
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.sampling import Sampling
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.serve import programs
from tca_jax.serve.asks import Ask
from tca_jax.serve.documents import Documents
from tca_jax.serve.pages import FreePages, LocalTable, RowTable, TableWidths, pool_only
from tca_jax.serve.programs import Drawing, Row, Said

_PIECE_TOKENS = 2048  # of a question that are fed before running answers take steps again
_MOST_STOPS = 8  # stop tokens of a row, at first
_LEAST_WIDTH = 4  # least step between the widths of tables
_MOST_STEP_PROGRAMS = 16  # held at hand


class Launched(NamedTuple):
    """A step that the device takes.

    Attributes:
        said: What it will say then, a packed `Said`.
        rows: The requests whose rows take it.
    """

    said: jax.Array
    rows: tuple[Ask | None, ...]


class Told(NamedTuple):
    """What the device has said of the rows of these requests, on the host; `DecodingState` has the last two."""

    rows: tuple[Ask | None, ...]
    said: Said
    logprobs: Any
    top: Any


class Batch:
    """Rows of answers, each behind a document. Only the engine's thread calls it.

    Args:
        lm: The model.
        documents: All documents of the engine.
        max_rows: Rows.
        answer_tokens: Tokens of their own that so many rows have room for.
        backend: Kernel backend.

    Attributes:
        free: Pages of what rows have of their own.
        rows: The request of each row; None for rows that nobody has.
        launched: Steps that the devices take, and whose tokens nobody has waited for, in their order.
    """

    def __init__(self, lm: LM, documents: Documents, max_rows: int, answer_tokens: int, backend: Backend) -> None:
        self._lm, self._documents, self._backend = lm, documents, backend
        self._program_lm, self._bare_lm, self._on_mesh = lm.for_programs(), lm.without_weights(), lm.mesh is not None
        self._own_layout_of = functools.lru_cache(maxsize=64)(functools.partial(lm.following_layout, 1))
        pages = max_rows * self.own_layout(lm.config.max_context, answer_tokens).num_pages
        self.free = FreePages(pages, documents.free.devices)
        # A batch of one row is written as a run of pages (`PagedCache.with_tokens`); a pool's pages are no run.
        self._max_rows, rows = max_rows, max(2, max_rows)
        self.rows: list[Ask | None] = [None] * rows
        self._state, self._shared = self._empty(rows)
        self._widths, self._own_widths = TableWidths(0, 0), TableWidths(0, 0)
        self._step_programs: dict[Any, list[Callable[..., Any]]] = {}
        self.launched: list[Launched] = []

    def own_layout(self, document_tokens: int, own_tokens: int) -> CacheLayout:
        """Pages of its own that a row needs behind a document."""
        most = self._lm.config.max_context
        sizes = min(most, bucket_length(document_tokens)), min(most, bucket_length(own_tokens))
        return self._own_layout_of(*sizes)

    @property
    def asks(self) -> list[Ask]:
        """The requests that have a row."""
        return [ask for ask in self.rows if ask is not None]

    @property
    def free_slot(self) -> int | None:
        """A row that nobody has."""
        return next((i for i, row in enumerate(self.rows[: self._max_rows]) if row is None), None)

    @property
    def pool(self) -> PagedCache:
        """Pages of what rows have of their own."""
        return pool_only(self._state.cache)

    @property
    def has_masks(self) -> bool:
        """Whether a row has a mask."""
        return any(ask.mask is not None for ask in self.asks)

    @property
    def wants_logprobs(self) -> bool:
        """Whether a row's log-probabilities are asked for."""
        return any(ask.wants_logprobs for ask in self.asks)

    # Errors

    @property
    def is_whole(self) -> bool:
        """Whether no program has consumed it and, for an error, not given it back."""
        return is_whole((self._state, self._shared))

    def begin_again(self) -> None:
        """An empty batch, as wide as the one before."""
        del self._state, self._shared  # their memory is that of the new ones
        self.launched.clear()
        self._state, self._shared = self._empty(len(self.rows))
        widths, own_widths = self._widths, self._own_widths
        self._widths, self._own_widths = TableWidths(0, 0), TableWidths(0, 0)
        self._widen(widths, own_widths)

    # Letting in

    def take_pages(self, ask: Ask, layout: CacheLayout) -> None:
        """Gives a request pages of its own; there are as many."""
        start = len(ask.document.tokens) // layout.block_size * layout.block_size
        ask.table = LocalTable.of_layout(layout, start)
        ask.numbers = self.free.take(ask.table.used)
        assert ask.document.table is not None
        self._widen(ask.document.table.widths, ask.table.widths)

    def give_back_pages(self, ask: Ask) -> None:
        """The inverse; nothing where it has none."""
        if ask.numbers is not None:
            self.free.give_back(ask.numbers)
            ask.numbers = None

    def feed(self, ask: Ask) -> None:
        """A piece of a request's tokens, or none where there are none and only the last block is copied."""
        begins, held, b = ask.own is None, len(ask.document.tokens) + ask.fed, self._lm.method.cache.block_size
        piece = ask.new[ask.fed : ask.fed + _PIECE_TOKENS - held % b]
        columns = num_columns(held % b + len(piece), b) if piece else 0
        tokens = np.zeros((1, 0), np.int32)
        if piece:
            tokens = align(np.asarray([piece], np.int32), np.asarray([held]), block_size=b, columns=columns)
        assert ask.table is not None
        assert ask.numbers is not None
        own = ask.own or ask.table.numbered(ask.numbers, self._own_widths, self.free.total, self._on_mesh)
        sizes = [np.asarray([x], np.int32) for x in (held, len(piece), ask.document.parts[0])]
        document = self._documents.row_table(ask.document, self._widths)
        arguments = self._state, self._documents.pool, document, self._wide(own), tokens, *sizes
        static: Any = {"begins": begins, "backend": self._backend}
        self._state, ask.own, logits = programs.extend_row.run(self._program_lm, *arguments, **static)
        ask.fed += len(piece)
        ask.logits = ask.document.logits if logits is None else logits

    def admit(self, ask: Ask, slot: int) -> None:
        """A request's row joins the batch, and its first token is drawn."""
        assert ask.stream is not None
        assert ask.own is not None
        ask.slot, self.rows[slot] = slot, ask
        self._fit()
        options, vocabulary = ask.stream.options, self._lm.config.vocab_size
        seen = None
        if self._state.seen is not None:
            seen = np.zeros(vocabulary, bool)
            seen[ask.tokens] = True
        stops = np.full(self._state.stop_tokens.shape[1], vocabulary, np.int32)
        stops[: len(options.stop_tokens)] = options.stop_tokens
        key = jax.random.fold_in(jax.random.key(options.seed), ask.sample)
        allowed = None if seen is None else self._allowed([ask])[0]
        drawing = Drawing(key, seen, stops, np.int32(options.min_new_tokens), allowed)  # type: ignore[arg-type]
        row = Row(*(np.int32(x) for x in (slot, len(ask.tokens), ask.document.parts[0])))  # type: ignore[arg-type]
        document = self._documents.row_table(ask.document, self._widths)
        batch = self._state, self._shared, document, self._wide(ask.own)
        drawn = row, ask.logits, drawing, self._sampling([ask])
        self._state, self._shared, said = programs.admit.run(self._bare_lm, *batch, *drawn)
        ask.logits = None
        ask.granted = 1
        self.launched = [Launched(said, tuple(self.rows))]  # it says what the step before has drawn, too

    def own_row(self, slot: int) -> RowTable:
        """What a row has of its own."""
        return programs.own_row.run(self._bare_lm, self._state, np.int32(slot))

    # Steps. Between rounds of the engine at most one is under way: no more than a token of each row is not told.

    def launch(self) -> None:
        """Has the device take a step."""
        moving = [ask for ask in self.asks if ask.granted < ask.max_new_tokens]
        if not moving:
            return
        evicts = self._evict(moving)
        for ask in moving:
            ask.granted += 1
        limit = np.asarray([0 if ask is None else ask.granted for ask in self.rows], np.int32)
        sampling, allowed = self._sampling(self.rows), None if self._state.seen is None else self._allowed(self.rows)
        arguments = self._state, self._documents.pool, self._shared, limit, sampling, allowed
        self._state, said = self._step_program(arguments, evicts)(self._program_lm, *arguments)
        self.launched.append(Launched(said, tuple(self.rows)))

    def wait(self) -> Told:
        """What the device has said, once the first step that was launched is taken.

        Log-probabilities are those of the last step that was launched: where a row wants them, this is the only one.
        """
        launched, state = self.launched.pop(0), self._state
        said = Said.of(self._arrived(launched.said))
        logprobs, top = on_host((state.logprobs, state.top)) if self.wants_logprobs else (None, None)
        return Told(launched.rows, said, logprobs, top)

    @staticmethod
    def _arrived(said: jax.Array) -> np.ndarray:
        return np.asarray(said)

    def _evict(self, rows: Sequence[Ask]) -> bool:
        """Whether a block leaves the window of one of these rows at its next step."""
        if not self._own_widths.kept:
            return False
        positions = [len(ask.document.tokens) + len(ask.new) + ask.granted - 1 for ask in rows]
        prompts = [ask.document.parts[0] for ask in rows]
        return bool(rows_with_leaving_block(self._lm.method.cache, np.asarray(positions), np.asarray(prompts)).any())

    def _step_program(
        self, arguments: tuple[DecodingState, Any, Any, Any, Sampling, Any], evicts: bool
    ) -> Callable[..., Any]:
        """The program of these arguments' shapes, of which few things change: to look at all arrays takes as long as a
        step's other work."""
        state = arguments[0]
        top = None if state.top is None else state.top[0].shape
        key = self._widths, self._own_widths, state.seen is None, top, state.stop_tokens.shape
        if key not in self._step_programs:
            if len(self._step_programs) == _MOST_STEP_PROGRAMS:
                self._step_programs.clear()
            kinds = (False, True) if any(state.cache.kept_columns) else (False,)  # both now: answers wait for neither
            static: Any = {"backend": self._backend}
            prepared = [programs.step.prepare(self._program_lm, *arguments, evicts=kind, **static) for kind in kinds]
            self._step_programs[key] = [program for program, _ in prepared]
        return self._step_programs[key][evicts]

    def _fit(self) -> None:
        """Makes the state hold what its rows need, and nothing else that takes time. What it holds of rows stays."""
        rows = [ask.stream.options for ask in self.asks if ask.stream is not None]
        count, vocabulary = len(self.rows), self._lm.config.vocab_size
        state = self._state
        stops = max(len(options.stop_tokens) for options in rows)
        if stops > state.stop_tokens.shape[1]:
            wide = ((0, 0), (0, bucket_length(stops, 1) - state.stop_tokens.shape[1]))
            state = dataclasses.replace(state, stop_tokens=jnp.pad(state.stop_tokens, wide, constant_values=vocabulary))
        if all(options.sampling == Sampling() for options in rows) and not self.has_masks:
            state = dataclasses.replace(state, seen=None)
        elif state.seen is None:
            state = dataclasses.replace(state, seen=jnp.zeros((count, vocabulary), bool))
        most = max(options.logprobs or 0 for options in rows)
        if not most:
            state = dataclasses.replace(state, top=None)
        elif state.top is None or state.top[0].shape[-1] < most:
            nothing = count, 1, 0
            ids, values = state.top or (jnp.zeros(nothing, jnp.int32), jnp.zeros(nothing, jnp.float32))
            more = (0, 0), (0, 0), (0, min(vocabulary, bucket_length(most, 4)) - ids.shape[-1])
            state = dataclasses.replace(state, top=(jnp.pad(ids, more), jnp.pad(values, more)))
        self._state = state

    def _allowed(self, asks: Sequence[Ask | None]) -> UInt8[np.ndarray, "R W"]:
        """Tokens that rows may draw next, packed."""
        allowed = np.full((len(asks), -(-self._lm.config.vocab_size // 8)), 255, np.uint8)
        for row, ask in enumerate(asks):
            if ask is not None and ask.allowed is not None:
                allowed[row] = ask.allowed
        return allowed

    # Shapes

    def _widen(self, document: TableWidths, own: TableWidths) -> None:
        """Makes tables wide enough; they never become narrower, so that a program serves all requests."""
        widths, own_widths = self._widths.at_least(_bucket(document)), self._own_widths.at_least(_bucket(own))
        if widths != self._widths:
            self._shared = programs.with_widths(self._shared, widths, self._documents.free.total)
            self._widths = widths
        if own_widths != self._own_widths:
            cache = programs.with_widths(self._state.cache, own_widths, self.free.total)
            self._state = dataclasses.replace(self._state, cache=cache)
            self._own_widths = own_widths

    def _wide(self, own: RowTable) -> RowTable:
        """A row's own table, as wide as the others are now."""
        return programs.wide_row(own, self._own_widths, self.free.total)

    def _empty(self, rows: int) -> tuple[DecodingState, Any]:
        pool = programs.empty_pool.run(self._bare_lm, pages=self.free.total, dtype=self._lm.cache_dtype)
        return programs.empty_batch.run(self._bare_lm, pool, rows=rows, stops=_MOST_STOPS)

    def _sampling(self, asks: Sequence[Ask | None]) -> Sampling:
        """How the rows' tokens are drawn: nothing where all are greedy, else everything, so that two programs do. The
        second one takes masks, too."""
        rows = [Sampling() if ask is None or ask.stream is None else ask.stream.options.sampling for ask in asks]
        off: dict[str, Any] = {
            "temperature": 0.0,
            "top_k": 2**31 - 1,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if self._state.seen is None:  # all are greedy, and have no mask
            return Sampling()
        arrays: dict[str, Any] = {}
        for name, value in off.items():
            own = [getattr(row, name) for row in rows]
            kind = np.int32 if name == "top_k" else np.float32
            arrays[name] = np.asarray([value if x is None else x for x in own], kind)
        return Sampling(**arrays)


def _bucket(widths: TableWidths) -> TableWidths:
    return TableWidths(*(bucket_length(width, _LEAST_WIDTH) if width else 0 for width in widths))


def is_whole(arrays: Any) -> bool:
    """Whether no array was consumed, or is what a program that failed has left."""
    leaves = jax.tree.leaves(arrays)
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception:
        return False
    return True
