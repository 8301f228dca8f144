"""What an engine's thread does: has documents read, lets questions into a batch, takes steps, hands out tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt8

from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.decode import DecodingState
from tca_jax.engine.extend import align, num_columns, rows_with_leaving_block
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.read import require_finite
from tca_jax.engine.sampling import Sampling
from tca_jax.errors import UserError
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.serve import programs
from tca_jax.serve.constraints import Constraint, next_allowed
from tca_jax.serve.documents import Document, Documents, document_id
from tca_jax.serve.pages import FreePages, LocalTable, RowTable, TableWidths, pool_only
from tca_jax.serve.programs import MOST_STEPS, Drawing, Row, Said
from tca_jax.serve.reading import Reader
from tca_jax.serve.streams import FinishReason, Stream

_PIECE_TOKENS = 2048  # of a question that are fed before running answers take steps again
_STEPS_SECONDS = 0.03  # answers take steps for about so long before the engine looks around
_MOST_STOPS = 8  # stop tokens of a row, at first
_LEAST_WIDTH = 4  # least step between the widths of tables
_MOST_STEP_PROGRAMS = 16  # held at hand
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Ask:
    """A request: tokens behind a document, and then an answer, or a longer document.

    Attributes:
        stream: Of the answer; None where `target` is all that is wanted.
        document: What it continues from.
        new: Tokens that are fed behind it.
        sample: Which of several answers it is.
        constraint: On its tokens; None for none.
        target: The document that document and new tokens become; None for an answer.
        fed: Tokens of `new` that were fed.
        table: Of its own pages; None until it was let in.
        numbers: Of these pages in the pool of answers.
        own: The same on the device; None until something is in them.
        logits: Of the token behind what was fed.
        slot: Its row of the batch.
        taken: Tokens of the answer that were handed out.
        granted: Tokens that the steps which were launched may bring it to.
        allowed: What its constraint allows next, packed; None for everything.
        pins: Whether it keeps its document where it is.
        arrival: Its place among all requests.
        room: Pages that `target` was found to need on the device beside the document's.
    """

    stream: Stream | None
    document: Document
    new: list[int]
    sample: int = 0
    constraint: Constraint | None = None
    target: Document | None = None
    fed: int = 0
    table: LocalTable | None = None
    numbers: Int32[np.ndarray, "D P"] | None = None
    own: RowTable | None = None
    logits: Any = None
    slot: int | None = None
    taken: int = 0
    granted: int = 0
    allowed: UInt8[np.ndarray, " W"] | None = None
    pins: bool = False
    arrival: int = 0
    room: int = 0

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of the answer."""
        return 0 if self.stream is None else self.stream.options.max_new_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of its tokens are asked for."""
        return self.stream is not None and self.stream.options.logprobs is not None

    @property
    def tokens(self) -> list[int]:
        """What the row holds before the answer."""
        return self.document.tokens + self.new


class _Launched(NamedTuple):
    """Steps that the device takes.

    Attributes:
        said: What it will say then, a packed `Said`.
        begin: When they were launched.
        steps: How many they are.
    """

    said: Any
    begin: float
    steps: int


class _Told(NamedTuple):
    """What the device has said of the rows of the batch, on the host; `DecodingState` has the last two."""

    said: Said
    logprobs: Any
    top: Any


class Scheduler:
    """What the engine's thread works at. Other threads call what begins with `require`, and `pages`.

    Requests that need pages get them in order of arrival: behind one that waits for pages, none takes such, unless it
    already keeps a document where it is, which only its end sets free. So whatever waits comes to its turn.

    Args:
        lm: The model.
        documents: Its documents.
        max_rows: Rows of the batch.
        answer_tokens: Tokens of their own that so many rows have room for.
        backend: Kernel backend.
    """

    def __init__(self, lm: LM, documents: Documents, max_rows: int, answer_tokens: int, backend: Backend) -> None:
        self._lm, self._documents, self._backend = lm, documents, backend
        self._program_lm, self._bare_lm = lm.for_programs(), lm.without_weights()
        self._on_mesh, self._devices = lm.mesh is not None, documents.free.devices
        self._own_layout_of = functools.lru_cache(maxsize=64)(functools.partial(lm.following_layout, 1))
        pages = max_rows * self._own_layout(lm.config.max_context, answer_tokens).num_pages
        self._free = FreePages(pages, self._devices)
        # A batch of one row is written as a run of pages (`PagedCache.with_tokens`); a pool's pages are no run.
        self._max_rows, rows = max_rows, max(2, max_rows)
        self._rows: list[Ask | None] = [None] * rows
        self._state, self._shared = self._empty_batch(rows)
        self._widths, self._own_widths = TableWidths(0, 0), TableWidths(0, 0)
        self._reader = Reader(lm, documents, backend, self._recover)
        self._asks: list[Ask] = []
        self._arrivals = itertools.count()
        self._answers_waited = False  # a request waits for a row, or for pages of answers
        self._room_waited = math.inf  # arrival of the first request that waits for pages of documents
        self._step_programs: dict[Any, list[Callable[..., Any]]] = {}
        self._launched: _Launched | None = None
        self._step_seconds = self._told_at = 0.0

    # What other threads call

    @property
    def pages(self) -> FreePages:
        """Pages of answers."""
        return self._free

    def require_pages(self, tokens: int) -> None:
        """Raises ValueError if a document of so many tokens can never be held."""
        needed = self._lm.cache_layout(1, bucket_length(tokens)).num_pages
        if needed > (total := self._documents.free.total):
            raise UserError(f"{tokens:,} tokens need {needed:,} pages: the engine holds {total:,} (pages)")

    def require_room(self, document_tokens: int, own_tokens: int) -> None:
        """Raises ValueError if a question and its answer can never be held."""
        needed = self._own_layout(document_tokens, own_tokens).num_pages
        if needed > self._free.total:
            raise UserError(
                f"question and answer of up to {own_tokens:,} tokens need {needed:,} pages: all rows of the engine "
                f"together have {self._free.total:,} (answer_tokens, max_rows)"
            )

    # What its own thread calls

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be read or answered."""
        return not (self._asks or any(self._rows)) and self._reader.is_idle

    def read(self, document: Document) -> None:
        """A document is to be read."""
        document.arrival = next(self._arrivals)
        self._documents.add(document)
        self._reader.add(document)

    def append(self, ask: Ask) -> None:
        """A document is to be made of another one and more tokens."""
        assert ask.target is not None
        self._documents.add(ask.target)
        self.ask(ask)

    def ask(self, ask: Ask) -> None:
        """A question is to be answered."""
        ask.arrival = next(self._arrivals)
        if not ask.document.named:  # nobody else keeps it
            self._pin(ask)
        self._asks.append(ask)

    def cancel(self, stream: Stream) -> None:
        """Ends an answer."""
        for ask in [*self._asks, *filter(None, self._rows)]:
            if ask.stream is stream:
                self._leave(ask, "cancelled")

    # The loop

    def once(self, is_called: Callable[[], bool]) -> bool | None:
        """One round; whether there is more to do now, or None while something is under way.

        Args:
            is_called: Whether other threads want something done between rounds.
        """
        documents = self._documents
        under_way = documents.move()
        for document, error in documents.failures():
            for ask in [each for each in self._asks if each.document is document and each.table is None]:
                self._fail(ask, error)
            self._recover(error)
        under_way |= documents.store()
        worked = self._reader.read_on(self._room_waited)
        worked |= self._let_in()
        if any(self._rows):
            worked = True
            try:
                self._steps(is_called)
            except Exception as error:
                for ask in filter(None, list(self._rows)):
                    self._fail(ask, error)
                self._recover(error)
        for document in documents.lost():
            self._read_again(document)
            worked = True
        return True if worked else None if under_way or self._asks or not self._reader.is_idle else False

    def end(self, failure: Exception | None) -> None:
        """Nothing follows: answers end, documents that are being stored are stored."""
        self._reader.close()
        for ask in [*self._asks, *filter(None, self._rows)]:
            if ask.stream is None:
                continue
            if failure is None:
                ask.stream.end("cancelled")
            else:
                ask.stream.fail(failure)
        self._documents.finish_storing()

    # Errors

    def _recover(self, error: Exception) -> None:
        """Makes anew what a program has consumed and, for an error, not given back. Rows of the batch fail of it, other
        requests begin again."""
        state, pool = _is_whole((self._state, self._shared)), _is_whole(self._documents.pool)
        if state and pool:
            return
        _log.error("the batch begins again after an error", exc_info=error)
        for ask in filter(None, list(self._rows)):
            self._fail(ask, error)
        for ask in self._asks:
            self._begin_again(ask)
        if not state:
            self._begin_batch()
        if not pool:
            self._documents.renew()

    def _begin_batch(self) -> None:
        """An empty batch, as wide as the one before."""
        del self._state, self._shared  # their memory is that of the new ones
        self._launched = None
        self._state, self._shared = self._empty_batch(len(self._rows))
        widths, own_widths = self._widths, self._own_widths
        self._widths, self._own_widths = TableWidths(0, 0), TableWidths(0, 0)
        self._widen(widths, own_widths)

    def _begin_again(self, ask: Ask) -> None:
        """A request that is not in the batch gives back what it has, and waits."""
        self._give_back_pages(ask)
        ask.table = ask.own = ask.logits = None
        ask.fed = 0
        if ask.document.named:
            self._unpin(ask)

    def _read_again(self, document: Document) -> None:
        """A document is read once more, in the parts in which it was."""
        documents = self._documents
        if not (document.named or document.users):
            documents.drop(document)
            return
        _log.warning("document %s is read again", document.id)
        *before, last = document.parts
        if not before:
            self._reader.add(document, first=True)
            return
        tokens, parts = document.tokens[:-last], tuple(before)
        for named in (True, False):
            parent = documents.get(document_id(self._lm, tokens, parts, named=named))
            if parent is not None and parent.state != "failed":
                break
        else:
            parent = Document(document_id(self._lm, tokens, parts, named=False), tokens, parts, named=False)
        ask = Ask(None, parent, document.tokens[-last:], target=document)
        self.ask(ask)
        if documents.get(parent.id) is not parent:
            documents.add(parent)
            self._read_again(parent)

    # Letting in

    def _let_in(self) -> bool:
        """Feeds a piece of each request that can go on; whether there was one."""
        worked, self._answers_waited, self._room_waited = False, False, math.inf
        self._documents.load_only({ask.document.id for ask in self._asks})
        for ask in list(self._asks):
            with self._failing(ask):
                worked |= self._go_on(ask)
        return worked

    @contextlib.contextmanager
    def _failing(self, ask: Ask) -> Iterator[None]:
        """Errors are those of the request, not of the engine."""
        try:
            yield
        except Exception as error:
            self._fail(ask, error)
            self._recover(error)

    def _go_on(self, ask: Ask) -> bool:
        document = ask.document
        if document.error is not None:
            raise document.error
        if ask.room:  # nobody behind takes what its target will need
            self._wait_for_room(ask, ask.room)
        if ask.table is None and not (self._is_here(ask) and self._begin(ask)):
            return False
        if ask.fed < len(ask.new) or ask.own is None:
            self._feed(ask)
            if ask.fed < len(ask.new):
                return True
        if ask.target is not None:
            return self._become(ask, ask.target)
        slot = next((i for i, row in enumerate(self._rows[: self._max_rows]) if row is None), None)
        if slot is None:
            return False
        if self._constrain(ask):
            self._admit(ask, slot)
        return True

    def _is_here(self, ask: Ask) -> bool:
        """Whether a request's document is on the device; it is brought, and kept there, if it is somewhere else."""
        document, documents = ask.document, self._documents
        if not ask.pins and ask.arrival > min(self._room_waited, self._reader.waits):
            return False
        if document.state in ("host", "disk") and documents.load(document):
            if documents.bring(document):
                self._pin(ask)
            else:
                self._wait_for_room(ask, document.num_pages)
        return documents.is_here(document)

    def _wait_for_room(self, ask: Ask, pages: int) -> None:
        """Requests that come later wait, too, if so many pages can become free when others end."""
        if self._documents.would_have_room(pages):
            self._room_waited = min(self._room_waited, ask.arrival)

    def _begin(self, ask: Ask) -> bool:
        """Gives a request pages of its own; whether there are enough, and a row for its answer."""
        layout = self._own_layout(len(ask.document.tokens), len(ask.new) + ask.max_new_tokens)
        has_row = ask.target is not None or None in self._rows[: self._max_rows]
        if self._answers_waited or not has_row or layout.num_pages > self._free.free:
            self._answers_waited = True
            return False
        pinned = ask.pins
        self._pin(ask)
        if ask.room and not self._documents.make_room(ask.room):
            if not pinned:
                self._unpin(ask)
            return False
        self._documents.asked(ask.document)
        start = len(ask.document.tokens) // layout.block_size * layout.block_size
        ask.table = LocalTable.of_layout(layout, start)
        ask.numbers = self._free.take(ask.table.used)
        assert ask.document.table is not None
        self._widen(ask.document.table.widths, ask.table.widths)
        return True

    def _pin(self, ask: Ask) -> None:
        ask.document.users += not ask.pins
        ask.pins = True

    def _unpin(self, ask: Ask) -> None:
        ask.document.users -= ask.pins
        ask.pins = False

    def _feed(self, ask: Ask) -> None:
        """A piece of a request's tokens, or none where there are none and only the last block is copied."""
        begins, held, b = ask.own is None, len(ask.document.tokens) + ask.fed, self._lm.method.cache.block_size
        piece = ask.new[ask.fed : ask.fed + _PIECE_TOKENS - held % b]
        columns = num_columns(held % b + len(piece), b) if piece else 0
        tokens = np.zeros((1, 0), np.int32)
        if piece:
            tokens = align(np.asarray([piece], np.int32), np.asarray([held]), block_size=b, columns=columns)
        assert ask.table is not None
        assert ask.numbers is not None
        own = ask.own or ask.table.numbered(ask.numbers, self._own_widths, self._free.total, self._on_mesh)
        sizes = [np.asarray([x], np.int32) for x in (held, len(piece), ask.document.parts[0])]
        document = self._documents.row_table(ask.document, self._widths)
        arguments = self._state, self._documents.pool, document, self._wide(own), tokens, *sizes
        static: Any = {"begins": begins, "backend": self._backend}
        self._state, ask.own, logits = programs.extend_row.run(self._program_lm, *arguments, **static)
        ask.fed += len(piece)
        ask.logits = ask.document.logits if logits is None else logits

    def _become(self, ask: Ask, target: Document) -> bool:
        """The target of a request becomes a document; where there is no room for it, the request begins again when
        there is: others could wait for what it has."""
        assert ask.own is not None
        self._require_finite(ask, bool(np.isfinite(on_host(ask.logits)).all()))
        ask.room = self._documents.enter_joined(target, ask.document, ask.own, pool_only(self._state.cache))
        if ask.room:
            self._wait_for_room(ask, ask.room)
            self._begin_again(ask)
            return False
        self._leave(ask, "stop")
        return True

    # The batch

    def _admit(self, ask: Ask, slot: int) -> None:
        """A request's row joins the batch, and its first token is drawn."""
        assert ask.stream is not None
        assert ask.own is not None
        ask.slot, self._rows[slot] = slot, ask
        self._asks.remove(ask)
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
        self._launched = _Launched(said, 0.0, 0)  # it says what steps before have drawn, too

    def _fit(self) -> None:
        """Makes the state hold what its rows need, and nothing else that takes time."""
        rows = [ask.stream.options for ask in self._rows if ask is not None and ask.stream is not None]
        count, vocabulary = len(self._rows), self._lm.config.vocab_size
        state = self._state
        stops = max(len(options.stop_tokens) for options in rows)
        if stops > state.stop_tokens.shape[1]:
            wide = ((0, 0), (0, bucket_length(stops, 1) - state.stop_tokens.shape[1]))
            state = dataclasses.replace(state, stop_tokens=jnp.pad(state.stop_tokens, wide, constant_values=vocabulary))
        if all(options.sampling == Sampling() for options in rows) and not self._constrained:
            state = dataclasses.replace(state, seen=None)
        elif state.seen is None:
            state = dataclasses.replace(state, seen=jnp.zeros((count, vocabulary), bool))
        most = max(options.logprobs or 0 for options in rows)
        if not most:
            state = dataclasses.replace(state, top=None)
        elif state.top is None or state.top[0].shape[-1] < most:
            shape = count, MOST_STEPS, min(vocabulary, bucket_length(most, 4))
            top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
            state = dataclasses.replace(state, top=top)
        self._state = state

    def _steps(self, is_called: Callable[[], bool]) -> None:
        """Some steps of the batch. The next ones are launched before what these have drawn is handed out, so that the
        device does not wait for that; but not where a constraint needs to know it, where a part of a document is read
        next, for which what was drawn would wait, nor before somebody's new request."""
        at_once = self._constrained or not self._reader.is_idle
        told = self._wait()
        if told is None or not (at_once or is_called()):
            self._launch()
        if told is None and at_once:
            told = self._wait()
        if told is not None:
            self._hand_out(told)

    def _launch(self) -> None:
        """Has the device take steps."""
        rows = [ask for ask in self._rows if ask is not None]
        steps = 1 if not self._step_seconds else int(_STEPS_SECONDS / self._step_seconds)
        steps = 1 if self._constrained else max(1, min(MOST_STEPS, steps))
        sampling, allowed = self._sampling(self._rows), None if self._state.seen is None else self._allowed(self._rows)
        begin, said, taken = time.perf_counter(), None, 0
        while taken < steps and (moving := [ask for ask in rows if ask.granted < ask.max_new_tokens]):
            evicts = self._evict(moving)
            for ask in moving:
                ask.granted += 1
            limit = np.asarray([0 if ask is None else ask.granted for ask in self._rows], np.int32)
            arguments = self._state, self._documents.pool, self._shared, limit, sampling, allowed
            program = self._step_program(arguments, evicts)
            begin = begin if taken else time.perf_counter()  # compiling is not the step's time
            self._state, said = program(self._program_lm, *arguments)
            taken += 1
        if said is not None:
            self._launched = _Launched(said, begin, taken)

    def _wait(self) -> _Told | None:
        """What the device has said, once the steps that were launched are taken; None if none were."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None
        asked = any(ask is not None and ask.wants_logprobs for ask in self._rows)
        state = self._state
        said, logprobs, top = on_host((launched.said, *((state.logprobs, state.top) if asked else (None, None))))
        now = time.perf_counter()
        if launched.steps:
            seconds = (now - max(launched.begin, self._told_at)) / launched.steps
            self._step_seconds = seconds if not self._step_seconds else (self._step_seconds + seconds) / 2
        self._told_at = now
        return _Told(Said.of(said), logprobs, top)

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

    def _require_finite(self, ask: Ask, finite: bool) -> None:
        """Raises ValueError, as `generate` does, unless a request's logits are finite."""
        if not finite:
            tokens = np.asarray([ask.tokens], np.int32)
            lengths, finite_rows = np.asarray([tokens.shape[1]], np.int32), np.zeros(1, bool)
            require_finite(self._lm, tokens, lengths, finite_rows, "prompts")

    def _hand_out(self, told: _Told) -> None:
        """Gives streams their new tokens, and ends those that have ended."""
        said, logprobs, top = told
        rows = [(slot, ask, ask.stream) for slot, ask in enumerate(self._rows) if ask is not None and ask.stream]
        for slot, ask, stream in rows:
            try:
                self._require_finite(ask, said.finite[slot])
            except Exception as error:
                self._fail(ask, error)
                continue
            places = [place % MOST_STEPS for place in range(ask.taken, said.step[slot])]
            ask.taken = said.step[slot]
            wanted, own, likeliest = stream.options.logprobs, list[float](), list[Any]()
            if wanted is not None:
                own = logprobs[slot, places].tolist()
            if wanted:
                ids, values = (x[slot, places, :wanted].tolist() for x in top)
                likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            stream.add([said.tokens[slot][place] for place in places], own, likeliest)
            if said.done[slot] or ask.taken >= ask.max_new_tokens:
                self._leave(ask, "stop" if said.done[slot] else "length")
            elif places and ask.constraint is not None:
                with self._failing(ask):
                    self._constrain(ask)

    def _constrain(self, ask: Ask) -> bool:
        """Asks the constraint of an answer, if it has one, for the next token; whether the answer goes on."""
        if ask.constraint is None or ask.stream is None:
            return True
        options, vocabulary = ask.stream.options, self._lm.config.vocab_size
        stops = options.stop_tokens if ask.taken < options.min_new_tokens else ()
        ask.allowed = next_allowed(ask.constraint, ask.stream.tokens, vocabulary, stops)
        if ask.allowed is None:
            self._leave(ask, "stop")
        return ask.allowed is not None

    @property
    def _constrained(self) -> bool:
        """Whether a row of the batch has a constraint."""
        return any(ask is not None and ask.constraint is not None for ask in self._rows)

    def _allowed(self, asks: Sequence[Ask | None]) -> UInt8[np.ndarray, "R W"]:
        """Tokens that rows may draw next, packed."""
        allowed = np.full((len(asks), -(-self._lm.config.vocab_size // 8)), 255, np.uint8)
        for row, ask in enumerate(asks):
            if ask is not None and ask.allowed is not None:
                allowed[row] = ask.allowed
        return allowed

    def _leave(self, ask: Ask, reason: FinishReason) -> None:
        """A request ends, and gives back what it has."""
        document = None
        if ask.stream is not None and ask.stream.keep and reason != "cancelled" and ask.slot is not None:
            try:
                document = self._kept(ask)
            except Exception as error:
                self._fail(ask, error)
                self._recover(error)
                return
        self._give_back(ask)
        if ask.stream is not None:
            ask.stream.end(reason, document)

    def _fail(self, ask: Ask, error: Exception) -> None:
        self._give_back(ask)
        if ask.stream is not None:
            ask.stream.fail(error)
        if ask.target is not None:
            self._documents.fail(ask.target, error)

    def _give_back(self, ask: Ask) -> None:
        if ask in self._asks:
            self._asks.remove(ask)
        if ask.slot is not None:
            self._rows[ask.slot], ask.slot = None, None
        self._give_back_pages(ask)
        self._unpin(ask)

    def _give_back_pages(self, ask: Ask) -> None:
        if ask.numbers is not None:
            self._free.give_back(ask.numbers)
            ask.numbers = None

    def _kept(self, ask: Ask) -> str | None:
        """The id of the document that a row's tokens become; None where there is no room for it."""
        assert ask.stream is not None
        assert ask.slot is not None
        fed = ask.stream.tokens[: ask.taken - 1]
        tokens, parts = ask.tokens + fed, (*ask.document.parts, len(ask.new) + len(fed))
        id_ = document_id(self._lm, tokens, parts, named=True)
        found = self._documents.get(id_)
        if found is None or found.state == "failed":
            document = Document(id_, tokens, parts, named=True)
            own = programs.own_row.run(self._bare_lm, self._state, np.int32(ask.slot))
            try:
                if self._documents.enter_joined(document, ask.document, own, pool_only(self._state.cache)):
                    return None
            except UserError:  # there never will be room
                return None
            self._documents.add(document)
        return id_

    # Shapes

    def _widen(self, document: TableWidths, own: TableWidths) -> None:
        """Makes tables wide enough; they never become narrower, so that a program serves all requests."""
        widths, own_widths = self._widths.at_least(_bucket(document)), self._own_widths.at_least(_bucket(own))
        if widths != self._widths:
            self._shared = programs.with_widths(self._shared, widths, self._documents.free.total)
            self._widths = widths
        if own_widths != self._own_widths:
            cache = programs.with_widths(self._state.cache, own_widths, self._free.total)
            self._state = dataclasses.replace(self._state, cache=cache)
            self._own_widths = own_widths

    def _wide(self, own: RowTable) -> RowTable:
        """A row's own table, as wide as the others are now."""
        return programs.wide_row(own, self._own_widths, self._free.total)

    def _own_layout(self, document_tokens: int, own_tokens: int) -> CacheLayout:
        """Pages of its own that a row needs behind a document."""
        most = self._lm.config.max_context
        sizes = min(most, bucket_length(document_tokens)), min(most, bucket_length(own_tokens))
        return self._own_layout_of(*sizes)

    def _empty_batch(self, rows: int) -> tuple[DecodingState, Any]:
        pool = programs.empty_pool.run(self._bare_lm, pages=self._free.total, dtype=self._lm.cache_dtype)
        return programs.empty_batch.run(self._bare_lm, pool, rows=rows, stops=_MOST_STOPS)

    def _sampling(self, asks: Sequence[Ask | None]) -> Sampling:
        """How the rows' tokens are drawn: nothing where all are greedy, else everything, so that two programs do. The
        second one takes masks of constraints, too."""
        rows = [Sampling() if ask is None or ask.stream is None else ask.stream.options.sampling for ask in asks]
        off: dict[str, Any] = {
            "temperature": 0.0,
            "top_k": 2**31 - 1,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if self._state.seen is None:  # all are greedy, and have no constraint
            return Sampling()
        arrays: dict[str, Any] = {}
        for name, value in off.items():
            own = [getattr(row, name) for row in rows]
            kind = np.int32 if name == "top_k" else np.float32
            arrays[name] = np.asarray([value if x is None else x for x in own], kind)
        return Sampling(**arrays)


def _bucket(widths: TableWidths) -> TableWidths:
    return TableWidths(*(bucket_length(width, _LEAST_WIDTH) if width else 0 for width in widths))


def _is_whole(arrays: Any) -> bool:
    """Whether no array was consumed, or is what a program that failed has left."""
    leaves = jax.tree.leaves(arrays)
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    try:
        jax.block_until_ready(leaves)
    except Exception:
        return False
    return True
