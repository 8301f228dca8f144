"""Documents of an engine, and their moves between device, host memory and disk."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int32

from tca_jax.engine.cache import CacheLayout, PagedCache
from tca_jax.engine.contexts import Context, first_local, identity_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.errors import UserError, require
from tca_jax.pallas_kernels.kv import num_bytes
from tca_jax.programs import Program
from tca_jax.serve import programs
from tca_jax.serve.pages import FreePages, LocalTable, PageNumbers, RowTable, TableWidths, pool_only
from tca_jax.serve.storage import Entry, Storage, chunks_of, context_of

_CHUNK_BYTES = 64 * 2**20  # of keys and values that move at once
_log = logging.getLogger(__name__)


State = Literal["waiting", "device", "moving", "host", "disk", "failed"]


@dataclasses.dataclass(eq=False)
class Document:
    """Tokens that the model has read, or will."""

    id: str  # from `document_id`
    tokens: list[int]
    parts: tuple[int, ...]  # tokens of the first prefill, and of each append
    named: bool  # requested by a user; others are copies of prompts that can be sent again, and go first
    state: State = "waiting"
    table: LocalTable | None = None  # None until it was read
    layout: CacheLayout | None = None  # of one row
    attended_share: float | None = None  # see `engine.read.Read`; None until it is read
    numbers: Int32[np.ndarray, "D P"] | None = None  # of its pages in the device's pool; None where it is not there
    chunks: list[PagedCache] | None = None  # its keys and values in host memory; None where they are not there
    logits: np.ndarray | None = None  # of the token after it, float32 [1, V]; not of named ones
    error: Exception | None = None  # why it could not be read
    storing: Future[None] | None = None  # done when it is on disk, or failed; None if it need not be stored
    arrival: int = 0  # order among all requests
    users: int = 0  # rows and admitted requests that need its pages
    created: float = dataclasses.field(default_factory=time.time)  # seconds since the epoch

    @property
    def num_pages(self) -> int:
        """Its pages, on the device that has most of them."""
        return 0 if self.table is None else self.table.most_pages


def document_id(lm: LM, tokens: list[int], parts: tuple[int, ...], *, named: bool) -> str:
    """The id of tokens that a model reads in these parts: a hash of all that its pages depend on."""
    identity = identity_of(lm)
    model = identity.fingerprint, identity.method_description, lm.cache_dtype.name, parts
    digest = hashlib.sha256(repr(model).encode() + np.asarray(tokens, np.int64).tobytes()).hexdigest()
    return f"{'doc' if named else 'text'}-{digest[:24]}"


class _Arriving(NamedTuple):
    """A chunk of a document that moves to the device."""

    document: Document
    numbers: Int32[np.ndarray, "D C"]
    pages: PagedCache


class Documents:
    """All documents of an engine, and the pool of their pages. Only the engine's thread calls it, except for names."""

    def __init__(self, lm: LM, pages: int, host_bytes: int, storage: Storage | None) -> None:
        self._lm, self._bare_lm = lm, lm.without_weights()
        self._on_mesh, self._host_bytes, self._storage = lm.mesh is not None, host_bytes, storage
        devices = 1 if lm.head_shards is None else lm.head_shards.devices
        self.free = FreePages(pages, devices)
        self.pool = self._empty_pool(pages)
        size = 2 * num_bytes(lm.method.cache.block_size, lm.config.head_dim, lm.cache_dtype)
        self.page_bytes, self._chunk = size * devices, max(1, min(pages, _CHUNK_BYTES // size))
        self._by_id: OrderedDict[str, Document] = OrderedDict()  # least recently used first
        self._arriving: list[_Arriving] = []
        self._lost: list[Document] = []
        self._failures: list[tuple[Document, Exception]] = []
        self._unstored: collections.deque[Document] = collections.deque()
        self._writing: Future[None] | None = None
        self._lock = threading.Lock()  # of the table of names, which other threads look at
        for each in [] if storage is None else storage.entries():
            if document_id(lm, each.tokens, each.parts, named=True) == each.id:  # not another model's
                found = Document(each.id, each.tokens, each.parts, named=True, state="disk", created=each.created)
                self._by_id[each.id] = found

    def _empty_pool(self, pages: int) -> PagedCache:
        return self._run(programs.empty_pool, pages=pages, dtype=self._lm.cache_dtype)

    def _run(self, program: Program, *args: Any, **static: Any) -> Any:
        return program.run(self._bare_lm, *args, **static)

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
        if document.numbers is not None:
            self.free.give_back(document.numbers)
        document.numbers = document.chunks = None
        document.error, document.state = error, "failed"
        _settle(document.storing, error)
        with self._lock:
            if not document.named and self._by_id.get(document.id) is document:
                del self._by_id[document.id]

    def lost(self) -> list[Document]:
        """Documents without a copy since the last call; they are to be read again."""
        lost, self._lost = self._lost, []
        return lost

    def failures(self) -> list[tuple[Document, Exception]]:
        """Documents that could not be moved to the device since the last call, and why."""
        failures, self._failures = self._failures, []
        return failures

    def make_room(self, pages: int) -> bool:
        """Whether `pages` are free, once unused documents have left the device for them."""
        for document in self.all():
            if self.free.free >= pages:
                break
            if document.state == "device" and not document.users:
                self._leave(document)
        return self.free.free >= pages

    def would_have_room(self, pages: int) -> bool:
        """Whether `pages` would be free once the documents in use are not; shared pages count twice."""
        here = [each for each in self.all() if each.numbers is not None]
        memory = self._host_bytes - sum(self.num_bytes(each) for each in self.all() if each.chunks is not None)
        free = self.free.free
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
            if document.numbers is not None:
                self._gone(document)
        del self.pool  # its memory is that of the new one
        self.pool = self._empty_pool(self.free.total)

    def reserve(self, pages: int) -> Int32[np.ndarray, "D P"] | None:
        """Takes `pages` of each device, which the caller gives back; None where there is no room."""
        if not self.make_room(pages):
            return None
        return self.free.take(np.ones((self.free.devices, pages), bool))

    def enter(self, document: Document, cache: PagedCache, row: int, attended_share: float) -> None:
        """Enters a document from a row of a cache on the device; the caller has reserved the pages of the row."""
        read = LocalTable.of_row(cache, row)
        table, layout = LocalTable.exactly(self._lm.method.cache, read.kept, read.start, len(document.tokens))
        with self._taking(table.used) as numbers:
            to = np.full((len(numbers), read.num_pages + 1), self.free.total, np.int32)
            for kind, wide in enumerate(zip(table.widths, read.widths, strict=True)):
                columns = min(wide)
                mine, theirs = (x.parts[kind][..., :columns] for x in (table, read))
                mine = table.in_pool(mine, numbers, self.free.total)
                for device, places in enumerate(theirs):
                    to[device, places] = mine[device]
            self.pool = self._run(programs.place, self.pool, pool_only(cache), self._numbers(to[:, :-1]))
        document.attended_share = attended_share
        self._entered(document, table, layout, numbers)

    @contextlib.contextmanager
    def _taking(self, wanted: Bool[np.ndarray, "D P"]) -> Iterator[Int32[np.ndarray, "D P"]]:
        """Takes pages, and gives them back if the body fails."""
        numbers = self.free.take(wanted)
        try:
            yield numbers
        except Exception:
            self.free.give_back(numbers)
            raise

    def enter_joined(self, document: Document, parent: Document, own: RowTable, answers: PagedCache) -> int:
        """Enters a document of a row: its parent, whose pages it shares, and the row's own tokens.

        Returns 0, or the number of pages that must be free first.
        """
        assert parent.table is not None
        assert parent.numbers is not None
        policy, total = self._lm.method.cache, self.free.total
        kept, own_start = (np.asarray(x) for x in on_host((own.kept, own.start)))
        kept = parent.table.kept + (kept[0] if self._on_mesh else kept[None])
        fed, prompt = len(document.tokens), document.parts[0]
        start = int(first_local(np.asarray([fed]), np.asarray([prompt]), policy.block_size, policy.window)[0])
        b, begin = policy.block_size, int(own_start.reshape(-1)[0])
        table, layout = LocalTable.exactly(policy, kept, start // b * b, fed)
        shared, copied = table.behind(parent.table, parent.numbers, begin, b, total)
        wanted = table.used & (shared == total)
        needed, most = int(wanted.sum(axis=1).max()), total - parent.num_pages
        require(
            needed <= most,
            f"a document of {fed:,} tokens needs {needed:,} pages beside those of the one that it continues: the "
            f"engine holds {most:,} more (pages)",
        )
        if not self.make_room(needed):
            return needed
        with self._taking(wanted) as new:
            numbers = np.minimum(shared, new)
            before = dataclasses.replace(table, kept=parent.table.kept)
            written = np.where(table.in_window & (shared < total), total, numbers)  # shared pages are not written
            out = before.numbered(written, table.widths, total, self._on_mesh)
            copies = self._numbers(copied), self._numbers(np.where(copied < total, numbers, total))
            row = self.row_table(parent, parent.table.widths), own
            self.pool = self._run(programs.join, self.pool, answers, *row, out, copies)
            self.free.share(shared)
        document.attended_share = parent.attended_share
        self._entered(document, table, layout, numbers)
        return 0

    def row_table(self, document: Document, widths: TableWidths) -> RowTable:
        """The table of a document on the device."""
        assert document.table is not None
        assert document.numbers is not None
        return document.table.numbered(document.numbers, widths, self.free.total, self._on_mesh)

    def _entered(
        self, document: Document, table: LocalTable, layout: CacheLayout, numbers: Int32[np.ndarray, "D P"]
    ) -> None:
        document.table, document.layout, document.numbers = table, layout, numbers
        if self.is_stored(document):
            _settle(document.storing, None)
        elif self._storage is not None and document.named:
            if document.storing is None or document.storing.done():
                document.storing = Future()
            self._unstored.append(document)
        document.state = "device"  # last: who sees that waits for `storing`

    def _numbers(self, numbers: Int32[np.ndarray, "D n"]) -> PageNumbers:
        return PageNumbers.of(numbers, self._on_mesh)

    def _leave(self, document: Document) -> None:
        """Moves a document off the device, if it has another copy, or can get one, or is not named."""
        if not document.named:
            self.drop(document)
        elif self._to_host(document) or self.is_stored(document):
            self._gone(document)

    def _gone(self, document: Document) -> None:
        """Frees the pages of a document on the device; without another copy it is `lost`."""
        if document.numbers is not None:
            self.free.give_back(document.numbers)
            document.numbers = None
        if document.chunks is not None:
            document.state = "host"
        elif self.is_stored(document):
            document.state = "disk"
        else:
            document.state = "waiting"
            self._lost.append(document)

    def is_stored(self, document: Document) -> bool:
        """Whether it is on disk."""
        return self._storage is not None and document.named and document.id in self._storage

    def num_bytes(self, document: Document) -> int:
        """Bytes of a document's pages, on all devices."""
        return document.num_pages * self.page_bytes

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
                other.state = "disk" if other.numbers is None else other.state
        return free >= 0

    def _copies(self, document: Document) -> list[PagedCache]:
        """Starts copies of a document's pages to host memory."""
        assert document.numbers is not None
        assert document.table is not None
        parts = document.table.chunked(document.numbers, self._chunk, self.free.total)
        return [jax.tree.map(_pinned, self._run(programs.fetch, self.pool, self._numbers(part))) for part in parts]

    def load(self, document: Document) -> bool:
        """Whether a document's pages are in host memory; if not, another thread reads them from disk."""
        if document.chunks is None:
            assert self._storage is not None
            try:
                context = self._storage.load(document.id)
                if context is None:
                    return False
                self._loaded(document, context)
            except MemoryError:
                raise
            except Exception as error:
                _log.warning("ignoring damaged document %s: %s", document.id, error)
                self._storage.ignore(document.id)
                damaged = UserError(f"document {document.id!r} is damaged on disk; upload it again")
                self.fail(document, damaged)
                raise damaged from error
            document.state = "host"
            self._free_host(0, but=document)
        needed, total = document.num_pages, self.free.total
        require(needed <= total, f"document {document.id!r} has {needed:,} pages: the engine holds {total:,}")
        return True

    def load_only(self, ids: Collection[str]) -> None:
        """Cancels the loading of other documents."""
        if self._storage is not None:
            self._storage.load_only(ids)

    def bring(self, document: Document) -> bool:
        """Starts to move a document from host memory to the device; false where there is no room."""
        chunks = document.chunks  # other documents may need its place in host memory now
        assert document.table is not None
        assert chunks is not None
        if not self.make_room(document.num_pages):
            return False
        try:
            with self._taking(document.table.used) as numbers:
                parts = zip(document.table.chunked(numbers, self._chunk, self.free.total), chunks, strict=True)
                arriving = [_Arriving(document, part, jax.tree.map(_to_device, chunk)) for part, chunk in parts]
        except Exception:
            document.chunks = None  # it may be what is wrong
            self._gone(document)
            raise
        document.numbers, document.state = numbers, "moving"
        self._arriving += arriving
        self._free_host(0)
        return True

    def move(self) -> bool:
        """Writes pages that have arrived to the pool; whether others are under way."""
        left = []
        for arriving in self._arriving:
            document = arriving.document
            if document.numbers is None:  # it was forgotten, or has failed
                continue
            try:
                if all(x.is_ready() for x in jax.tree.leaves(arriving.pages)):
                    self.pool = self._run(programs.place, self.pool, arriving.pages, self._numbers(arriving.numbers))
                else:
                    left.append(arriving)
            except Exception as error:
                document.chunks = None
                self._gone(document)
                self._failures.append((document, error))
        self._arriving = [each for each in left if each.document.numbers is not None]
        return bool(self._arriving)

    def is_here(self, document: Document) -> bool:
        """Whether all of its pages are on the device."""
        if document.state == "moving" and not any(each.document is document for each in self._arriving):
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
            assert document.layout is not None
            assert document.attended_share is not None
            row = document.table, document.layout, document.attended_share
            make = functools.partial(context_of, self._lm, entry, *row, chunks)
            self._writing = self._storage.store(entry, self.num_bytes(document), make, lambda: not storing.done())
        except Exception as error:
            note(error)
        else:
            self._writing.add_done_callback(lambda writing: note(writing.exception()))

    def _loaded(self, document: Document, context: Context) -> None:
        """Enters the pages of a loaded document."""
        context.require_made_by(self._lm)
        require(context.token_ids() == document.tokens, "it holds other tokens")
        document.table, document.layout = LocalTable.of_row(context.cache, 0), context.layout
        document.attended_share = float(np.asarray(context.attended_share)[0])
        document.chunks = chunks_of(context.cache, document.table, self._chunk)


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
