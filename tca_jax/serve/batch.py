"""Requests, and the batch of their answers on the devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt8

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.decode import DecodingState
from tca_jax.engine.extend import align, num_columns, rows_with_leaving_block
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.sampling import Sampling
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.serve import programs
from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import Document, Documents
from tca_jax.serve.pages import FreePages, LocalTable, RowTable, TableWidths, pool_only
from tca_jax.serve.programs import PackedOutput, Row, RowSampling
from tca_jax.serve.streams import Stream

_PIECE_TOKENS = 2048  # of a question that are fed before running answers take steps again
_MAX_STOPS = 8  # stop tokens of a row, at first
_MIN_WIDTH = 4  # least step between the widths of tables
_MAX_STEP_PROGRAMS = 16


@dataclasses.dataclass(eq=False)
class Request:
    """Tokens after a document, and then an answer, or a longer document."""

    stream: Stream | None  # of the answer; None where only `target` is wanted
    document: Document  # that it continues
    new: list[int]  # tokens that are fed after the document
    sample: int = 0  # of several answers
    mask: Mask | None = None  # of the answer's tokens
    target: Document | None = None  # that document and new tokens become; None for an answer
    fed: int = 0  # of `new`
    table: LocalTable | None = None  # of its own pages; None until it was admitted
    numbers: Int32[np.ndarray, "D P"] | None = None  # of its own pages, in the pool of answers
    own: RowTable | None = None  # `table` on the device; None until something was fed
    logits: Any = None  # of the token after what was fed, [1, V]
    slot: int | None = None  # row of the batch
    streamed: int = 0  # tokens of the answer that were handed out
    scheduled: int = 0  # tokens of the answer after all dispatched steps
    allowed: UInt8[np.ndarray, " W"] | None = None  # packed mask of the next token; None for all tokens
    pins: bool = False  # whether it keeps its document where it is
    arrival: int = 0  # order among all requests
    needed_pages: int = 0  # that `target` was found to need beside the document's

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of the answer."""
        return 0 if self.stream is None else self.stream.options.max_new_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of its tokens are requested."""
        return self.stream is not None and self.stream.options.logprobs is not None

    @property
    def tokens(self) -> list[int]:
        """Tokens of the row before the answer."""
        return self.document.tokens + self.new


class PendingStep(NamedTuple):
    """A dispatched step and the requests in it."""

    output: jax.Array  # a `PackedOutput`, packed
    rows: tuple[Request | None, ...]


class StepOutput(NamedTuple):
    """The output of a step, copied to the host."""

    rows: tuple[Request | None, ...]
    packed: PackedOutput
    logprobs: Any  # as in `DecodingState`
    top: Any  # as in `DecodingState`


class Batch:
    """Rows of answers, each after a document. Only the engine's thread calls it.

    `free` are the pages of answers, `rows` the request of each row (None for free rows), and `pending` the dispatched
    steps in their order. All `max_rows` rows together have pages for `answer_tokens` tokens each.
    """

    def __init__(self, lm: LM, documents: Documents, max_rows: int, answer_tokens: int, backend: Backend) -> None:
        self._lm, self._documents, self._backend = lm, documents, backend
        self._program_lm, self._bare_lm, self._on_mesh = lm.for_programs(), lm.without_weights(), lm.mesh is not None
        self._own_layout_of = functools.lru_cache(maxsize=64)(functools.partial(lm.following_layout, 1))
        pages = max_rows * self.own_layout(lm.config.max_context, answer_tokens).num_pages
        self.free = FreePages(pages, documents.free.devices)
        # A batch of one row is written as a run of pages (`PagedCache.with_tokens`); a pool's pages are no run.
        self._max_rows, rows = max_rows, max(2, max_rows)
        self.rows: list[Request | None] = [None] * rows
        self._state, self._shared = self._empty(rows)
        self._widths, self._own_widths = TableWidths(0, 0), TableWidths(0, 0)
        self._step_programs: dict[Any, list[Callable[..., Any]]] = {}
        self.pending: list[PendingStep] = []

    def own_layout(self, document_tokens: int, own_tokens: int) -> CacheLayout:
        """Pages of its own that a row needs after a document."""
        most = self._lm.config.max_context
        sizes = min(most, bucket_length(document_tokens)), min(most, bucket_length(own_tokens))
        return self._own_layout_of(*sizes)

    @property
    def requests(self) -> list[Request]:
        """Requests with a row."""
        return [request for request in self.rows if request is not None]

    @property
    def free_slot(self) -> int | None:
        """A free row."""
        return next((i for i, row in enumerate(self.rows[: self._max_rows]) if row is None), None)

    @property
    def pool(self) -> PagedCache:
        """Pages of answers."""
        return pool_only(self._state.cache)

    @property
    def has_masks(self) -> bool:
        """Whether a row has a mask."""
        return any(request.mask is not None for request in self.requests)

    @property
    def wants_logprobs(self) -> bool:
        """Whether a row's log-probabilities are requested."""
        return any(request.wants_logprobs for request in self.requests)

    @property
    def is_intact(self) -> bool:
        """Whether no failed program has consumed its arrays."""
        return is_intact((self._state, self._shared))

    def begin_again(self) -> None:
        """Empties the batch; its tables stay as wide."""
        del self._state, self._shared  # their memory is that of the new ones
        self.pending.clear()
        self._state, self._shared = self._empty(len(self.rows))
        widths, own_widths = self._widths, self._own_widths
        self._widths, self._own_widths = TableWidths(0, 0), TableWidths(0, 0)
        self._widen(widths, own_widths)

    def take_pages(self, request: Request, layout: CacheLayout) -> None:
        """Gives a request pages of its own; the caller has checked that they are free."""
        start = len(request.document.tokens) // layout.block_size * layout.block_size
        request.table = LocalTable.of_layout(layout, start)
        request.numbers = self.free.take(request.table.used)
        assert request.document.table is not None
        self._widen(request.document.table.widths, request.table.widths)

    def give_back_pages(self, request: Request) -> None:
        """The inverse; nothing where it has none."""
        if request.numbers is not None:
            self.free.give_back(request.numbers)
            request.numbers = None

    def feed(self, request: Request) -> None:
        """Feeds a piece of a request's tokens; without any, only the last block of the document is copied."""
        begins, b = request.own is None, self._lm.method.cache.block_size
        held = len(request.document.tokens) + request.fed
        piece = request.new[request.fed : request.fed + _PIECE_TOKENS - held % b]
        columns = num_columns(held % b + len(piece), b) if piece else 0
        tokens = np.zeros((1, 0), np.int32)
        if piece:
            tokens = align(np.asarray([piece], np.int32), np.asarray([held]), block_size=b, columns=columns)
        assert request.table is not None
        assert request.numbers is not None
        own = request.own or request.table.numbered(request.numbers, self._own_widths, self.free.total, self._on_mesh)
        sizes = [np.asarray([x], np.int32) for x in (held, len(piece), request.document.parts[0])]
        document = self._documents.row_table(request.document, self._widths)
        arguments = self._state, self._documents.pool, document, self._wide(own), tokens, *sizes
        static: Any = {"begins": begins, "backend": self._backend}
        self._state, request.own, logits = programs.extend_row.run(self._program_lm, *arguments, **static)
        request.fed += len(piece)
        request.logits = request.document.logits if logits is None else logits

    def admit(self, request: Request, slot: int) -> None:
        """A request's row joins the batch, and its first token is drawn."""
        assert request.stream is not None
        assert request.own is not None
        request.slot, self.rows[slot] = slot, request
        self._fit()
        options, vocabulary = request.stream.options, self._lm.config.vocab_size
        seen = None
        if self._state.seen is not None:
            seen = np.zeros(vocabulary, bool)
            seen[request.tokens] = True
        stops = np.full(self._state.stop_tokens.shape[1], vocabulary, np.int32)
        stops[: len(options.stop_tokens)] = options.stop_tokens
        key = jax.random.fold_in(jax.random.key(options.seed), request.sample)
        allowed = None if seen is None else self._allowed([request])[0]
        drawing = RowSampling(key, seen, stops, np.int32(options.min_new_tokens), allowed)  # type: ignore[arg-type]
        row = Row(*(np.int32(x) for x in (slot, len(request.tokens), request.document.parts[0])))  # type: ignore[arg-type]
        document = self._documents.row_table(request.document, self._widths)
        batch = self._state, self._shared, document, self._wide(request.own)
        drawn = row, request.logits, drawing, self._sampling([request])
        self._state, self._shared, said = programs.admit.run(self._bare_lm, *batch, *drawn)
        request.logits = None
        request.scheduled = 1
        self.pending = [PendingStep(said, tuple(self.rows))]  # its output has the tokens of the step before, too

    def own_row(self, slot: int) -> RowTable:
        """The own pages of a row."""
        return programs.own_row.run(self._bare_lm, self._state, np.int32(slot))

    def dispatch(self) -> None:
        """Dispatches a step. Between rounds of the engine at most one is pending."""
        moving = [request for request in self.requests if request.scheduled < request.max_new_tokens]
        if not moving:
            return
        evicts = self._evict(moving)
        for request in moving:
            request.scheduled += 1
        limit = np.asarray([0 if request is None else request.scheduled for request in self.rows], np.int32)
        sampling, allowed = self._sampling(self.rows), None if self._state.seen is None else self._allowed(self.rows)
        arguments = self._state, self._documents.pool, self._shared, limit, sampling, allowed
        self._state, said = self._step_program(arguments, evicts)(self._program_lm, *arguments)
        self.pending.append(PendingStep(said, tuple(self.rows)))

    def wait(self) -> StepOutput:
        """Waits for the first pending step.

        Log-probabilities are those of the last dispatched step: where a row wants them, this is the only one.
        """
        pending, state = self.pending.pop(0), self._state
        said = PackedOutput.of(self._arrived(pending.output))
        logprobs, top = on_host((state.logprobs, state.top)) if self.wants_logprobs else (None, None)
        return StepOutput(pending.rows, said, logprobs, top)

    @staticmethod
    def _arrived(said: jax.Array) -> np.ndarray:
        return np.asarray(said)

    def _evict(self, rows: Sequence[Request]) -> bool:
        """Whether a block leaves the window of one of these rows at its next step."""
        if not self._own_widths.kept:
            return False
        positions = [len(request.document.tokens) + len(request.new) + request.scheduled - 1 for request in rows]
        prompts = [request.document.parts[0] for request in rows]
        return bool(rows_with_leaving_block(self._lm.method.cache, np.asarray(positions), np.asarray(prompts)).any())

    def _step_program(
        self, arguments: tuple[DecodingState, Any, Any, Any, Sampling, Any], evicts: bool
    ) -> Callable[..., Any]:
        """The program of these arguments, keyed by the few shapes that change: comparing all is as slow as a step."""
        state = arguments[0]
        top = None if state.top is None else state.top[0].shape
        key = self._widths, self._own_widths, state.seen is None, top, state.stop_tokens.shape
        if key not in self._step_programs:
            if len(self._step_programs) == _MAX_STEP_PROGRAMS:
                self._step_programs.clear()
            kinds = (False, True) if any(state.cache.kept_columns) else (False,)  # both now: answers wait for neither
            static: Any = {"backend": self._backend}
            prepared = [programs.step.prepare(self._program_lm, *arguments, evicts=kind, **static) for kind in kinds]
            self._step_programs[key] = [program for program, _ in prepared]
        return self._step_programs[key][evicts]

    def _fit(self) -> None:
        """Adapts the state's optional arrays to its rows: an unused one costs time."""
        rows = [request.stream.options for request in self.requests if request.stream is not None]
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

    def _allowed(self, requests: Sequence[Request | None]) -> UInt8[np.ndarray, "R W"]:
        """Tokens that rows may draw next, packed."""
        allowed = np.full((len(requests), -(-self._lm.config.vocab_size // 8)), 255, np.uint8)
        for row, request in enumerate(requests):
            if request is not None and request.allowed is not None:
                allowed[row] = request.allowed
        return allowed

    def _widen(self, document: TableWidths, own: TableWidths) -> None:
        """Widens tables; they never become narrower, so that one program serves all requests."""
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
        return programs.empty_batch.run(self._bare_lm, pool, rows=rows, stops=_MAX_STOPS)

    def _sampling(self, requests: Sequence[Request | None]) -> Sampling:
        """How the rows' tokens are drawn: nothing where all are greedy, else everything, so that two programs do. The
        second one takes masks, too."""
        if self._state.seen is None:  # all are greedy, and have no mask
            return Sampling()
        streams = [None if request is None else request.stream for request in requests]
        rows = [Sampling() if stream is None else stream.options.sampling for stream in streams]
        off = {"temperature": 0.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        arrays: dict[str, Any] = {}
        for name, value in off.items():
            own = [getattr(row, name) for row in rows]
            kind = np.int32 if name == "top_k" else np.float32
            arrays[name] = np.asarray([value if x is None else x for x in own], kind)
        return Sampling(**arrays)


def _bucket(widths: TableWidths) -> TableWidths:
    return TableWidths(*(bucket_length(width, _MIN_WIDTH) if width else 0 for width in widths))


def is_intact(arrays: Any) -> bool:
    """Whether no array was consumed, or is the output of a failed program."""
    leaves = jax.tree.leaves(arrays)
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception:
        return False
    return True
