"""Requests, and the batch of their answers on the devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt8

from tca_jax.engine.decode import DecodingState
from tca_jax.engine.extend import align, feed, num_columns
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import Numbers, Rows
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.read import Calls, pages_of_forks
from tca_jax.engine.sampling import Sampling
from tca_jax.methods.base import UNBOUNDED
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.serve import programs
from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import Document
from tca_jax.serve.pages import PagePool, Widths, without
from tca_jax.serve.programs import PackedOutput, RowSampling
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
    reserved: int = 0  # pages of its own, at most; 0 until it begins
    numbers: Numbers | None = None  # these; None in the batch, whose rows share theirs
    held: Numbers | None = None  # pages of the document that its row began with
    own: Rows | None = None  # its table, with its free pages; None until it begins, and in the batch
    logits: Any = None  # of the token after what was fed, [1, V]
    slot: int | None = None  # row of the batch
    start: int = 0  # of its window, in the batch
    streamed: int = 0  # tokens of the answer that were handed out
    scheduled: int = 0  # tokens of the answer after all dispatched steps
    allowed: UInt8[np.ndarray, " W"] | None = None  # packed mask of the next token; None for all tokens
    pins: bool = False  # whether it keeps its document where it is
    arrival: int = 0  # order among all requests
    needed_pages: int = 0  # that `target` was found to need beside the document's

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of the answer."""
        return 0 if self.stream is None else self.stream.config.max_new_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of its tokens are requested."""
        return self.stream is not None and self.stream.config.logprobs is not False

    @property
    def tokens(self) -> list[int]:
        """Tokens of the row before the answer."""
        return self.document.tokens + self.new

    @property
    def own_tokens(self) -> int:
        """Tokens that the row may have after the document."""
        return len(self.new) + self.max_new_tokens


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


def own_pages(lm: LM, document_tokens: int, own_tokens: int) -> tuple[int, int]:
    """Pages that a row after a document needs beside its pages, and how many of them for kept tokens of a head."""
    most = lm.config.max_context
    sizes = min(most, bucket_length(document_tokens)), min(most, bucket_length(own_tokens))
    return pages_of_forks(lm, 1, *sizes), max(lm.following_layout(1, *sizes).kept_columns)


class Batch:
    """Rows of answers, each after a document. Only the engine's thread calls it.

    `rows` are the requests, None for free rows, and `pending` the dispatched steps in their order. Pages that requests
    reserved and have not used are free pages of the batch's table: steps take them for whichever row.
    """

    def __init__(self, lm: LM, pool: PagePool, max_rows: int, backend: Backend) -> None:
        self._lm, self._pool, self._backend, self._max_rows = lm, pool, backend, max_rows
        self._program_lm, self._bare_lm = lm.for_programs(), lm.without_weights()
        self.own_pages = functools.lru_cache(maxsize=256)(functools.partial(own_pages, lm))
        self.rows: list[Request | None] = [None] * max(2, max_rows)  # a single row is written without looking
        self._widths = Widths.of_row(self._bare_lm, 0, 1)
        self._bounded = lm.method.cache.window < UNBOUNDED
        self._step_programs: dict[Any, list[Callable[..., Any]]] = {}
        self.pending: list[PendingStep] = []
        self._calls = Calls()
        self._state = self._empty()

    def _empty(self) -> DecodingState:
        pool, self.broken = self._pool, False
        self._pages: Numbers = [np.zeros(0, np.int32)] * pool.devices  # all of the batch's
        table = pool.on_device(pool.empty_table(self._lm, len(self.rows), self._widths))
        table = dataclasses.replace(table, free=pool.free_pages(self._pages, pool.answers))
        return programs.empty_batch.run(self._bare_lm, table, stops=_MAX_STOPS)

    @property
    def requests(self) -> list[Request]:
        """Requests with a row."""
        return [request for request in self.rows if request is not None]

    @property
    def free_slot(self) -> int | None:
        """A free row."""
        return next((i for i, row in enumerate(self.rows[: self._max_rows]) if row is None), None)

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
        """Whether no failed program has consumed its arrays, and its pages are known."""
        return not self.broken and is_intact(self._state)

    def begin_again(self) -> None:
        """Empties the batch; its tables stay as wide."""
        self._pool.allocator.release(self._pages)
        self.pending.clear()
        self._state = self._empty()

    def begin(self, request: Request) -> None:
        """Gives a request a row that continues its document; the caller has checked that there are pages for it."""
        document, pool = request.document, self._pool
        assert document.table is not None
        assert document.pages is not None
        pages, kept = self.own_pages(len(document.tokens), request.own_tokens)
        request.numbers, request.held = pool.allocator.take(pages), document.pages
        request.reserved = pages
        pool.reserved += pages
        pool.allocator.share(document.pages)
        most = len(document.tokens) + request.own_tokens
        self._widen(Widths.of_row(self._lm, document.table.columns + kept, most))
        table = pool.on_device(pool.fitted(document.table, self._widths))
        free = pool.free_pages(request.numbers, bucket_length(pages))
        rows = programs.fork.run(self._bare_lm, pool.lend(table, free), np.asarray([most], np.int32))
        request.own = pool.take_back(rows)

    def end(self, request: Request) -> None:
        """Gives back the row and the pages of a request; nothing where it has none."""
        slot, pages, held, numbers = request.slot, request.reserved, request.held, request.numbers
        if not pages:
            return
        if numbers is None and not self.broken:  # it is in the batch
            assert held is not None
            self.broken = True  # unless its pages are found
            own, free = without(self._pool.named(self.table_of(request)), held), self._pool.left(self._state.cache.free)
            for device, named in enumerate(own):
                count = pages - len(named)
                assert 0 <= count <= len(free[device]), "rows take no more pages than they reserved"
                own[device], free[device] = np.concatenate([named, free[device][:count]]), free[device][count:]
            self._set_free(self._state, free)
            self._pages, self.broken, numbers = without(self._pages, own), False, own
        self._pool.reserved -= pages
        request.reserved, request.held, request.numbers, request.own, request.slot = 0, None, None, None, None
        if slot is not None:
            self.rows[slot] = None
        for each in (held, numbers):
            if each is not None:
                self._pool.allocator.release(each)

    def table_of(self, request: Request) -> Rows:
        """The table of a request's row, on the host."""
        if request.own is not None:
            return on_host(without_free(request.own))
        slot: Any = request.slot
        return on_host(programs.row.run(self._bare_lm, without_free(self._state.cache), np.int32(slot)))

    def _set_free(self, state: DecodingState, free: Numbers) -> None:
        """Sets the state, with free pages of the batch."""
        pages = self._pool.free_pages(free, self._pool.answers)
        self._state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, free=pages))

    def feed(self, request: Request) -> None:
        """Feeds a piece of a request's tokens, after the row's begin."""
        assert request.own is not None
        b, held = self._pool.block_size, len(request.document.tokens) + request.fed
        piece = request.new[request.fed : request.fed + _PIECE_TOKENS - held % b]
        if not piece:
            request.logits = request.document.logits
            return
        starts, columns = np.asarray([held], np.int32), num_columns(held % b + len(piece), b)
        tokens = align(np.asarray([piece], np.int32), starts, block_size=b, columns=columns)
        rows, lengths = self._pool.lend(self._wide(request.own)), jnp.asarray([len(piece)], jnp.int32)
        given = jnp.asarray(tokens), jnp.asarray(starts), lengths, self._calls
        fed = feed(self._program_lm, rows, *given, backend=self._backend)
        request.own, request.logits = self._pool.take_back(fed.rows), fed.logits
        request.fed += len(piece)

    def admit(self, request: Request, slot: int) -> None:
        """A request's row joins the batch, and its first token is drawn."""
        assert request.stream is not None
        assert request.own is not None
        assert request.numbers is not None
        spare, its = (self._pool.left(table.free) for table in (self._state.cache, request.own))
        free = [np.concatenate(each) for each in zip(spare, its, strict=True)]
        own, start = without_free(self._wide(request.own)), on_host(request.own.start)
        request.slot, self.rows[slot] = slot, request
        self._fit()
        config, vocabulary = request.stream.config, self._lm.config.vocab_size
        seen = None
        if self._state.seen is not None:
            seen = np.zeros(vocabulary, bool)
            seen[request.tokens] = True
        stops = np.full(self._state.stop_tokens.shape[1], vocabulary, np.int32)
        of_request = list(config.stop_token_ids or ())
        stops[: len(of_request)] = of_request
        key = jax.random.fold_in(jax.random.key(config.seed), request.sample)
        allowed = None if seen is None else self._allowed([request])[0]
        drawing = RowSampling(key, seen, stops, np.int32(config.min_new_tokens), allowed)  # type: ignore[arg-type]
        row = np.int32(slot), np.int32(len(request.tokens)), request.logits, drawing, self._sampling([request])
        state = dataclasses.replace(self._state, cache=without_free(self._state.cache))
        state, said = programs.admit.run(self._bare_lm, state, own, *row)
        self._set_free(state, free)
        self._pages = [np.concatenate(each) for each in zip(self._pages, request.numbers, strict=True)]
        request.own = request.numbers = request.logits = None
        request.scheduled, request.start = 1, int(np.ravel(start)[0])
        self.pending = [PendingStep(said, tuple(self.rows))]  # its output has the tokens of the step before, too

    def dispatch(self) -> None:
        """Dispatches a step. Between rounds of the engine at most one is pending."""
        moving = [request for request in self.requests if request.scheduled < request.max_new_tokens]
        if not moving:
            return
        leaving = [request for request in moving if self._leaves(request)]
        for request in moving:
            request.scheduled += 1
        for request in leaving:
            request.start += self._pool.block_size
        limit = np.asarray([0 if request is None else request.scheduled for request in self.rows], np.int32)
        sampling, allowed = self._sampling(self.rows), None if self._state.seen is None else self._allowed(self.rows)
        state = dataclasses.replace(self._state, cache=self._pool.lend(self._state.cache))
        arguments = state, limit, sampling, allowed
        state, said = self._step_program(arguments, bool(leaving))(self._program_lm, *arguments)
        self._state = dataclasses.replace(state, cache=self._pool.take_back(state.cache))
        self.pending.append(PendingStep(said, tuple(self.rows)))

    def wait(self) -> StepOutput:
        """Waits for the first pending step.

        Log-probabilities are those of the last dispatched step: where a row wants them, this is the only one.
        """
        pending, state = self.pending.pop(0), self._state
        said = PackedOutput.of(np.asarray(pending.output))
        logprobs, top = on_host((state.logprobs, state.top)) if self.wants_logprobs else (None, None)
        return StepOutput(pending.rows, said, logprobs, top)

    def _leaves(self, request: Request) -> bool:
        """Whether a block leaves the window of a row at its next step."""
        position = len(request.document.tokens) + len(request.new) + request.scheduled - 1
        window = self._widths.window * self._pool.block_size
        return self._bounded and position - request.start >= window

    def _step_program(self, arguments: tuple[DecodingState, Any, Any, Any], evicts: bool) -> Callable[..., Any]:
        """The program of these arguments, keyed by the few shapes that change: comparing all is as slow as a step."""
        state = arguments[0]
        top = None if state.top is None else state.top[0].shape
        key = self._widths, state.seen is None, top, state.stop_tokens.shape
        if key not in self._step_programs:
            if len(self._step_programs) == _MAX_STEP_PROGRAMS:
                self._step_programs.clear()
            kinds = (False, True) if self._bounded else (False,)  # both now: answers wait for neither
            static: Any = {"backend": self._backend}
            prepared = [programs.step.prepare(self._program_lm, *arguments, evicts=kind, **static) for kind in kinds]
            self._step_programs[key] = [program for program, _ in prepared]
        return self._step_programs[key][evicts]

    def _fit(self) -> None:
        """Adapts the state's optional arrays to its rows: an unused one costs time."""
        streams = [request.stream for request in self.requests if request.stream is not None]
        count, vocabulary = len(self.rows), self._lm.config.vocab_size
        state = self._state
        stops = max(len(stream.config.stop_token_ids or ()) for stream in streams)
        if stops > state.stop_tokens.shape[1]:
            wide = ((0, 0), (0, bucket_length(stops, 1) - state.stop_tokens.shape[1]))
            state = dataclasses.replace(state, stop_tokens=jnp.pad(state.stop_tokens, wide, constant_values=vocabulary))
        if all(stream.sampling == Sampling() for stream in streams) and not self.has_masks:
            state = dataclasses.replace(state, seen=None)
        elif state.seen is None:
            state = dataclasses.replace(state, seen=jnp.zeros((count, vocabulary), bool))
        most = max(stream.config.num_logprobs or 0 for stream in streams)
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

    def _widen(self, widths: Widths) -> None:
        """Widens tables; they never become narrower, so that one program serves all requests."""
        kept, window, means = (bucket_length(width, _MIN_WIDTH) if width else 0 for width in widths)
        wanted = kept, widths.window if self._bounded else window, means
        wide = Widths(*map(max, wanted, self._widths))
        if wide != self._widths:
            self._widths = wide
            self._state = dataclasses.replace(self._state, cache=self._wide(self._state.cache))

    def _wide(self, table: Rows) -> Rows:
        """A table as wide as the others are now."""
        if Widths.of(table) == self._widths:
            return table
        wide = self._pool.on_device(self._pool.fitted(on_host(without_free(table)), self._widths))
        return dataclasses.replace(wide, free=table.free)

    def _sampling(self, requests: Sequence[Request | None]) -> Sampling:
        """How the rows' tokens are drawn: nothing where all are greedy, else everything, so that two programs do. The
        second one takes masks, too."""
        if self._state.seen is None:  # all are greedy, and have no mask
            return Sampling()
        streams = [None if request is None else request.stream for request in requests]
        rows = [Sampling() if stream is None else stream.sampling for stream in streams]
        off = {"temperature": 0.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        arrays: dict[str, Any] = {}
        for name, value in off.items():
            own = [getattr(row, name) for row in rows]
            kind = np.int32 if name == "top_k" else np.float32
            arrays[name] = np.asarray([value if x is None else x for x in own], kind)
        return Sampling(**arrays)


def without_free(table: Rows) -> Rows:
    """A table without free pages."""
    return dataclasses.replace(table, free=None)  # type: ignore[arg-type]


def is_intact(arrays: Any) -> bool:
    """Whether no array was consumed, or is the output of a failed program."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception:
        return False
    return True
