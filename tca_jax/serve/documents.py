"""Documents of an engine, and their moves between device, host memory and disk."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, Literal

import jax
import numpy as np

from tca_jax.engine.contexts import identity_of
from tca_jax.engine.lm import LM
from tca_jax.engine.pages import Numbers, Rows
from tca_jax.errors import UserError, require
from tca_jax.serve import programs
from tca_jax.serve.pages import PagePool, counts, without
from tca_jax.serve.storage import Entry, Storage, chunks_of, context_of

_CHUNK_BYTES = 64 * 2**20  # of keys and values that move at once
_log = logging.getLogger(__name__)


State = Literal["waiting", "device", "moving", "host", "disk", "failed"]


@dataclasses.dataclass(eq=False)
class Document:
    """Tokens that the model has read, or will."""

    id: str  # from `Documents.id_of`
    tokens: list[int]
    parts: tuple[int, ...]  # tokens of the first prefill, and of each append
    named: bool  # requested by a user; others are copies of prompts that can be sent again, and go first
    state: State = "waiting"
    table: Rows | None = None  # of one row, on the host, without pool; None until it was read
    pages: Numbers | None = None  # that the table names, in the order of `chunks`; None until it was read
    here: bool = False  # whether it has these pages on the device
    attended_share: float | None = None  # see `engine.read.ReadRows`; None until it is read
    chunks: list[Rows] | None = None  # its keys and values in host memory; None where they are not there
    logits: np.ndarray | None = None  # of the token after it, float32 [1, V]; not of named ones
    error: Exception | None = None  # why it could not be read
    storing: Future[None] | None = None  # done when it is on disk, or failed; None if it need not be stored
    arrival: int = 0  # order among all requests
    users: int = 0  # rows and admitted requests that need its pages
    created: float = dataclasses.field(default_factory=time.time)  # seconds since the epoch

    @property
    def num_pages(self) -> int:
        """Its pages, on the device that has most of them."""
        return 0 if self.pages is None else max(counts(self.pages))


class Documents:
    """All documents of an engine, and their pages. Only the engine's thread calls it, except for names.

    `lost` are documents without a copy, which are to be read again, and `failures` those that could not be moved to the
    device, and why; whoever looks takes them out.
    """

    def __init__(self, lm: LM, pool: PagePool, host_bytes: int, storage: Storage | None) -> None:
        self._lm, self._bare_lm, self.pool = lm, lm.without_weights(), pool
        self._host_bytes, self._storage = host_bytes, storage
        self._chunk = max(1, min(pool.documents, _CHUNK_BYTES * pool.devices // pool.page_bytes))
        self._by_id: OrderedDict[str, Document] = OrderedDict()  # least recently used first
        self._arriving: list[tuple[Document, Numbers, Rows]] = []  # chunks on their way to the device
        self.lost: list[Document] = []
        self.failures: list[tuple[Document, Exception]] = []
        self._unstored: collections.deque[Document] = collections.deque()
        self._writing: Future[None] | None = None
        self._lock = threading.Lock()  # of the table of names, which other threads look at
        for each in [] if storage is None else storage.entries():
            if self.id_of(each.tokens, each.parts, named=True) == each.id:  # not another model's
                found = Document(each.id, each.tokens, each.parts, named=True, state="disk", created=each.created)
                self._by_id[each.id] = found

    @functools.cached_property
    def _identity(self) -> tuple[str, str, str]:
        identity = identity_of(self._lm)
        return identity.fingerprint, identity.method_description, self._lm.cache_dtype.name

    def id_of(self, tokens: list[int], parts: tuple[int, ...], *, named: bool) -> str:
        """The id of tokens that the model reads in these parts: a hash of all that its pages depend on."""
        model = repr((*self._identity, parts)).encode()
        digest = hashlib.sha256(model + np.asarray(tokens, np.int64).tobytes()).hexdigest()
        return f"{'doc' if named else 'text'}-{digest[:24]}"

    def get(self, id_: str) -> Document | None:
        """The document of an id. Any thread may call this."""
        with self._lock:
            return self._by_id.get(id_)

    def all(self) -> list[Document]:
        """All of them, least recently used first."""
        with self._lock:
            return list(self._by_id.values())

    def add(self, document: Document) -> None:
        """Adds a document that waits to be read."""
        with self._lock:
            self._by_id[document.id] = document

    def touch(self, document: Document) -> None:
        """Marks a document as recently used."""
        with self._lock:
            if document.id in self._by_id:
                self._by_id.move_to_end(document.id)

    def forget(self, document: Document) -> None:
        """Drops an unused document, also on disk. OSError if it cannot be removed there; it stays then."""
        assert not document.users, "a document is forgotten when nobody uses it"
        if self._storage is not None:
            _settle(document.storing, _gone_error(document))  # it is not published from now on
            self._storage.remove(document.id)
        self.drop(document)

    def drop(self, document: Document) -> None:
        """Drops it from memory, and its name."""
        self.fail(document, _gone_error(document))
        with self._lock:
            if self._by_id.get(document.id) is document:
                del self._by_id[document.id]

    def fail(self, document: Document, error: Exception) -> None:
        """Marks a document as failed. Its pages are freed; a named one stays listed."""
        self._release(document)
        document.chunks = None
        document.error, document.state = error, "failed"
        _settle(document.storing, error)
        with self._lock:
            if not document.named and self._by_id.get(document.id) is document:
                del self._by_id[document.id]

    def _release(self, document: Document) -> None:
        if document.here and document.pages is not None:
            self.pool.allocator.release(document.pages)
        document.here = False

    def make_room(self, pages: int) -> bool:
        """Whether `pages` are free, once unused documents have left the device for them."""
        for document in self.all():
            if self.pool.free >= pages:
                break
            if document.state == "device" and not document.users:
                self._leave(document)
        return self.pool.free >= pages

    def would_have_room(self, pages: int) -> bool:
        """Whether `pages` would be free once the documents in use are not; shared pages count twice."""
        here = [each for each in self.all() if each.here]
        memory = self._host_bytes - sum(self.num_bytes(each) for each in self.all() if each.chunks is not None)
        free = self.pool.free
        for document in here:
            if document.named and document.chunks is None and not self.is_stored(document):
                memory -= self.num_bytes(document)
                if memory < 0:
                    continue
            free += document.num_pages
        return free >= pages and any(each.users for each in here)

    def renew(self) -> None:
        """Replaces the pool that a failed program has consumed; documents without another copy are `lost`."""
        self._arriving = []
        for document in self.all():
            if document.here:
                self._gone(document)
        self.pool.renew()

    def enter(self, document: Document, table: Rows, attended_share: float | None) -> None:
        """Enters a document of a row of the pool, whose table is on the host; it counts as a use of its pages."""
        table = self.pool.exact(table)
        pages = self.pool.named(table)
        self.pool.allocator.share(pages)
        document.table, document.pages, document.here = table, pages, True
        document.attended_share = attended_share
        self._entered(document)

    def enter_row(self, document: Document, parent: Document, table: Rows, held: Numbers) -> int:
        """Enters a document of a row that continues its parent, whose pages are `held`.

        Returns 0, or the number of pages that must be free first.
        """
        own = without(self.pool.named(self.pool.exact(table)), held)
        needed, most = max(counts(own)), self.pool.documents - parent.num_pages
        require(
            needed <= most,
            f"a document of {len(document.tokens):,} tokens needs {needed:,} pages beside those of the one that it "
            f"continues: the engine holds {most:,} more (pages)",
        )
        if not self.make_room(needed):
            return needed
        self.enter(document, table, parent.attended_share)
        return 0

    def enter_context(self, document: Document, rows: Rows, attended_share: float) -> None:
        """Enters a document of a context of one row in host memory."""
        document.table, document.pages, document.chunks = chunks_of(self.pool, rows, self._chunk)
        document.attended_share = attended_share
        self._entered(document)

    def _entered(self, document: Document) -> None:
        if self.is_stored(document):
            _settle(document.storing, None)
        elif self._storage is not None and document.named:
            if document.storing is None or document.storing.done():
                document.storing = Future()
            self._unstored.append(document)
        document.state = "device" if document.here else "host"  # last: who sees that waits for `storing`

    def _leave(self, document: Document) -> None:
        """Moves a document off the device, if it has another copy, or can get one, or is not named."""
        if not document.named:
            self.drop(document)
        elif self._to_host(document) or self.is_stored(document):
            self._gone(document)

    def _gone(self, document: Document) -> None:
        """Frees the pages of a document on the device; without another copy it is `lost`."""
        self._release(document)
        if document.chunks is not None:
            document.state = "host"
        elif self.is_stored(document):
            document.state = "disk"
        else:
            document.state = "waiting"
            self.lost.append(document)

    def is_stored(self, document: Document) -> bool:
        """Whether it is on disk."""
        return self._storage is not None and document.named and document.id in self._storage

    def num_bytes(self, document: Document) -> int:
        """Bytes of a document's pages, on all devices."""
        return document.num_pages * self.pool.page_bytes

    def _to_host(self, document: Document) -> bool:
        """Starts a copy to host memory; false where there is no room."""
        if document.chunks is not None:
            return True
        if not self._free_host(self.num_bytes(document)):
            return False
        try:
            document.chunks = self._copies(document)
        except Exception as error:
            _log.warning("document %s does not go to host memory: %s", document.id, error)
        return document.chunks is not None

    def _free_host(self, num_bytes: int, but: Document | None = None) -> bool:
        """Whether host memory has room for `num_bytes`, once second copies have been dropped."""
        held = [each for each in self.all() if each.chunks is not None]
        free = self._host_bytes - num_bytes - sum(map(self.num_bytes, held))
        for other in held:
            if free >= 0:
                break
            if other is not but and (other.state == "device" or self.is_stored(other)):
                free += self.num_bytes(other)
                other.chunks = None
                other.state = other.state if other.here else "disk"
        return free >= 0

    def _copies(self, document: Document) -> list[Rows]:
        """Starts copies of a document's pages to host memory."""
        assert document.pages is not None
        free = [self.pool.free_pages(part, self._chunk) for part in self._parts(document.pages)]
        return [jax.tree.map(_pinned, programs.fetch.run(self._bare_lm, self.pool.lend(None, part))) for part in free]

    def _parts(self, pages: Numbers) -> list[Numbers]:
        """Pages in chunks."""
        return [[own[i : i + self._chunk] for own in pages] for i in range(0, max(counts(pages)), self._chunk)]

    def load(self, document: Document) -> bool:
        """Whether a document's pages are in host memory; if not, another thread reads them from disk."""
        if document.chunks is None:
            assert self._storage is not None
            try:
                context = self._storage.load(document.id)
                if context is None:
                    return False
                context.require_made_by(self._lm)
                require(context.token_ids() == document.tokens, "it holds other tokens")
                self.enter_context(document, context.rows, float(np.asarray(context.attended_share)[0]))
            except MemoryError:
                raise
            except Exception as error:
                _log.warning("ignoring damaged document %s: %s", document.id, error)
                self._storage.ignore(document.id)
                damaged = UserError(f"document {document.id!r} is damaged on disk; upload it again")
                self.fail(document, damaged)
                raise damaged from error
            self._free_host(0, but=document)
        needed, total = document.num_pages, self.pool.documents
        require(needed <= total, f"document {document.id!r} has {needed:,} pages: the engine holds {total:,}")
        return True

    def load_only(self, ids: Collection[str]) -> None:
        """Cancels the loading of other documents."""
        if self._storage is not None:
            self._storage.load_only(ids)

    def bring(self, document: Document) -> bool:
        """Starts to move a document from host memory to the device; false where there is no room."""
        chunks, table, old = document.chunks, document.table, document.pages
        assert chunks is not None  # other documents may need its place in host memory now
        assert table is not None
        assert old is not None
        if not self.make_room(document.num_pages):
            return False
        pages = self.pool.allocator.take(counts(old))
        document.table, document.pages, document.here = self.pool.renumbered(table, old, pages), pages, True
        try:
            parts = zip(self._parts(pages), chunks, strict=True)
            arriving = [(document, part, jax.tree.map(_to_device, chunk)) for part, chunk in parts]
        except Exception:
            document.chunks = None  # it may be what is wrong
            self._gone(document)
            raise
        document.state = "moving"
        self._arriving += arriving
        self._free_host(0)
        return True

    def move(self) -> bool:
        """Writes pages that have arrived to the pool; whether others are under way."""
        left = []
        for document, numbers, pages in self._arriving:
            if not document.here:  # it was forgotten, or has failed
                continue
            try:
                if all(x.is_ready() for x in jax.tree.leaves(pages)):
                    to = self.pool.lend(None, self.pool.free_pages(numbers, self._chunk))
                    self.pool.take_back(programs.place.run(self._bare_lm, to, pages))
                else:
                    left.append((document, numbers, pages))
            except Exception as error:
                document.chunks = None
                self._gone(document)
                self.failures.append((document, error))
        self._arriving = [each for each in left if each[0].here]
        return bool(self._arriving)

    def is_here(self, document: Document) -> bool:
        """Whether all of its pages are on the device."""
        if document.state == "moving" and not any(each is document for each, *_ in self._arriving):
            document.state = "device"
        return document.state == "device"

    def store(self) -> bool:
        """Starts to store the next document, one at a time (each needs a host copy); whether any is left."""
        while self._unstored and (self._writing is None or self._writing.done()):
            document = self._unstored.popleft()
            if document.storing is not None and not document.storing.done():
                self._store(document, document.storing)
        return bool(self._unstored) or not (self._writing is None or self._writing.done())

    def finish_storing(self) -> None:
        """Stores all documents that are not stored yet."""
        while self.store():
            if self._writing is not None:
                wait([self._writing])

    def _store(self, document: Document, storing: Future[None]) -> None:
        def note(error: BaseException | None) -> None:
            if _settle(storing, error) and error is not None:
                _log.warning("document %s is not stored: %s", document.id, error)

        if self._storage is None or document.state in ("waiting", "failed"):
            return  # lost: what is read again is stored again
        try:
            entry = Entry(document.id, document.tokens, document.parts, document.created)
            chunks = self._copies(document) if document.chunks is None else document.chunks
            assert document.table is not None
            assert document.pages is not None
            assert document.attended_share is not None
            row = self.pool, document.table, document.pages, document.attended_share
            make = functools.partial(context_of, self._lm, entry, *row, chunks)
            self._writing = self._storage.store(entry, self.num_bytes(document), make, lambda: not storing.done())
        except Exception as error:
            note(error)
        else:
            self._writing.add_done_callback(lambda writing: note(writing.exception()))


def _gone_error(document: Document) -> UserError:
    return UserError(f"document {document.id!r} is no longer there")


def _settle(storing: Future[None] | None, error: BaseException | None) -> bool:
    """Completes a future, once; whether this call did."""
    try:
        if storing is None or storing.done():
            return False
        if error is None:
            storing.set_result(None)
        else:
            storing.set_exception(error)
    except InvalidStateError:  # another thread did, just now
        return False
    return True


def _pinned(x: jax.Array) -> jax.Array:
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))


def _to_device(x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return jax.device_put(x)
