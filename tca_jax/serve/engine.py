"""`Engine`: documents that are read once, and questions about any of them that are answered in one batch."""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Unpack

import jax

from tca_jax.engine.cache import memory_bytes
from tca_jax.engine.contexts import encode_appended
from tca_jax.engine.generation_config import GenerationConfig, GenerationOptions
from tca_jax.engine.lm import LM, require_lm
from tca_jax.engine.prompts import Prompt, bucket_length, encode_prompt, require_positions
from tca_jax.errors import Unsupported, UserError, UserTypeError, check_flag, check_integer, require
from tca_jax.models.sharding import DATA, axis_size
from tca_jax.serve.batch import Request
from tca_jax.serve.constraints import Mask
from tca_jax.serve.documents import Document, Documents
from tca_jax.serve.pages import PagePool
from tca_jax.serve.scheduler import Scheduler
from tca_jax.serve.streams import Stream

_HOST_SHARE = 0.25  # of the host's memory, for documents that have left the device
_READING_SHARE = 0.2  # of a GPU's free memory, for what reading a document needs beside its pages
_CPU_SHARE = 0.1  # of the host's memory, for documents where the host is the device
_SOON_SECONDS = 0.001  # between looks at moves and writes under way while nothing else is to be done
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Pages(NamedTuple):
    """Pages of a pool on each device: blocks of one KV head."""

    free: int
    total: int


class UnknownDocument(UserError):
    """No document has this id."""


class DocumentInUse(UserError):
    """A document cannot be dropped yet."""


class EngineEnded(UserError):
    """The engine is closed, or has failed for good; then `__cause__` is the error."""


