"""Rounds of the engine: documents are read, requests are admitted to the batch, steps are taken, tokens handed out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from tca_jax.engine import read
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import Rows, bare, row_of
from tca_jax.engine.prompts import bucket_length, pad_tokens
from tca_jax.errors import require
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.programs import shapes_of
from tca_jax.serve.batch import Batch, Request, is_intact
from tca_jax.serve.documents import Document, Documents, pins
from tca_jax.serve.pages import Numbers
from tca_jax.serve.streams import FinishReason, Stream

_TOGETHER_TOKENS = 2048  # longer documents are read alone, in turn with shorter ones
_PART_SECONDS = 0.025  # that answers wait: half for questions, a piece at least, the rest for documents, a layer
_COMPILE_WAIT_SECONDS = 0.01  # before answers take steps
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Reading:
    """Documents that are read together."""

    documents: list[Document]
    is_short: bool  # whether they are short, for which there is a turn of its own
    parts: Any = None  # iterator over tokens times layers of each part, which it reads
    programs: Future[Any] | None = None  # that compile before


class Scheduler:
    """The rounds of the engine's thread. Other threads call `require_pages` and `require_room` alone.

    Documents and requests get pages in order of arrival: after one that waits for pages of documents none takes any,
    unless it pins its parent. A document that waits for pages pins none, so that none of them waits for another.
    """

    def __init__(self, lm: LM, documents: Documents, max_rows: int, backend: Backend) -> None:
        self._lm, self._documents, self._pool = lm, documents, documents.pool
        self._batch = Batch(lm, documents.pool, max_rows, backend)
        self._backend, self._speeds = backend, [0.0, 0.0]  # tokens times layers a second, of others and short documents
        self._readings: list[Reading] = []  # one of short documents and another one; the last one's turn is next
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="tca-jax-compile")
        self._requests, self._arrivals = list[Request](), itertools.count()  # requests that have not ended

    # What other threads call

    def require_pages(self, tokens: int, parent: Document | None = None) -> None:
        """Raises ValueError if a document needs more pages than the engine has; `tokens` include its parent's."""
        needed, total = self._num_pages(tokens, parent), self._pool.documents
        require(needed <= total, f"{tokens:,} tokens need {needed:,} pages: the engine holds {total:,} (pages)")

    def require_room(self, document_tokens: int, own_tokens: int) -> None:
        """Raises ValueError if a question and its answer can never be held."""
        needed, total = self._batch.own_pages(document_tokens, own_tokens)[0], self._pool.answers
        all_rows = f"all rows of the engine together have {total:,} (answer_tokens, max_rows)"
        own = f"question and answer of up to {own_tokens:,} tokens"
        require(needed <= total, f"{own} need {needed:,} pages: {all_rows}")

    # What its own thread calls

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be read or answered."""
        return not (self._requests or self._documents.to_be_read())

    def add(self, user: Request | Document) -> None:
        user.arrival = next(self._arrivals)
        if isinstance(user, Document):
            self._documents.by_id[user.id] = user
        else:
            self._requests.append(user)
            if not user.parent.named:
                user.parent.users.add(user)

    def cancel(self, stream: Stream) -> None:
        for request in list(self._requests):
            if request.stream is stream:
                self._leave(request, "cancelled")

    def step(self, is_called: Callable[[], bool] = lambda: False) -> bool | None:
        """One round, for whose end other threads may wait; whether there is more to do, or None while under way."""
        documents, begun = self._documents, time.perf_counter()
        for document, error in documents.move():
            for request in [each for each in self._requests if each.parent is document and each.slot is None]:
                self._end(request, error)
            self._recover(error)
        under_way = documents.store()
        worked = self._no_pages = self._no_rows = False  # none waits yet for pages of documents, or for a row
        waiting: list[Any] = [*documents.to_be_read(), *(each for each in self._requests if not each.scheduled)]
        for each in (waiting := sorted(waiting, key=lambda each: each.arrival)):
            if worked and time.perf_counter() - begun > _PART_SECONDS / 2:
                break  # the others have the next round
            with self._failing(each):
                worked |= self._begin_reading(each) if isinstance(each, Document) else self._proceed(each)
            if isinstance(each, Request) and each.slot is not None and each.fed < len(each.new):
                waiting.append(each)  # its next piece comes after the others' turn
        worked |= self._read_on(max(_PART_SECONDS / 2, begun + _PART_SECONDS - time.perf_counter()))
        if requests := self._batch.requests:
            with self._failing(*requests):
                self._step(is_called)
        return True if worked or requests else None if under_way or not self.is_idle else False

    def end(self, failure: Exception | None) -> None:
        """Ends all answers, stores documents that are not stored yet, and gives the pool's memory back."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for request in self._requests:
            request.stream.end(failure or "cancelled")
        self._documents.close()
        self._pool.arrays = None  # answers that a caller keeps name the engine

    # Errors

    @contextlib.contextmanager
    def _failing(self, *concerned: Request | Document) -> Iterator[None]:
        """Fails requests and documents, not the engine, with an error of the body."""
        try:
            yield
        except Exception as error:
            for each in concerned:
                if isinstance(each, Document):
                    self._documents.fail(each, error)
                else:
                    self._end(each, error)
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Replaces the arrays that a failed program has consumed: rows of the batch fail, other requests restart."""
        pool = is_intact(self._pool.arrays)
        if pool and is_intact((self._batch.state, self._batch.table)):
            return
        _log.error("the batch begins again after an error", exc_info=error)
        for request in self._batch.requests:
            self._end(request, error)
        for request in self._requests:
            self._batch.end(request)
            request.logits, request.fed = None, 0
            if request.parent.named:
                request.parent.users.discard(request)
        self._batch.restart()
        if not pool:
            for reading in list(self._readings):
                self._end_reading(reading)
            for document in self._documents.all():
                if document.here:
                    self._documents.leave_device(document)
            self._pool.renew()

    # Admission

    def _begin_reading(self, document: Document) -> bool:
        """Starts to read a document, and short ones with it; false without enough pages, and while others are read."""
        is_short = self._is_short(document)
        if any(each.is_short == is_short for each in self._readings) or (self._no_pages and not pins(document)):
            return False
        if (parent := self._documents.parent_of(document)) is not None:
            if not self._reach(document):
                return False
            parent.users.add(document)
        group = self._group(document)
        count = self._num_pages(max(len(each.tokens) for each in group), document.parent, len(group))
        if not self._has_room(document, count):
            self._documents.unpin(document)  # others may need the parent's pages
            return False
        numbers, reading = self._pool.allocator.take(count), Reading(group, is_short)
        self._readings.insert(0, reading)
        reading.parts = self._append(document, numbers) if document.parent else self._read(reading, numbers)
        next(reading.parts)
        wait([reading.programs] if reading.programs else [], _COMPILE_WAIT_SECONDS)
        return True

    def _proceed(self, request: Request) -> bool:
        """Feeds a piece of a request; false where it waits."""
        if request.slot is None and not self._begin(request):
            return False
        if request.fed < len(request.new):
            with self._failing(*self._batch.requests):
                jax.block_until_ready(self._pool.arrays)  # of a step under way, whose error is not this request's
            if request.slot is None:  # the batch began again
                return False
            self._batch.feed_next(request)
            jax.block_until_ready(self._pool.arrays)  # the round's time counts it
            request.arrival = next(self._arrivals)
        if request.fed == len(request.new) and self._update_mask(request):
            self._batch.admit(request)
        return True

    def _begin(self, request: Request) -> bool:
        """Gives a request a row; false before its document is on the device, and without enough pages or a free row."""
        if (self._no_pages and not pins(request)) or not self._reach(request):
            return False
        if self._no_rows or not self._batch.begin(request):
            self._no_rows = True
            return False
        request.parent.users.add(request)
        if request.parent.id in self._documents.by_id:
            self._documents.by_id.move_to_end(request.parent.id)
        return True

    def _reach(self, user: Request | Document) -> bool:
        """Whether the parent of a request or a document is on the device; starts to move it there if there is room."""
        parent: Any = user.parent
        if parent.error is not None:
            raise parent.error
        if parent.state == "disk":
            self._documents.load(parent)
        if parent.state == "host" and self._has_room(user, parent.num_pages) and parent.state == "host":
            self._documents.bring(parent)
            parent.users.add(user)
        return parent.state == "device"

    def _has_room(self, user: Request | Document, count: int) -> bool:
        """Whether pages of documents are free; if not, later ones wait, too. ValueError if none will ever be."""
        if self._documents.make_room(count):
            return True
        most = self._pool.documents - (user.parent.num_pages if user.parent is not None and pins(user) else 0)
        require(count <= most, f"{count:,} pages are needed, and the engine holds {most:,} (pages) beside the parent's")
        full = f"{count:,} pages are needed: host memory and disk have no room for other documents; delete some"
        here = [each for each in self._documents.all() if each.here]  # some may leave later
        may_leave = any(each.state == "moving" or each.storing or each.users - {user} for each in here)
        require(self._readings or may_leave, full)
        self._no_pages = True
        return False

    # The batch

    def _step(self, is_called: Callable[[], bool]) -> None:
        """A step of the batch, after the next one's dispatch, unless masks, documents or other threads come before."""
        batch = self._batch
        if not batch.pending:
            batch.dispatch()
        if not (batch.waits or self._readings or is_called()):
            batch.dispatch()
        for request, new, finite, done in batch.wait():
            if request.slot is None:  # the error of another row has ended it
                continue
            with self._failing(request):
                if not finite:  # a long document's tokens take as long to join as a step
                    read.require_finite(self._lm, np.array([finite]), "prompts", [request.tokens].__getitem__)
                if done or request.streamed >= request.max_new_tokens:
                    self._leave(request, "stop" if done else "length")
                elif new:
                    self._update_mask(request)
        if not batch.requests:  # the pending step has no rows left
            batch.pending.clear()

    def _update_mask(self, request: Request) -> bool:
        """Computes the mask of an answer, if it has one, for the next token; whether the answer goes on."""
        if request.mask is None:
            return True
        config, size = request.stream.config, self._lm.config.vocab_size
        allowed = np.array(request.mask(request.stream.tokens), bool)
        wanted = f"must be ({size},), a bool for each token of the model"
        require(allowed.shape == (size,), f"mask returns shape {allowed.shape}: {wanted}")
        if request.streamed < config.min_new_tokens:
            allowed[list(config.stop_token_ids or ())] = False
        request.allowed = np.packbits(allowed, bitorder="little")  # the lowest bit first
        if not allowed.any():
            self._leave(request, "stop")
        return bool(allowed.any())

    def _leave(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, and frees its resources."""
        with self._failing(request):
            kept, documents, parent = None, self._documents, request.parent
            if request.stream.keep and reason != "cancelled" and request.scheduled:
                fed = request.stream.tokens[: request.streamed - 1]
                tokens, parts = request.tokens + fed, (*parent.parts, len(request.new) + len(fed))
                document, row = Document(documents.id_of(tokens, parts), tokens, parts), self._batch.row_of(request)
                known = documents.usable(document.id) is not None
                kept = document.id if known or documents.enter(document, on_host(row), parent.attended_share) else None
            self._end(request, reason, kept)

    def _end(self, request: Request, how: FinishReason | Exception, kept: str | None = None) -> None:
        if request in self._requests:
            self._requests.remove(request)
        request.parent.users.discard(request)
        self._batch.end(request)
        request.stream.end(how, kept)

    # Reading: short documents together, layer by layer, and parts that are appended, by pieces. Programs compile aside.

    def _num_pages(self, tokens: int, parent: Document | None = None, documents: int = 1) -> int:
        """Pages for reading documents of at most `tokens` tokens each, without those of a parent."""
        if parent is not None:
            return self._batch.own_pages(len(parent.tokens), tokens - len(parent.tokens))[0]
        return self._lm.cache_layout(documents, bucket_length(tokens)).num_pages

    def _group(self, document: Document) -> list[Document]:
        """Documents that are read together, in order of arrival: a power of two of them, of one bucket."""
        first = bucket_length(len(document.tokens))
        if self._readings or not self._is_short(document):
            return [document]
        same = [x for x in self._documents.to_be_read() if self._is_short(x) and bucket_length(len(x.tokens)) == first]
        most = min(len(same), self._pool.documents // self._num_pages(first), max(1, _TOGETHER_TOKENS // first))
        return [document, *(each for each in same if each is not document)][: 1 << (most.bit_length() - 1)]

    def _is_short(self, document: Document) -> bool:
        return len(document.parts) == 1 and bucket_length(len(document.tokens)) <= _TOGETHER_TOKENS

    def _end_reading(self, reading: Reading) -> None:
        """Ends a reading, and frees its pages."""
        if reading in self._readings:
            self._readings.remove(reading)
            if reading.programs is not None:
                reading.programs.cancel()
            reading.parts.close()
            for document in reading.documents:
                self._documents.unpin(document)

    def _read_on(self, seconds: float) -> bool:
        """Reads on, a layer at least; false if nothing is read, or programs compile. An error may consume the pool."""
        for reading in reversed(self._readings):
            wanted = any(each.state == "waiting" for each in reading.documents)
            if not wanted or reading.programs is None or reading.programs.done():
                break
        else:
            return False
        self._readings = [reading, *(each for each in self._readings if each is not reading)]
        begun, done, kind = time.perf_counter(), 0, reading.is_short
        with self._failing(*reading.documents):
            try:
                for count in reading.parts if wanted else ():
                    if (done := done + count) + count > self._speeds[kind] * seconds:
                        break
                else:
                    self._end_reading(reading)
                # Waited for, so that an error is these documents', and a new request waits for this part at most.
                jax.block_until_ready(self._pool.arrays)
            except Exception:
                self._end_reading(reading)
                raise
            self._speeds[kind] = done / (time.perf_counter() - begun) or self._speeds[kind]
        return True

    def _append(self, document: Document, numbers: Numbers) -> Iterator[int]:
        """Reads the last part of a document into pages, after its parent; yields tokens times layers of each piece."""
        parent: Any = document.parent
        pool, batch, held, logits = self._pool, self._batch, len(parent.tokens), None
        try:
            yield 0
            # As many free pages as questions are given, whose programs these are.
            free = pool.free_pages(numbers, max(pool.answers, len(numbers[0])))
            table = batch.fork(parent, len(document.tokens) - held, free)
            while held < len(document.tokens):
                table, logits, count = batch.feed(table, document.tokens[held:], held)
                held += count
                yield count * self._lm.config.num_layers
            self._enter([document], on_host(logits), [parent.attended_share], on_host(table))
        finally:
            pool.allocator.release(numbers)  # the document uses what it needs of them

    def _read(self, reading: Reading, numbers: Numbers) -> Iterator[int]:
        """Reads documents into pages: starts to compile, then yields the tokens of each layer."""
        lm, pool, calls, group = self._lm.for_programs, self._pool, read.Calls(), reading.documents
        tokens, lengths = pad_tokens([each.tokens for each in group], lm.pad_token_id)
        layout, backend = self._lm.cache_layout(len(group), tokens.shape[1]), self._backend
        try:
            if lm.method.cache.reader is not None and layout.has_ranked_blocks:
                given = tokens, lengths, lengths, layout, calls
                reading.programs = self._compilers.submit(functools.partial(read.read, lm, *given, backend=backend))
                yield 0
                logits, rows, shares = reading.programs.result()
                self._enter(group, *on_host((logits, shares, rows)))
                return
            table = pool.empty_table(len(group), layout.widths, numbers)
            layers = read.Layers(lm, tokens, lengths, lengths, layout, calls, backend)
            reading.programs = self._compilers.submit(layers.prepare, shapes_of(pool.lend(table)))
            yield 0
            reading.programs.result()
            layers.begin()
            for number in range(lm.config.num_layers):
                table = pool.take_back(layers.read(number, pool.lend(table)))
                yield tokens.size
            logits, shares = layers.end()
            self._enter(group, *on_host((logits, shares, table)))
        finally:
            pool.allocator.release(numbers)  # documents use what they need of them

    def _enter(self, group: list[Document], logits: Any, shares: Any, rows: Rows) -> None:
        """Enters documents that were read: rows of the engine's pool, or in the host's memory with one of their own."""
        for row, document in enumerate(group):
            if document.state != "waiting":  # no one wants it any more
                continue
            own, of_row, share = logits[row : row + 1], row_of(bare(rows), row), float(shares[row])
            try:
                read.require_finite(self._lm, np.isfinite(own).all(axis=-1), "document", [document.tokens].__getitem__)
                if rows.k is None:
                    self._documents.enter(document, of_row, share)
                else:
                    self._documents.enter_context(document, dataclasses.replace(of_row, k=rows.k, v=rows.v), share)
            except Exception as error:
                self._documents.fail(document, error)
            document.logits = None if document.named else own
