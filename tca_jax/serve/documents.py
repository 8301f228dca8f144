"""Documents of an engine, and their moves between device, host memory and disk."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import logging
import math
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.contexts import Context, identity_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import FreePages, Numbers, Rows
from tca_jax.errors import UserError, require
from tca_jax.files import replacing
from tca_jax.serve import pages
from tca_jax.serve.pages import PagePool, bare

_CHUNK_BYTES = 64 * 2**20  # of keys and values that move at once
_ENTRY, _CONTEXT = "document.json", "context"  # in the folder of a document
_log = logging.getLogger(__name__)

State = Literal["waiting", "device", "moving", "host", "disk", "failed"]


@dataclasses.dataclass(eq=False)
class Document:
    """Tokens that the model has read, or will. Only the engine changes it."""

    id: str  # from `Documents.id_of`
    tokens: list[int]
    parts: tuple[int, ...]  # tokens of the first prefill, and of each append
    named: bool = True  # requested by a user; others are copies of prompts that can be sent again, and go first
    parent: Document | None = None  # that it continues, until it is read
    stored: bool = False  # on disk, where a restart finds it
    num_bytes: int = 0  # of its keys and values, on all devices; 0 until it was read
    attended_share: float | None = None  # see `tca_jax.Stats`; None until it is read
    created: float = dataclasses.field(default_factory=time.time)  # seconds since the epoch
    error: Exception | None = None  # why it could not be read
    table: Rows | None = None  # of one row, on the host, without pool; None until it was read
    pages: Numbers | None = None  # that the table names, in the order of `chunks`; None until it was read
    here: bool = False  # whether it has these pages on the device
    arriving: list[Rows] | None = None  # copies of `chunks` on their way there
    chunks: list[Rows] | None = None  # its keys and values in host memory; None where they are not there
    logits: np.ndarray | None = None  # of the token after it, float32 [1, V]; not of named ones
    storing: bool = False  # whether it is to be stored
    unstored: BaseException | None = None  # why it could not be stored
    loading: Future[Context] | None = None  # from disk
    arrival: int = 0  # order among all requests
    users: int = 0  # requests, and documents to be read, that need its pages
    pins: bool = False  # whether it is a user of its parent

    @property
    def state(self) -> State:
        """Where it is. "waiting": to be read; "moving": to the device."""
        if self.error is not None:
            return "failed"
        if self.here:
            return "device" if self.arriving is None else "moving"
        return "host" if self.chunks is not None else "disk" if self.stored else "waiting"

    @property
    def num_pages(self) -> int:
        """Its pages, on the device that has most of them."""
        return max(map(len, self.pages or []), default=0)

    @property
    def problem(self) -> BaseException | None:
        """Why it could not be read, or could not be stored."""
        return self.error or self.unstored


class Documents:
    """All documents of an engine, and their pages. Only the engine's thread changes it.

    `unread` are documents to be read, maybe once more. `failures` are documents that could not be moved to the device,
    with the error; the caller takes them out.
    """

    def __init__(self, lm: LM, pool: PagePool, host_bytes: int, storage: Storage | None) -> None:
        self._lm, self._bare_lm, self.pool = lm, lm.without_weights(), pool
        self._host_bytes, self._storage = host_bytes, storage
        self._chunk = max(1, min(pool.documents, _CHUNK_BYTES * pool.devices // pool.page_bytes))
        self._moving: list[Document] = []  # to the device
        self._loading: list[Document] = []  # from disk
        self.unread: list[Document] = []
        self.failures: list[tuple[Document, Exception]] = []
        self._unstored: collections.deque[Document] = collections.deque()
        self._writing: tuple[Document, Future[None]] | None = None
        identity = identity_of(lm)
        self._identity = identity.fingerprint, identity.method_description, lm.cache_dtype.name
        found = [] if storage is None else storage.documents()
        own = [each for each in found if self.id_of(each.tokens, each.parts) == each.id]  # not another model's
        self.by_id = OrderedDict((each.id, each) for each in own)  # least recently used first

    def id_of(self, tokens: list[int], parts: tuple[int, ...], *, named: bool = True) -> str:
        """The id of tokens that the model reads in these parts: a hash of all that its pages depend on."""
        model = repr((*self._identity, parts)).encode()
        digest = hashlib.sha256(model + np.asarray(tokens, np.int64).tobytes()).hexdigest()
        return f"{'doc' if named else 'text'}-{digest[:24]}"

    def usable(self, id_: str) -> Document | None:
        """The document of an id that has not failed."""
        found = self.by_id.get(id_)
        return None if found is None or found.state == "failed" else found

    def to_be_read(self) -> list[Document]:
        """Documents to be read. Those that are wanted no more are dropped."""
        for document in self.unread:
            if not (document.named or document.users):
                self.drop(document)
        self.unread = [each for each in self.unread if each.state == "waiting"]
        return self.unread

    def add(self, document: Document) -> None:
        """Adds a document to be read."""
        self.by_id[document.id] = document
        self.unread.append(document)

    def parent_of(self, document: Document) -> Document | None:
        """The document that one of several parts continues, which is read first if it is not there."""
        *before, last = document.parts
        if document.parent is None and before:
            tokens, parts = document.tokens[:-last], tuple(before)
            ids = [self.id_of(tokens, parts, named=named) for named in (True, False)]
            document.parent = self.usable(ids[0]) or self.usable(ids[1])
            if document.parent is None:
                document.parent = Document(ids[1], tokens, parts, named=False, arrival=document.arrival)
                pin(document)
                self.add(document.parent)
        return document.parent

    def all(self) -> list[Document]:
        """All of them, least recently used first."""
        return list(self.by_id.values())

    def forget(self, document: Document) -> None:
        """Drops an unused document, also on disk. OSError if it cannot be removed there; it stays then."""
        if self._storage is not None:
            document.storing = False  # it is not published from now on
            self._storage.remove(document)
        self.drop(document)

    def drop(self, document: Document) -> None:
        """Drops it from memory, and its name."""
        self.fail(document, UserError(f"document {document.id!r} is no longer there"))
        if self.by_id.get(document.id) is document:
            del self.by_id[document.id]

    def fail(self, document: Document, error: Exception) -> None:
        """Marks a document as failed. Its pages are freed; a named one stays listed."""
        document.error = error
        self._release(document)
        unpin(document)
        document.chunks = document.parent = None
        document.storing = False
        if not document.named and self.by_id.get(document.id) is document:
            del self.by_id[document.id]

    def _release(self, document: Document) -> None:
        if document.here and document.pages is not None:
            self.pool.allocator.release(document.pages)
        document.here, document.arriving = False, None

    # The device

    def make_room(self, pages: int) -> bool:
        """Whether `pages` are free, once unused documents have left the device for them."""
        for document in self.all():
            if self.pool.allocator.free >= pages:
                break
            if document.state == "device" and not document.users:
                if not document.named:
                    self.drop(document)
                elif self._to_host(document) or document.stored:
                    self._gone(document)
        return self.pool.allocator.free >= pages

    def may_leave(self, own: Document | None) -> bool:
        """Whether a document may leave the device later: it has other users than that of `own`, or is being stored."""
        here = [each for each in self.all() if each.here]
        return any(each.state == "moving" or each.storing or each.users > (each is own) for each in here)

    def renew(self) -> None:
        """Replaces the pool that a failed program has consumed; documents without another copy are read again."""
        for document in self.all():
            if document.here:
                self._gone(document)
        self.pool.renew()

    def enter(self, document: Document, table: Rows, attended_share: float | None) -> None:
        """Enters a document of a row of the pool, whose table is on the host; it counts as a use of its pages."""
        table = self.pool.exact(table)
        numbers = self.pool.named(table)
        self.pool.keep(numbers)
        self._entered(document, table, numbers, attended_share)
        document.here = True  # last: who sees that waits for `storing`

    def enter_row(self, document: Document, attended_share: float | None, table: Rows) -> bool:
        """Enters a document of a row of the batch, unless it lacks pages to exchange for those of the row."""
        own, _ = self.pool.split(self.pool.named(self.pool.exact(table)))
        if not self.make_room(max(map(len, own))):
            return False
        self.enter(document, table, attended_share)
        self.by_id[document.id] = document
        return True

    def enter_context(self, document: Document, rows: Rows, attended_share: float) -> None:
        """Enters a document of a context of one row in host memory."""
        table, numbers, chunks = _chunks_of(self.pool, rows, self._chunk)
        self._entered(document, table, numbers, attended_share)
        document.chunks = chunks

    def _entered(self, document: Document, table: Rows, numbers: Numbers, attended_share: float | None) -> None:
        document.table, document.pages, document.attended_share = table, numbers, attended_share
        document.num_bytes = document.num_pages * self.pool.page_bytes
        unpin(document)
        document.parent = None
        if self._storage is not None and document.named and not document.stored:
            document.storing, document.unstored = True, None
            self._unstored.append(document)

    def _gone(self, document: Document) -> None:
        """Frees the pages of a document on the device; without another copy it is read again."""
        self._release(document)
        if document.state == "waiting":
            _log.warning("document %s is read again", document.id)
            self.unread.append(document)

    # Host memory

    def _to_host(self, document: Document) -> bool:
        """Starts a copy to host memory; false where there is no room."""
        if document.chunks is None and self._free_host(document.num_bytes):
            try:
                document.chunks = self._copies(document)
            except Exception as error:
                _log.warning("document %s does not go to host memory: %s", document.id, error)
        return document.chunks is not None

    def _free_host(self, num_bytes: int, but: Document | None = None) -> bool:
        """Whether host memory has room for `num_bytes`, once second copies have been dropped."""
        held = [each for each in self.all() if each.chunks is not None]
        free = self._host_bytes - num_bytes - sum(each.num_bytes for each in held)
        for other in held:
            if free >= 0:
                break
            if other is not but and (other.state == "device" or other.stored):
                free += other.num_bytes
                other.chunks = None
        return free >= 0

    def _copies(self, document: Document) -> list[Rows]:
        """Starts copies of a document's pages to host memory."""
        free = [self.pool.free_pages(part, self._chunk) for part in self._parts(document.pages or [])]
        put = functools.partial(jax.tree.map, lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")))
        return [put(pages.fetch_pages.run(self._bare_lm, self.pool.lend(None, part))) for part in free]

    def _parts(self, numbers: Numbers) -> list[Numbers]:
        """Pages in chunks."""
        return [[own[i : i + self._chunk] for own in numbers] for i in range(0, max(map(len, numbers)), self._chunk)]

    def bring(self, document: Document) -> None:
        """Starts to move a document from host memory to the device, which has room for it."""
        table: Any = document.table
        chunks: Any = document.chunks
        old: Any = document.pages
        new = self.pool.allocator.take(list(map(len, old)))
        document.table, document.pages = self.pool.renumbered(table, old, new), new
        document.arriving, document.here = [], True
        try:
            document.arriving = jax.tree.map(_to_device, chunks)
        except Exception:
            document.chunks = None  # it may be what is wrong
            self._gone(document)
            raise
        self._moving.append(document)
        self._free_host(0)

    def move(self) -> bool:
        """Enters documents that have come from disk, and pages that have come to the device; whether others are to."""
        for document in [each for each in self._loading if each.loading is not None and each.loading.done()]:
            self._loading.remove(document)
            self._loaded(document)
        for document in self._moving:
            try:
                self._place(document)
            except Exception as error:
                document.chunks = None
                self._gone(document)
                self.failures.append((document, error))
        self._moving = [each for each in self._moving if each.arriving is not None]
        return bool(self._moving or self._loading)

    def _place(self, document: Document) -> None:
        """Writes a document's pages to the pool once all have arrived; not where it was forgotten meanwhile."""
        chunks: Any = document.arriving
        if chunks is not None and all(x.is_ready() for x in jax.tree.leaves(chunks)):
            for numbers, chunk in zip(self._parts(document.pages or []), chunks, strict=True):
                to = self.pool.lend(None, self.pool.free_pages(numbers, self._chunk))
                self.pool.take_back(pages.place_pages.run(self._bare_lm, to, chunk))
            document.arriving = None

    # The disk

    def load(self, document: Document) -> None:
        """Has another thread read a document from disk to host memory."""
        if self._storage is not None and document.loading is None:
            document.loading = self._storage.load(document.id)
            self._loading.append(document)

    def _loaded(self, document: Document) -> None:
        loading: Any = document.loading
        document.loading = None
        if document.state != "disk":  # it was forgotten
            return
        try:
            context = loading.result()
            context.require_made_by(self._lm)
            require(context.token_ids() == document.tokens, "it holds other tokens")
            self.enter_context(document, context.rows, float(np.asarray(context.attended_share)[0]))
            self._free_host(0, but=document)
        except MemoryError as error:
            self.failures.append((document, error))
        except Exception as error:
            _log.warning("ignoring damaged document %s: %s", document.id, error)
            document.stored = False
            self.fail(document, UserError(f"document {document.id!r} is damaged on disk; upload it again"))

    def store(self) -> bool:
        """Starts to store the next document, one at a time (each needs a host copy); whether any is left."""
        if self._writing is not None and self._writing[1].done():
            self._stored(self._writing[0], self._writing[1].exception())
            self._writing = None
        while self._unstored and self._writing is None:
            document = self._unstored.popleft()
            if not document.storing or document.state == "waiting":  # it is stored when it is read again
                continue
            try:
                as_now = copy.copy(document)  # another thread reads it, and it may move
                as_now.chunks = document.chunks or self._copies(document)
                make = functools.partial(_context_of, self._lm, self.pool, as_now)
                storage: Any = self._storage
                self._writing = document, storage.store(document, make)
            except Exception as error:
                self._stored(document, error)
        return self._writing is not None

    def _stored(self, document: Document, error: BaseException | None) -> None:
        if document.storing:  # else it was forgotten
            document.stored, document.unstored, document.storing = error is None, error, False
            if error is not None:
                _log.warning("document %s is not stored: %s", document.id, error)

    def close(self) -> None:
        """Stores all documents that are not stored yet."""
        while self.store():
            if self._writing is not None:
                wait([self._writing[1]])
        if self._storage is not None:
            self._storage.close()


class Storage:
    """A folder of documents of at most `max_bytes`. One engine owns it, and its thread calls all methods.

    Each document is a folder with a saved context and an entry, which is renamed into place last.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for each in folder.glob("doc-*"):
            if not (each / _ENTRY).exists():  # by an engine that was killed
                shutil.rmtree(each, ignore_errors=True)
        self._folder, self._max_bytes = folder, math.inf if max_bytes is None else max_bytes
        self._writer, self._reader = (ThreadPoolExecutor(1, f"tca-jax-{name}") for name in ("write", "read"))
        self._lock = threading.Lock()  # of entries

    def documents(self) -> list[Document]:
        """Stored documents, oldest first. A damaged entry is skipped, with a line in the log."""
        found = []
        for file in self._folder.glob(f"*/{_ENTRY}"):
            try:
                fields = json.loads(file.read_text())
                tokens = np.asarray(fields["tokens"], np.int32).tolist()
                parts, created = tuple(fields["parts"]), float(fields["created"])
                require(sum(parts) == len(tokens), "its parts are not its tokens")
                found.append(Document(file.parent.name, tokens, parts, stored=True, created=created))
            except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
                _log.warning("ignoring damaged document %s: %s", file.parent, error)
        return sorted(found, key=lambda document: document.created)

    def store(self, document: Document, make: Callable[[], Context]) -> Future[None]:
        """Writes a document in another thread, which creates its context by `make`.

        It is published if it is still to be stored then. The future fails with an OSError where the folder is full.
        """
        return self._writer.submit(self._write, document, make)

    def _write(self, document: Document, make: Callable[[], Context]) -> None:
        folder, held, published = self._folder / document.id, 0, False
        for file in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                held += file.stat().st_size
        need = f"a document of {document.num_bytes / 1e9:,.2f} GB does not fit"
        used = f"{self._folder} holds {held / 1e9:,.2f} of at most {self._max_bytes / 1e9:,.2f} GB"
        require(held + document.num_bytes <= self._max_bytes, f"{used}: {need}", OSError)
        try:
            (folder / _ENTRY).unlink(missing_ok=True)  # of a damaged one
            make().save(folder / _CONTEXT)
            entry = {name: getattr(document, name) for name in ("tokens", "parts", "created")}
            with self._lock:
                if document.storing:
                    with replacing(folder / _ENTRY) as file:
                        file.write_text(json.dumps(entry))
                    published = True
        finally:
            if not published:
                shutil.rmtree(folder, ignore_errors=True)

    def load(self, id_: str) -> Future[Context]:
        """Reads a stored document to host memory, in another thread."""
        return self._reader.submit(Context.load, self._folder / id_ / _CONTEXT)

    def remove(self, document: Document) -> None:
        """Removes a document at once; another thread frees its bytes. OSError if it cannot be removed."""
        folder = self._folder / document.id
        with self._lock:
            (folder / _ENTRY).unlink(missing_ok=True)
            document.stored = False
        self._writer.submit(shutil.rmtree, folder, ignore_errors=True)

    def close(self) -> None:
        """Waits for documents that are being written."""
        self._writer.shutdown()
        self._reader.shutdown(cancel_futures=True)


def _context_of(lm: LM, pool: PagePool, document: Document) -> Context:
    """The context of a document in host memory."""
    table: Any = document.table
    axis, counts = 2 if pool.on_mesh else 0, list(map(len, document.pages or []))
    most = max(counts)

    def joined(*parts: Any) -> np.ndarray:
        return np.concatenate([np.asarray(on_host(x)) for x in parts], axis=axis).take(np.arange(most), axis=axis)

    k, v = jax.tree.map(joined, *[(chunk.k, chunk.v) for chunk in document.chunks or []])
    table = pool.renumbered(table, document.pages or [], [np.arange(count, dtype=np.int32) for count in counts], most)
    lead = table.start.shape[:-1]
    free: Any = FreePages(np.zeros((*lead, 0), np.int32), np.zeros(lead, np.int32))  # type: ignore[arg-type]
    return Context(
        rows=dataclasses.replace(table, k=k, v=v, free=free, in_runs=True),
        tokens=jnp.asarray([document.tokens], jnp.int32),
        lengths=jnp.asarray([len(document.tokens)], jnp.int32),
        attended_share=jnp.asarray([document.attended_share], jnp.float32),
        compile_seconds=0.0,
        prefill_seconds=0.0,
        window=lm.method.cache.window,
        shards=lm.head_shards,
        identity=identity_of(lm),
    )


def _chunks_of(pool: PagePool, rows: Rows, size: int) -> tuple[Rows, Numbers, list[Rows]]:
    """The table of a context of one row on the host, the numbers of its pages, and these pages by `size`."""
    table = dataclasses.replace(bare(rows), in_runs=False)
    named = pool.named(pool.exact(table), rows.num_pages)
    numbers = [np.arange(len(own), dtype=np.int32) for own in named]

    def chunk(first: int, x: np.ndarray) -> np.ndarray:
        parts = []
        for own, of_device in zip(x[0] if pool.on_mesh else x[None], named, strict=True):
            picked = own[of_device[first : first + size]]
            parts.append(np.pad(picked, ((0, size - len(picked)), *((0, 0),) * (picked.ndim - 1))))
        return np.stack(parts)[None] if pool.on_mesh else parts[0]

    chunks = []
    for first in range(0, max(map(len, named)), size):
        k, v = jax.tree.map(functools.partial(chunk, first), (rows.k, rows.v))
        chunks.append(dataclasses.replace(pool.arrays, k=k, v=v))
    return pool.exact(pool.renumbered(table, named, numbers)), numbers, chunks


def pin(user: Any) -> None:
    """Keeps the parent of a request, or of a document to be read, where it is."""
    user.parent.users += not user.pins
    user.pins = True


def unpin(user: Any) -> None:
    """Undoes `pin`."""
    if user.pins:
        user.parent.users -= 1
        user.pins = False


def _to_device(x: Any) -> jax.Array:
    return jax.device_put(x, x.sharding.with_memory_kind("device") if isinstance(x, jax.Array) else None)