class Engine(AbstractContextManager["Engine"]):
    """Serves one model: any thread may call it at any time. A context manager, or call `close`.

    Answers are those of `generate`, whatever else is in the batch. Rows come and go without compiling.

    An error of a request fails that request; one of the batch fails the answers in it, and the engine goes on. Where it
    cannot go on, all answers and all calls fail: see `failure`.

    Args:
        lm: From `tca_jax.load`, on one device or on a mesh whose "data" axis is one device.
        max_rows: Answers that are written at once; a step computes as many rows.
        pages: Pages of documents that the device holds: blocks of one KV head. None takes what is free, less what a
            batch of answers needs, and less a share for reading.
        answer_tokens: Tokens of question and answer that each of `max_rows` rows has room for at once. A request may
            have more, and then takes the room of others.
        host_memory: Most bytes of host memory for documents that have left the device; None for a quarter of it.
        disk: Folder of this engine: documents are stored there as soon as they are read, and found at the next start.
        disk_bytes: Most bytes in it; None for no bound. A document beyond it is not stored, and `wait` with `stored`
            raises: what was stored before is not removed for it.
        backend: Kernel backend, as for `generate`.
    """

    def __init__(
        self,
        lm: LM,
        *,
        max_rows: int = 8,
        pages: int | None = None,
        answer_tokens: int = 1024,
        host_memory: int | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        backend: str = "auto",
    ) -> None:
        require_lm(lm)
        kernels = lm.kernels(backend)
        check_integer("max_rows", max_rows, at_least=1)
        check_integer("answer_tokens", answer_tokens, at_least=1)
        for name, value, least in (("pages", pages, 1), ("host_memory", host_memory, 0), ("disk_bytes", disk_bytes, 1)):
            if value is not None:
                check_integer(name, value, at_least=least)
        devices, most = axis_size(lm.mesh, DATA), lm.config.max_context
        remedy = "an engine serves a model on one device or on devices along 'model'; use one engine for each part"
        require(devices == 1, f"lm lies on {devices} devices along {DATA!r}: {remedy} of the rows", Unsupported)
        own = lm.cache_layout(1, most, min(most, bucket_length(answer_tokens)), following=True)
        answers = int(max_rows) * own.num_pages
        if pages is None:
            pages = _default_pages(lm, answers)
        if host_memory is None:
            host_memory = int(_HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self.lm, self.max_rows = lm, int(max_rows)
        self._pool = PagePool(lm, int(pages), answers)
        self._documents = Documents(lm, self._pool, host_memory, Path(disk) if disk is not None else None, disk_bytes)
        self._scheduler = Scheduler(lm, self._documents, self.max_rows, kernels)
        #: Why the engine has failed, for good: all calls raise this, and answers ended with it. None while it works.
        self.failure: EngineEnded | None = None
        self._calls: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._changed = threading.Condition()
        self._stopping, self._ended, self._resting = False, False, True
        self._thread = threading.Thread(target=self._run, name="tca-jax-engine", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels all requests, waits for documents that are being stored, and ends."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    @property
    def document_pages(self) -> Pages:
        """Pages for documents."""
        return Pages(self._pool.allocator.free, self._pool.documents)

    @property
    def answer_pages(self) -> Pages:
        """Pages for questions and answers."""
        return Pages(self._pool.free_answers, self._pool.answers)

    # Documents

    def read(self, document: Prompt) -> str:
        """Reads a document: text, a chat or token ids. ValueError if it is too long for the model or the pool.

        Returns its id, at once: questions about it wait until it is read. The same document has the same id.
        """
        ids = encode_prompt(self.lm, document, "document")
        require_positions("document", len(ids), 0, self.lm)
        self._scheduler.require_pages(len(ids))
        return self._post(lambda: self._found(ids, (len(ids),)).id).result()

    def append(self, document: str, more: Prompt) -> str:
        """Appends text, token ids, or a chat beyond the document, which stays; the longer one's id, at once."""
        known = self.document(document)
        ids = self._appended(known, more, "more", 0)
        tokens, parts = known.tokens + ids, (*known.parts, len(ids))
        self._scheduler.require_pages(len(tokens), known)
        return self._post(lambda: self._found(tokens, parts).id).result()

    def forget(self, document: str) -> None:
        """Drops a document, also on disk. ValueError if it is in use; OSError if it cannot be removed from disk."""

        def drop() -> None:
            found = self.document(document)
            unused = not found.users and found.state != "waiting"
            require(unused, f"document {document!r} is in use; cancel its answers first", DocumentInUse)
            self._documents.forget(found)

        self._post(drop).result()

    def documents(self) -> list[Document]:
        """All documents that were read, or wait to be, least recently used first."""
        return [each for each in self._documents.all() if each.named]

    def document(self, document: str) -> Document:
        """A document by its id. ValueError if it is unknown."""
        found: Any = self._documents.by_id.get(document) if isinstance(document, str) else None
        require(found is not None, f"unknown document {document!r}: upload it first", UnknownDocument)
        return found

    def prefix_of(self, tokens: list[int]) -> Document | None:
        """The longest document that `tokens` begin with and go on after; None for none."""
        known = [each for each in self.documents() if each.state != "failed" and len(each.tokens) < len(tokens)]
        found = [each for each in known if tokens[: len(each.tokens)] == each.tokens]
        return max(found, key=lambda each: len(each.tokens), default=None)

    def wait(self, document: str, timeout: float | None = None, *, stored: bool = False) -> Document:
        """Waits at most `timeout` seconds until a document is read, and `stored` on disk.

        ValueError if it cannot be read, OSError if it cannot be stored, TimeoutError if it takes longer.
        """
        found, wanted = self.document(document), "read and stored" if stored else "read"
        done = self._wait_until(lambda: found.state != "waiting" and not (stored and found.storing), timeout)
        require(done, f"document {document!r} has not been {wanted} within {timeout} seconds", TimeoutError)
        problem = found.problem if stored else found.error
        if problem is not None:
            raise problem
        return found

    # Questions

    def ask(
        self,
        document: str | None,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        sample: int = 0,
        mask: Mask | None = None,
        keep: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Answers a prompt, with or without a document.

        Args:
            document: Its id; None for none.
            prompt: Appended to the document as it is, as `generate` does with a context.
            config: How the answer is drawn and where it ends.
            sample: Which of several answers this is: answer i of `generate(..., num_samples=n)`.
            mask: Called in the engine's thread before each token, with the new tokens of this answer, for a bool array
                of the tokens that may come next; it must not call the engine. The answer ends where there are none, and
                fails if it raises. While an answer of the batch has one, no step is dispatched before the tokens of the
                last one are known.
            keep: Whether document, prompt and answer become a document, for another turn: `Completion.document`. The
                last token, which was drawn and not fed, is not part of it. Not with `stop`, which is found in the text
                when tokens after it have been fed.
            **options: Fields of `GenerationConfig`, which replace those of `config`.

        Returns:
            The answer while it is written.

        Raises:
            ValueError: an argument is not allowed, or the request can never fit; raised before anything runs.
            TypeError: an argument is of a wrong type.
        """
        config = GenerationConfig.of(config, options).for_model(self.lm)
        samples, most = config.num_samples, config.max_new_tokens
        require(samples == 1, f"num_samples = {samples}: must be 1; ask once for each answer, by its number as sample")
        check_integer("sample", sample, at_least=0)
        check_flag("keep", keep)
        ends = f"stop = {config.stop!r} with keep: tokens after it would be kept; use stop_token_ids"
        require(not (keep and config.stop), ends)
        is_mask = mask is None or callable(mask)
        require(is_mask, f"mask is of type {type(mask).__name__}: must be callable, or None", UserTypeError)
        if document is None:
            held, new = encode_prompt(self.lm, prompt), []
            require_positions("prompt", len(held), most, self.lm)
            self._scheduler.require_pages(len(held))
            lengths = len(held), 0
        else:
            held, new = (known := self.document(document)).tokens, self._appended(known, prompt, "prompt", most)
            lengths = len(new), len(held)
        self._scheduler.require_room(len(held), len(new) + most)
        stream = Stream(self.lm, config, self._cancel, keep, lengths)

        def enter() -> None:
            found = self._found(held, (len(held),), named=False) if document is None else self.document(document)
            self._scheduler.add(Request(stream, found, new, int(sample), mask))

        self._post(enter).result()
        return stream

    def idle(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds until nothing is to be read or answered; whether it is."""
        return self._wait_until(lambda: self._resting, timeout)

    def _cancel(self, stream: Stream) -> None:
        with suppress(UserError):  # an engine that has ended has ended all of them
            self._post(lambda: self._scheduler.cancel(stream))

    def _appended(self, document: Document, more: Prompt, argument: str, new_tokens: int) -> list[int]:
        """Token ids after a document, with room for new tokens."""
        ids = encode_appended(self.lm, more, lambda: document.tokens, argument)
        require_positions(argument, len(ids), new_tokens, self.lm, context_tokens=len(document.tokens))
        return ids

    def _found(self, tokens: list[int], parts: tuple[int, ...], *, named: bool = True) -> Document:
        """The document of these tokens, which is read if it is new; in the engine's thread."""
        id_ = self._documents.id_of(tokens, parts, named=named)
        if (found := self._documents.usable(id_)) is None:
            found = Document(id_, tokens, parts, named)
            self._scheduler.add(found)
        return found

    # The thread

    def _post(self, function: Callable[[], _T]) -> Future[_T]:
        """Has the engine's thread run a function between two rounds. ValueError if it has ended."""
        done: Future[_T] = Future()
        with self._changed:
            if self._stopping:
                raise self._refusal()
            self._resting = False
            self._calls.append((function, done))
            self._changed.notify_all()
        return done

    def _wait_until(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Waits for a condition; whether it holds. ValueError if the thread has ended without it."""
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._ended, timeout)
            if (held := holds()) or not self._ended:
                return held
            raise self._refusal()

    def _refusal(self) -> EngineEnded:
        return self.failure or EngineEnded("the engine is closed")

    def _run(self) -> None:
        """Runs rounds of the scheduler, and calls between them. A call that raises fails its caller, a round all."""
        failure = None
        try:
            while not self._stopping:
                while self._calls:
                    function, done = self._calls.popleft()
                    try:
                        done.set_result(function())
                    except BaseException as error:
                        done.set_exception(error)
                busy = self._scheduler.step(lambda: bool(self._calls) or self._stopping)
                with self._changed:
                    self._resting = self._scheduler.is_idle and not self._calls
                    self._changed.notify_all()
                    if busy is not True and not self._calls and not self._stopping:
                        self._changed.wait(_SOON_SECONDS if busy is None else None)
        except BaseException as error:
            _log.critical("the engine has failed", exc_info=error)
            failure = EngineEnded(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            self.failure, self._stopping = failure, True
        try:
            self._scheduler.end(failure)
        except Exception as error:
            _log.error("the engine did not end as it should", exc_info=error)
        with self._changed:
            self._ended, self._resting = True, failure is None
            self._changed.notify_all()
        while self._calls:
            self._calls.popleft()[1].set_exception(self._refusal())


def _default_pages(lm: LM, answers: int) -> int:
    """Pages of documents for which a device has memory beside the model and pages of answers."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit: Any = memory_bytes()
    require(limit is not None, "the device does not report its memory limit; pass pages")
    free = (limit - stats["bytes_in_use"]) * (1 - _READING_SHARE) if "bytes_in_use" in stats else limit * _CPU_SHARE
    pages = int(free // lm.page_bytes) - answers
    need = f"answers need {answers * lm.page_bytes / 1e9:,.1f} GB (max_rows, answer_tokens)"
    require(pages >= 1, f"{need}: the device has {free / 1e9:,.1f} GB for answers and documents")
    return min(pages, 2**31 - 1 - answers)
