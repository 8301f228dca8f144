"""Rounds of the engine: documents are read, requests are admitted to the batch, steps are taken, tokens handed out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine import read
from tca_jax.engine.cache import CacheLayout
from tca_jax.engine.generation_config import GenerationConfig
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import Numbers, Rows
from tca_jax.engine.prompts import bucket_length, pad_tokens
from tca_jax.errors import UserError, require
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.programs import results_of, shapes_of
from tca_jax.serve import pages
from tca_jax.serve.batch import Batch, Request, is_intact
from tca_jax.serve.constraints import packed_mask
from tca_jax.serve.documents import Document, Documents
from tca_jax.serve.pages import Widths, bare, row_of
from tca_jax.serve.streams import FinishReason, Stream

_TOGETHER_TOKENS = 2048  # longer prompts are read alone
# Tokens times layers between two steps; a layer is the least. Running answers wait as long as they take: for a layer of
# LLaMA-3.1-8B at 131,072 tokens 57 TFLOP of matrix products, a tenth of a second of an H200, and its attention.
_PART_TOKENS = 131_072
_COMPILERS = 2  # threads
_COMPILE_WAIT_SECONDS = 0.01  # before answers take steps
_log = logging.getLogger(__name__)


class Scheduler:
    """The rounds of the engine's thread. Other threads call `require_pages` and `require_room` alone.

    Requests get pages in order of arrival: after one that waits for pages, none takes any, unless it already pins its
    document, which only its end unpins. So each request that waits comes to its turn.
    """

    def __init__(self, lm: LM, documents: Documents, max_rows: int, backend: Backend) -> None:
        self._lm, self._documents, self._pool = lm, documents, documents.pool
        self._batch = Batch(lm, documents.pool, max_rows, backend)
        self._prefiller = Prefiller(lm, documents, backend, self._recover)
        self._waiting: list[Request] = []
        self._arrivals = itertools.count()
        self._answers_blocked = False  # a request waits for a row, or for pages of answers
        self._first_blocked = math.inf  # arrival of the first request that waits for pages of documents

    # What other threads call

    def require_pages(self, tokens: int) -> None:
        """Raises ValueError if a document can never be held."""
        needed, total = read.num_pages(self._lm, self._lm.cache_layout(1, bucket_length(tokens))), self._pool.documents
        require(needed <= total, f"{tokens:,} tokens need {needed:,} pages: the engine holds {total:,} (pages)")

    def require_room(self, document_tokens: int, own_tokens: int) -> None:
        """Raises ValueError if a question and its answer can never be held."""
        needed, _ = self._batch.own_pages(document_tokens, own_tokens)
        require(
            needed <= self._pool.answers,
            f"question and answer of up to {own_tokens:,} tokens need {needed:,} pages: all rows of the engine "
            f"together have {self._pool.answers:,} (answer_tokens, max_rows)",
        )

    # What its own thread calls

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be read or answered."""
        return not (self._waiting or self._batch.requests) and self._prefiller.is_idle

    def read(self, document: Document) -> None:
        """Adds a document to be read."""
        document.arrival = next(self._arrivals)
        self._documents.by_id[document.id] = document
        self._prefiller.add(document)

    def append(self, target: Document, parent: Document) -> None:
        """Adds a document that continues another one."""
        stream, new = Stream(self._lm, GenerationConfig()), target.tokens[len(parent.tokens) :]
        self._documents.by_id[target.id] = target
        self.add(Request(stream, parent, new, target=target))

    def add(self, request: Request) -> None:
        """Adds a request."""
        request.arrival = next(self._arrivals)
        if not request.document.named:
            self._pin(request)
        self._waiting.append(request)

    def cancel(self, stream: Stream) -> None:
        """Ends an answer."""
        for request in [*self._waiting, *self._batch.requests]:
            if request.stream is stream:
                self._leave(request, "cancelled")

    def step(self, is_called: Callable[[], bool]) -> bool | None:
        """One round; whether there is more to do now, or None while something is under way.

        `is_called`: whether calls of other threads wait for the end of the round.
        """
        documents = self._documents
        under_way = documents.move()
        while documents.failures:
            document, error = documents.failures.pop(0)
            for request in [each for each in self._waiting if each.document is document and each.slot is None]:
                self._fail(request, error)
            self._recover(error)
        under_way |= documents.store()
        worked = self._prefiller.read_on(self._first_blocked)
        worked |= self._admit_requests()
        if self._batch.requests:
            worked = True
            try:
                self._step(is_called)
            except Exception as error:
                self._recover(error)
                for request in self._batch.requests:
                    self._fail(request, error)
        while documents.lost:
            self._read_again(documents.lost.pop(0))
            worked = True
        return True if worked else None if under_way or self._waiting or not self._prefiller.is_idle else False

    def end(self, failure: Exception | None) -> None:
        """Ends all answers, and stores documents that are not stored yet."""
        self._prefiller.close()
        for request in [*self._waiting, *self._batch.requests]:
            request.stream.end(failure or "cancelled")
        self._documents.finish_storing()

    # Errors

    def _recover(self, error: Exception) -> None:
        """Replaces the arrays that a failed program has consumed: rows of the batch fail, other requests restart."""
        pool = is_intact(self._pool.arrays)
        if self._batch.is_intact and pool:
            return
        _log.error("the batch begins again after an error", exc_info=error)
        for request in self._batch.requests:
            self._fail(request, error)
        for request in self._waiting:
            self._restart(request)
        self._batch.restart()
        if not pool:
            self._prefiller.restart()
            self._documents.renew()

    def _restart(self, request: Request) -> None:
        """Frees the pages of a request that is not in the batch; it waits again."""
        self._batch.end(request)
        request.logits, request.fed = None, 0
        if request.document.named:
            self._unpin(request)

    @contextlib.contextmanager
    def _failing(self, request: Request) -> Iterator[None]:
        """Fails a request, not the engine, with an error of the body."""
        try:
            yield
        except Exception as error:
            self._fail(request, error)
            self._recover(error)

    def _read_again(self, document: Document) -> None:
        """Reads a lost document again, in the same parts."""
        documents = self._documents
        if not (document.named or document.users):
            documents.drop(document)
            return
        _log.warning("document %s is read again", document.id)
        *before, last = document.parts
        if not before:
            self._prefiller.add(document, first=True)
            return
        tokens, parts = document.tokens[:-last], tuple(before)
        ids = [documents.id_of(tokens, parts, named=named) for named in (True, False)]
        if (parent := documents.usable(ids[0]) or documents.usable(ids[1])) is not None:
            self.append(document, parent)
            return
        parent = Document(ids[1], tokens, parts, named=False)
        self.append(document, parent)
        documents.by_id[parent.id] = parent
        self._read_again(parent)

    # Admission

    def _admit_requests(self) -> bool:
        """Feeds a piece of each request that can proceed; whether there was one."""
        worked, self._answers_blocked, self._first_blocked = False, False, math.inf
        self._documents.load_only({request.document.id for request in self._waiting})
        for request in list(self._waiting):
            with self._failing(request):
                worked |= self._proceed(request)
        return worked

    def _proceed(self, request: Request) -> bool:
        if request.document.error is not None:
            raise request.document.error
        if request.needed_pages:  # later requests do not take the pages of its target
            self._wait_for_room(request, request.needed_pages)
        if request.slot is None and not self._begin(request):
            return False
        if request.fed < len(request.new) or request.logits is None:
            self._batch.feed(request)
            if request.fed < len(request.new):
                return True
        if request.target is not None:
            return self._become(request, request.target)
        if self._update_mask(request):
            self._waiting.remove(request)
            self._batch.admit(request)
        return True

    def _wait_for_room(self, request: Request, count: int) -> None:
        """Blocks later requests if `count` pages can become free when others end."""
        if self._documents.would_have_room(count):
            self._first_blocked = min(self._first_blocked, request.arrival)

    def _begin(self, request: Request) -> bool:
        """Gives a request a row; false before its document is on the device, and without enough pages or a free row."""
        document, documents = request.document, self._documents
        if not request.pins and request.arrival > min(self._first_blocked, self._prefiller.waits):
            return False
        if document.state in ("host", "disk") and documents.load(document):
            if documents.bring(document):
                self._pin(request)
            else:
                self._wait_for_room(request, document.num_pages)
        if document.state != "device":
            return False
        count, _ = self._batch.own_pages(len(document.tokens), request.own_tokens)
        slot = self._batch.free_slot
        if self._answers_blocked or slot is None or count > self._pool.free_answers:
            self._answers_blocked = True
            return False
        pinned = request.pins
        self._pin(request)
        if request.needed_pages and not documents.make_room(request.needed_pages):
            if not pinned:
                self._unpin(request)
            return False
        if document.id in documents.by_id:
            documents.by_id.move_to_end(document.id)
        self._batch.begin(request, slot)
        return True

    def _pin(self, request: Request) -> None:
        request.document.users += not request.pins
        request.pins = True

    def _unpin(self, request: Request) -> None:
        request.document.users -= request.pins
        request.pins = False

    def _become(self, request: Request, target: Document) -> bool:
        """Enters the target of a request; without room the request restarts, for others may need its pages."""
        self._require_finite(request, bool(np.isfinite(on_host(request.logits)).all()))
        table = on_host(self._batch.row_of(request))
        request.needed_pages = self._documents.enter_row(target, request.document, table)
        if request.needed_pages:
            self._wait_for_room(request, request.needed_pages)
            self._restart(request)
            return False
        self._leave(request, "stop")
        return True

    # The batch

    def _step(self, is_called: Callable[[], bool]) -> None:
        """A step of the batch. The next one is dispatched first, so that the device works while tokens are handed out;
        but not before a mask, log-probabilities, a part of a document, or a call of another thread."""
        batch = self._batch
        if not batch.pending:
            batch.dispatch()
        one_by_one = batch.has_masks or batch.wants_logprobs or not self._prefiller.is_idle
        if not (one_by_one or is_called()):
            batch.dispatch()
        for request, new, finite, done in batch.wait():
            if request.slot is None:  # the error of another row has ended it
                continue
            with self._failing(request):
                self._require_finite(request, finite)
                if done or request.streamed >= request.max_new_tokens:
                    self._leave(request, "stop" if done else "length")
                elif new:
                    self._update_mask(request)
        if not batch.requests:  # the pending step has no rows left
            batch.pending.clear()

    def _require_finite(self, request: Request, finite: bool) -> None:
        """Raises ValueError, as `generate` does, unless a request's logits are finite."""
        if not finite:
            tokens = np.asarray([request.tokens], np.int32)
            lengths, finite_rows = np.asarray([tokens.shape[1]], np.int32), np.zeros(1, bool)
            read.require_finite(self._lm, tokens, lengths, finite_rows, "prompts")

    def _update_mask(self, request: Request) -> bool:
        """Computes the mask of an answer, if it has one, for the next token; whether the answer goes on."""
        if request.mask is None:
            return True
        config, vocabulary = request.stream.config, self._lm.config.vocab_size
        stops = (config.stop_token_ids or ()) if request.streamed < config.min_new_tokens else ()
        request.allowed = packed_mask(request.mask, request.stream.tokens, vocabulary, stops)
        if request.allowed is None:
            self._leave(request, "stop")
        return request.allowed is not None

    def _leave(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, and frees its resources."""
        with self._failing(request):
            keeps = request.stream.keep and reason != "cancelled" and request.scheduled
            document = self._kept(request) if keeps else None
            self._give_back(request)
            request.stream.end(reason, document)

    def _fail(self, request: Request, error: Exception) -> None:
        self._give_back(request)
        request.stream.end(error)
        if request.target is not None:
            self._documents.fail(request.target, error)

    def _give_back(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        self._unpin(request)
        self._batch.end(request)

    def _kept(self, request: Request) -> str | None:
        """The id of the document that a row's tokens become; None where there is no room for it."""
        fed = request.stream.tokens[: request.streamed - 1]
        tokens, parts = request.tokens + fed, (*request.document.parts, len(request.new) + len(fed))
        document = Document(self._documents.id_of(tokens, parts), tokens, parts)
        if self._documents.usable(document.id) is None:
            table = on_host(self._batch.row_of(request))
            try:
                if self._documents.enter_row(document, request.document, table):
                    return None
            except UserError:  # there never will be room
                return None
            self._documents.by_id[document.id] = document
        return document.id


class Prefiller:
    """Reads documents in order of arrival, short ones together, some layers at a time.

    Programs compile in threads of their own, while answers go on. `recover` is called after each error, which may have
    consumed the pool. `waits` is the arrival of the document that waits for pages of others.
    """

    def __init__(self, lm: LM, documents: Documents, backend: Backend, recover: Callable[[Exception], None]) -> None:
        self._lm, self._documents, self._pool, self._backend = lm, documents, documents.pool, backend
        self._recover, self.waits = recover, math.inf
        self._waiting: collections.deque[Document] = collections.deque()
        self._current: list[Document] = []
        self._layers: Any = None  # of reading these, from `_read`
        self._programs: Future[Any] = Future()
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="tca-jax-compile")

    def add(self, document: Document, *, first: bool = False) -> None:
        """Adds a document, in front of all others if it is `first`."""
        (self._waiting.appendleft if first else self._waiting.append)(document)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be read."""
        return not (self._waiting or self._current)

    def close(self) -> None:
        """Ends its threads after their compilations, without waiting."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def restart(self) -> None:
        """Reads the current documents from their beginning."""
        self._waiting.extendleft(reversed(self._end()))

    def read_on(self, before: float) -> bool:
        """Reads on in the next documents that arrived `before`; false if none fits, or its programs compile."""
        if not (self._current or self._begin(before)):
            return False
        if not any(map(_is_wanted, self._current)):
            for document in self._end():
                self._documents.drop(document)
            return True
        if not self._programs.done():
            return False
        left = _PART_TOKENS
        try:
            for tokens in self._layers:
                if (left := left - tokens) < tokens:
                    break
            else:
                self._end()
            # Waited for, so that an error is that of these documents, and a new request waits for this part at most.
            jax.block_until_ready(self._pool.arrays)
        except Exception as error:
            for document in self._end():
                self._documents.fail(document, error)
            self._recover(error)
        return True

    def _end(self) -> list[Document]:
        """Ends the current reading, of these documents, and frees its pages."""
        documents, self._current = self._current, []
        self._programs.cancel()
        if self._layers is not None:
            self._layers.close()
        return documents

    def _begin(self, before: float) -> bool:
        """Starts the document that waits longest, and short ones with it, if there are pages for them."""
        for document in [each for each in self._waiting if not _is_wanted(each)]:
            self._waiting.remove(document)
            self._documents.drop(document)
        self.waits = math.inf
        if not self._waiting or self._waiting[0].arrival > before:
            return False
        group = self._group()
        layout = self._lm.cache_layout(len(group), bucket_length(max(len(each.tokens) for each in group)))
        count = read.num_pages(self._lm, layout)
        if not self._documents.make_room(count):
            if self._documents.would_have_room(count):
                self.waits = group[0].arrival
            return False
        for document in group:
            self._waiting.remove(document)
        self._current, self._layers = group, self._read(group, layout, self._pool.allocator.take(count))
        next(self._layers)
        wait([self._programs], _COMPILE_WAIT_SECONDS)
        return True

    def _group(self) -> list[Document]:
        """Documents that are read together, in order of arrival: a power of two of them, of one bucket."""
        first = bucket_length(len(self._waiting[0].tokens))
        if first > _TOGETHER_TOKENS:
            return [self._waiting[0]]
        same = [each for each in self._waiting if bucket_length(len(each.tokens)) == first]
        fit = self._pool.documents // read.num_pages(self._lm, self._lm.cache_layout(1, first))
        most = min(len(same), fit, max(1, _TOGETHER_TOKENS // first))
        return same[: 1 << (most.bit_length() - 1)]

    def _read(self, group: list[Document], layout: CacheLayout, numbers: Numbers) -> Iterator[int]:
        """Reads documents into pages: starts to compile, then yields the tokens of each layer."""
        lm, pool, calls = self._lm.for_programs(), self._pool, read.Calls()
        prompts: Any = pad_tokens([each.tokens for each in group], lm.pad_token_id)
        tokens, lengths = prompts
        outer, weightless, layers = lm.without_layers(), lm.without_weights(), range(lm.config.num_layers)
        graphdef: dict[str, Any] = {"graphdef": lm.layer_graphdef}
        of_prompts, room = read.layout_of_prompts(lm, layout)
        static = graphdef | {"layout": of_prompts, "backend": self._backend}

        def of_layer(number: int, x: Any, cos: Any, sin: Any, shares: Any, rows: Rows) -> tuple[Any, ...]:
            given = lm.layer_params(number), x, shares, rows, cos, sin, lengths, lengths
            return weightless, *given, *map(calls.number, (room, number))

        def prepare(empty: Any) -> Any:
            begin, _ = read.begin_program.prepare(outer, tokens, lengths, layout=None, more_pages=0)
            x, cos, sin, shares, _ = results_of(begin)
            different = layers if lm.method.layers_differ else layers[:1]
            given = [of_layer(i, x, cos, sin, shares, empty) for i in different]
            if lm.mesh is None:
                read.compile_layers(lm, given, static, calls)
            own = [read.static_layer(lm.method, i) for i in different]
            attend = [
                read.attend_program.prepare(*each, **static, layer=layer)[0]
                for each, layer in zip(given, own, strict=True)
            ]
            out, shares, _ = results_of(attend[0])
            after, _ = read.after_program.prepare(weightless, lm.layer_params(0), x, out, **graphdef)
            end, _ = read.end_program.prepare(outer, lm.last_layer_params, x, out, lengths, shares, **graphdef)
            return begin, attend, after, end

        try:
            if lm.method.cache.reader is not None and layout.has_ranked_blocks:
                given: Any = *map(jnp.asarray, (tokens, lengths, lengths)), layout, calls
                own = functools.partial(read.read, lm, *given, backend=self._backend)
                self._programs = self._compilers.submit(own)
                yield 0
                logits, rows, shares = self._programs.result()
                self._enter(group, *on_host((logits, shares, rows)))
                return
            widths = Widths.of_row(lm, max(layout.kept_columns), layout.prompt_tokens)
            table = pages.empty_table.run(weightless, rows=len(group), widths=widths, pages=pool.total)
            table = dataclasses.replace(table, free=pool.free_pages(numbers, len(numbers[0])))
            self._programs = self._compilers.submit(prepare, shapes_of(pool.lend(table)))
            yield 0
            begin, attend, after, end = self._programs.result()
            x, cos, sin, shares, _ = begin(outer, tokens, lengths)
            for number in layers:
                program = attend[number if lm.method.layers_differ else 0]
                out, shares, rows = program(*of_layer(number, x, cos, sin, shares, pool.lend(table)))
                table = pool.take_back(rows)
                if number < layers[-1]:
                    x = after(weightless, lm.layer_params(number), x, out)
                yield tokens.size
            logits, shares = end(outer, lm.last_layer_params, x, out, lengths, shares)
            self._enter(group, *on_host((logits, shares, table)))
        finally:
            pool.allocator.release(numbers)  # documents use what they need of them

    def _enter(self, group: list[Document], logits: Any, shares: Any, rows: Rows) -> None:
        """Enters documents that were read: rows of the engine's pool, or in the host's memory with one of their own."""
        table = bare(rows)
        for row, document in enumerate(group):
            own, of_row, share = logits[row : row + 1], row_of(table, row), float(shares[row])
            try:
                ids, finite = np.asarray([document.tokens], np.int32), np.isfinite(own).all(axis=-1)
                read.require_finite(self._lm, ids, np.asarray([ids.size], np.int32), finite, "document")
                if rows.k is None:
                    self._documents.enter(document, of_row, share)
                else:
                    self._documents.enter_context(document, dataclasses.replace(of_row, k=rows.k, v=rows.v), share)
            except Exception as error:
                self._documents.fail(document, error)
            document.logits = None if document.named else own


def _is_wanted(document: Document) -> bool:
    return document.named or document.users > 0
