"""What an engine's thread does: has documents read, lets questions into a batch, takes steps, hands out tokens."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.prompts import bucket_length
from tca_jax.engine.read import require_finite
from tca_jax.errors import UserError
from tca_jax.pallas_kernels.backends import Backend
from tca_jax.serve.asks import Ask
from tca_jax.serve.batch import Batch, Told, is_whole
from tca_jax.serve.constraints import packed_mask
from tca_jax.serve.documents import Document, Documents, document_id
from tca_jax.serve.pages import FreePages
from tca_jax.serve.reading import Reader
from tca_jax.serve.streams import FinishReason, Stream

_log = logging.getLogger(__name__)


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
        self._lm, self._documents = lm, documents
        self._batch = Batch(lm, documents, max_rows, answer_tokens, backend)
        self._reader = Reader(lm, documents, backend, self._recover)
        self._asks: list[Ask] = []
        self._arrivals = itertools.count()
        self._answers_waited = False  # a request waits for a row, or for pages of answers
        self._room_waited = math.inf  # arrival of the first request that waits for pages of documents

    # What other threads call

    @property
    def pages(self) -> FreePages:
        """Pages of answers."""
        return self._batch.free

    def require_pages(self, tokens: int) -> None:
        """Raises ValueError if a document of so many tokens can never be held."""
        needed = self._lm.cache_layout(1, bucket_length(tokens)).num_pages
        if needed > (total := self._documents.free.total):
            raise UserError(f"{tokens:,} tokens need {needed:,} pages: the engine holds {total:,} (pages)")

    def require_room(self, document_tokens: int, own_tokens: int) -> None:
        """Raises ValueError if a question and its answer can never be held."""
        needed = self._batch.own_layout(document_tokens, own_tokens).num_pages
        if needed > self.pages.total:
            raise UserError(
                f"question and answer of up to {own_tokens:,} tokens need {needed:,} pages: all rows of the engine "
                f"together have {self.pages.total:,} (answer_tokens, max_rows)"
            )

    # What its own thread calls

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be read or answered."""
        return not (self._asks or self._batch.asks) and self._reader.is_idle

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
        for ask in [*self._asks, *self._batch.asks]:
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
        if self._batch.asks:
            worked = True
            try:
                self._step(is_called)
            except Exception as error:
                for ask in self._batch.asks:
                    self._fail(ask, error)
                self._recover(error)
        for document in documents.lost():
            self._read_again(document)
            worked = True
        return True if worked else None if under_way or self._asks or not self._reader.is_idle else False

    def end(self, failure: Exception | None) -> None:
        """Nothing follows: answers end, documents that are being stored are stored."""
        self._reader.close()
        for ask in [*self._asks, *self._batch.asks]:
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
        batch, pool = self._batch.is_whole, is_whole(self._documents.pool)
        if batch and pool:
            return
        _log.error("the batch begins again after an error", exc_info=error)
        for ask in self._batch.asks:
            self._fail(ask, error)
        for ask in self._asks:
            self._begin_again(ask)
        if not batch:
            self._batch.begin_again()
        if not pool:
            self._documents.renew()

    def _begin_again(self, ask: Ask) -> None:
        """A request that is not in the batch gives back what it has, and waits."""
        self._batch.give_back_pages(ask)
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
            self._batch.feed(ask)
            if ask.fed < len(ask.new):
                return True
        if ask.target is not None:
            return self._become(ask, ask.target)
        slot = self._batch.free_slot
        if slot is None:
            return False
        if self._update_mask(ask):
            self._asks.remove(ask)
            self._batch.admit(ask, slot)
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
        layout = self._batch.own_layout(len(ask.document.tokens), len(ask.new) + ask.max_new_tokens)
        has_row = ask.target is not None or self._batch.free_slot is not None
        if self._answers_waited or not has_row or layout.num_pages > self.pages.free:
            self._answers_waited = True
            return False
        pinned = ask.pins
        self._pin(ask)
        if ask.room and not self._documents.make_room(ask.room):
            if not pinned:
                self._unpin(ask)
            return False
        self._documents.asked(ask.document)
        self._batch.take_pages(ask, layout)
        return True

    def _pin(self, ask: Ask) -> None:
        ask.document.users += not ask.pins
        ask.pins = True

    def _unpin(self, ask: Ask) -> None:
        ask.document.users -= ask.pins
        ask.pins = False

    def _become(self, ask: Ask, target: Document) -> bool:
        """The target of a request becomes a document; where there is no room for it, the request begins again when
        there is: others could wait for what it has."""
        assert ask.own is not None
        self._require_finite(ask, bool(np.isfinite(on_host(ask.logits)).all()))
        ask.room = self._documents.enter_joined(target, ask.document, ask.own, self._batch.pool)
        if ask.room:
            self._wait_for_room(ask, ask.room)
            self._begin_again(ask)
            return False
        self._leave(ask, "stop")
        return True

    # The batch

    def _step(self, is_called: Callable[[], bool]) -> None:
        """A step of the batch. The next one is launched before it is taken, so that the device does not wait while its
        tokens are handed out; but not where a mask needs to know a token, where log-probabilities are asked for,
        where a part of a document comes between, nor before somebody's new request."""
        batch = self._batch
        if not batch.launched:
            batch.launch()
        one_by_one = batch.has_masks or batch.wants_logprobs or not self._reader.is_idle
        if not (one_by_one or is_called()):
            batch.launch()
        self._hand_out(batch.wait())
        if not batch.asks:  # nobody waits for the one under way
            batch.launched.clear()

    def _require_finite(self, ask: Ask, finite: bool) -> None:
        """Raises ValueError, as `generate` does, unless a request's logits are finite."""
        if not finite:
            tokens = np.asarray([ask.tokens], np.int32)
            lengths, finite_rows = np.asarray([tokens.shape[1]], np.int32), np.zeros(1, bool)
            require_finite(self._lm, tokens, lengths, finite_rows, "prompts")

    def _hand_out(self, told: Told) -> None:
        """Gives streams their new tokens, and ends those that have ended."""
        rows, said, logprobs, top = told
        for slot, ask in enumerate(rows):
            if ask is None or ask.slot != slot or (stream := ask.stream) is None:
                continue
            try:
                self._require_finite(ask, said.finite[slot])
            except Exception as error:
                self._fail(ask, error)
                continue
            new = said.step[slot] - ask.taken
            assert new < 2, "the last token alone is said"
            ask.taken += new
            own: list[float] = []
            likeliest: list[Any] = []
            if (wanted := stream.options.logprobs) is not None:
                own = logprobs[slot, :new].tolist()
            if wanted:
                ids, values = (x[slot, :new, :wanted].tolist() for x in top)
                likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            stream.add([said.last[slot]] * new, own, likeliest)
            if said.done[slot] or ask.taken >= ask.max_new_tokens:
                self._leave(ask, "stop" if said.done[slot] else "length")
            elif new and ask.mask is not None:
                with self._failing(ask):
                    self._update_mask(ask)

    def _update_mask(self, ask: Ask) -> bool:
        """Computes the mask of an answer, if it has one, for the next token; whether the answer goes on."""
        if ask.mask is None or ask.stream is None:
            return True
        options, vocabulary = ask.stream.options, self._lm.config.vocab_size
        stops = options.stop_tokens if ask.taken < options.min_new_tokens else ()
        ask.allowed = packed_mask(ask.mask, ask.stream.tokens, vocabulary, stops)
        if ask.allowed is None:
            self._leave(ask, "stop")
        return ask.allowed is not None

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
            self._batch.rows[ask.slot], ask.slot = None, None
        self._batch.give_back_pages(ask)
        self._unpin(ask)

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
            own = self._batch.own_row(ask.slot)
            try:
                if self._documents.enter_joined(document, ask.document, own, self._batch.pool):
                    return None
            except UserError:  # there never will be room
                return None
            self._documents.add(document)
        return id_
