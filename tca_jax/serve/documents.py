"""Documents of an engine, and their moves between device, host memory and disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.contexts import Context, identity_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import Rows
from tca_jax.errors import UserError, require
from tca_jax.files import replacing
from tca_jax.serve import pages
from tca_jax.serve.pages import Numbers, PagePool

_CHUNK_BYTES = 64 * 2**20  # of keys and values that move at once
_ENTRY, _CONTEXT, _UNFINISHED = "document.json", "context", r"context|\.document\.\d+\.json"  # in a document's folder
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
    table: Any = None  # `Rows` of one, see `PagePool.numbered`; None until it was read
    pages: Numbers = dataclasses.field(default_factory=list)  # that the table's numbers stand for, on the device
    here: bool = False  # whether it has these pages
    arriving: list[Rows] | None = None  # copies of `chunks` on their way there
    chunks: list[Rows] | None = None  # its keys and values in host memory; None where they are not there
    logits: np.ndarray | None = None  # of the token after it, float32 [1, V]; not of named ones
    storing: bool = False  # whether it is to be stored
    unstored: BaseException | None = None  # why it could not be stored
    arrival: int = 0  # order among all requests
    users: set[Any] = dataclasses.field(default_factory=set)  # requests, and documents to be read, for which it stays

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
        return max(map(len, self.pages), default=0)

    @property
    def problem(self) -> BaseException | None:
        """Why it could not be read, or could not be stored."""
        return self.error or self.unstored

    def as_json(self) -> dict[str, Any]:
        """The document as clients see it."""
        fields = {name: getattr(self, name) for name in ("id", "state", "stored", "attended_share")}
        fields |= {"tokens": len(self.tokens), "bytes": self.num_bytes, "created_at": int(self.created)}
        return {"object": "document", **fields, "error": self.problem and str(self.problem)}


class Documents:
    """All documents of an engine, and their pages. Only the engine's thread changes it."""

    def __init__(self, lm: LM, pool: PagePool, host_bytes: int, folder: Path | None, disk_bytes: int | None) -> None:
        self._lm, self._bare_lm, self.pool, self._host_bytes = lm, lm.without_weights, pool, host_bytes
        self._folder: Any = folder  # of this engine; None where documents are not stored
        self._disk_bytes = math.inf if disk_bytes is None else disk_bytes
        self._chunk = max(1, min(pool.documents, _CHUNK_BYTES * pool.devices // pool.page_bytes))
        self._moving: list[Document] = []  # to the device
        self._loading: dict[Document, Future[Context]] = {}  # from disk
        self._writing: tuple[Document, Future[None]] | None = None
        self._writer, self._reader = (ThreadPoolExecutor(1, f"tca-jax-{name}") for name in ("write", "read"))
        self._identity, self._heads = identity_of(lm), [] if lm.head_shards is None else [lm.head_shards]
        found = [] if folder is None else self._on_disk()
        self.by_id = OrderedDict((each.id, each) for each in found)  # least recently used first

    def id_of(self, tokens: list[int], parts: tuple[int, ...], *, named: bool = True) -> str:
        """The id of tokens that the model reads in these parts: a hash of all that its pages depend on."""
        own = self._identity.fingerprint, self._identity.method_description, self._lm.cache_dtype.name, *self._heads
        digest = hashlib.sha256(repr((*own, parts)).encode() + np.asarray(tokens, np.int64).tobytes()).hexdigest()
        return f"{'doc' if named else 'text'}-{digest[:24]}"

    def usable(self, id_: str) -> Document | None:
        """The document of an id that has not failed."""
        found = self.by_id.get(id_)
        return None if found is None or found.state == "failed" else found

    def to_be_read(self) -> list[Document]:
        """Documents to be read, maybe once more, in order of arrival. Those that are wanted no more are dropped."""
        waiting = [each for each in self.all() if each.state == "waiting"]
        for document in waiting:
            if not (document.named or document.users):
                self.drop(document)
        return sorted((each for each in waiting if each.error is None), key=lambda each: each.arrival)

    def parent_of(self, document: Document) -> Document | None:
        """The document that one of several parts continues, which is read first if it is not there."""
        *before, last = document.parts
        if document.parent is None and before:
            tokens, parts = document.tokens[:-last], tuple(before)
            ids = [self.id_of(tokens, parts, named=named) for named in (True, False)]
            document.parent = self.usable(ids[0]) or self.usable(ids[1])
            if document.parent is None:
                document.parent = Document(ids[1], tokens, parts, named=False, arrival=document.arrival)
                self.by_id[document.parent.id] = document.parent
            if not document.parent.named:
                document.parent.users.add(document)
        return document.parent

    def all(self) -> list[Document]:
        """All of them, least recently used first."""
        return list(self.by_id.values())

    def forget(self, document: Document) -> None:
        """Drops an unused document, also on disk. OSError if it cannot be removed there; it stays then."""
        if self._folder is not None:
            document.storing = False  # it gets no entry from now on
            (self._folder / document.id / _ENTRY).unlink(missing_ok=True)
            document.stored = False
            self._free_disk(document)
        self.drop(document)

    def drop(self, document: Document) -> None:
        """Drops it from memory, and its name."""
        self.fail(document, UserError(f"document {document.id!r} is no longer there"), listed=False)

    def fail(self, document: Document, error: Exception, *, listed: bool = True) -> None:
        """Marks a document as failed. Its pages are freed; a named one may stay listed."""
        self._release(document)
        self.unpin(document)
        document.error, document.chunks, document.parent, document.storing = error, None, None, False
        if not (document.named and listed) and self.by_id.get(document.id) is document:
            del self.by_id[document.id]

    def unpin(self, document: Document) -> None:
        """Has the parent of a document stay for it no longer; one that is dropped then is looked for again."""
        if document.parent is not None:
            document.parent.users.discard(document)
            document.parent = document.parent if document.parent.named else None

    def _release(self, document: Document) -> None:
        if document.here:
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
                    continue
                if document.chunks is None and self._free_host(document.num_bytes):
                    try:
                        document.chunks = self._copies(document)
                    except Exception as error:
                        _log.warning("document %s does not go to host memory: %s", document.id, error)
                if document.chunks is not None or document.stored:
                    self.leave_device(document)
        return self.pool.allocator.free >= pages

    def enter(self, document: Document, row: Rows, attended_share: float | None) -> bool:
        """Enters a document of a row of the pool; not without pages in exchange for those that answers gave."""
        table, numbers = self.pool.numbered(row, self.pool.total)
        if not self.pool.keep(numbers, self.make_room):
            return False
        self._entered(document, table, numbers, attended_share)
        document.here = True  # last: who sees that waits for `storing`
        return True

    def enter_context(self, document: Document, row: Rows, attended_share: float) -> None:
        """Enters a document of a row in host memory, which has a pool of its own."""
        table, numbers = self.pool.numbered(row, row.num_pages)
        self._entered(document, table, numbers, attended_share)

        def chunk(part: np.ndarray, x: np.ndarray) -> np.ndarray:
            devices = zip(x[0] if self.pool.on_mesh else x[None], part, strict=True)
            found = [own.take(of_device, axis=0, mode="clip") for own, of_device in devices]
            return np.stack(found)[None] if self.pool.on_mesh else found[0]

        rows, parts = dataclasses.replace(self.pool.arrays, k=row.k, v=row.v), self._parts(numbers)
        document.chunks = [jax.tree.map(functools.partial(chunk, self.pool.padded(*each)), rows) for each in parts]

    def _entered(self, document: Document, table: Rows, numbers: Numbers, attended_share: float | None) -> None:
        document.table, document.pages, document.attended_share = table, numbers, attended_share
        document.num_bytes = document.num_pages * self.pool.page_bytes
        self.by_id[document.id] = document
        self.unpin(document)
        document.parent = None
        if self._folder is not None and document.named and not document.stored:
            document.storing, document.unstored = True, None

    def leave_device(self, document: Document) -> None:
        """Frees the pages of a document on the device; without another copy it is read again."""
        self._release(document)
        if document.state == "waiting":
            _log.warning("document %s is read again", document.id)

    # Host memory

    def _free_host(self, num_bytes: int, but: Document | None = None) -> bool:
        """Whether host memory has room for `num_bytes`, once second copies have been dropped."""
        held = {each: sum(x.nbytes for x in jax.tree.leaves(each.chunks)) for each in self.all()}
        free = self._host_bytes - num_bytes - sum(held.values())
        for other, size in held.items():
            if free >= 0:
                break
            if other is not but and (other.state == "device" or other.stored):
                free += size
                other.chunks = None
        return free >= 0

    def _copies(self, document: Document) -> list[Rows]:
        """Starts copies of a document's pages to host memory."""
        free = [self.pool.free_pages(*part) for part in self._parts(document.pages)]
        put = functools.partial(jax.tree.map, lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")))
        return [put(pages.fetch_pages.run(self._bare_lm, self.pool.lend(None, part))) for part in free]

    def _parts(self, numbers: Numbers) -> list[tuple[Numbers, int]]:
        """Pages that move at once, and places for them: powers of two from a 64th of a chunk, each with programs."""
        count, most = max(map(len, numbers)), self._chunk
        places = [min(most, max(most >> 6, 1 << (count - i - 1).bit_length())) for i in range(0, count, most)]
        return [([own[i * most : (i + 1) * most] for own in numbers], places[i]) for i in range(len(places))]

    def bring(self, document: Document) -> None:
        """Starts to move a document from host memory to the device, which has room for it."""
        document.pages = self.pool.allocator.take(list(map(len, document.pages)))
        document.arriving, document.here = [], True
        try:
            document.arriving = jax.tree.map(_to_device, document.chunks)
        except Exception:
            document.chunks = None  # it may be what is wrong
            self.leave_device(document)
            raise
        self._moving.append(document)
        self._free_host(0)

    def move(self) -> list[tuple[Document, Exception]]:
        """Enters documents from disk, and pages that came to the device. Returns those that failed, with the error."""
        failures: list[tuple[Document, Exception]] = []
        for document in [each for each, loading in self._loading.items() if loading.done()]:
            loading = self._loading.pop(document)
            if document.state != "disk":  # it was forgotten
                continue
            try:
                context = loading.result()
                context.require_made_by(self._lm)
                require(context.token_ids() == document.tokens, "it holds other tokens")
                self.enter_context(document, context.rows, float(np.asarray(context.attended_share)[0]))
                self._free_host(0, but=document)
            except MemoryError as error:
                failures.append((document, error))
            except Exception as error:
                _log.warning("ignoring damaged document %s: %s", document.id, error)
                document.stored = False
                self.fail(document, UserError(f"document {document.id!r} is damaged on disk; upload it again"))
        for document in self._moving:
            try:
                self._place(document)
            except Exception as error:
                document.chunks = None
                self.leave_device(document)
                failures.append((document, error))
        self._moving = [each for each in self._moving if each.arriving is not None]
        return failures

    def _place(self, document: Document) -> None:
        """Writes a document's pages to the pool once all have arrived; not where it was forgotten meanwhile."""
        chunks: Any = document.arriving
        if chunks is not None and all(x.is_ready() for x in jax.tree.leaves(chunks)):
            for part, chunk in zip(self._parts(document.pages), chunks, strict=True):
                to = self.pool.lend(None, self.pool.free_pages(*part))
                self.pool.take_back(pages.place_pages.run(self._bare_lm, to, chunk))
            document.arriving = None

    # The disk: a folder of each document with a saved context and, from then on, an entry

    def _on_disk(self) -> list[Document]:
        """Stored documents, oldest first. A damaged entry is skipped, with a line in the log."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found = []
        for folder in sorted(each for each in self._folder.iterdir() if re.fullmatch("doc-[0-9a-f]{24}", each.name)):
            try:
                if not (folder / _ENTRY).exists():
                    if all(re.fullmatch(_UNFINISHED, each.name) for each in folder.iterdir()):  # its engine was killed
                        shutil.rmtree(folder, ignore_errors=True)
                    continue
                fields = json.loads((folder / _ENTRY).read_text())
                tokens = np.asarray(fields["tokens"], np.int32).tolist()
                parts, created = tuple(fields["parts"]), float(fields["created"])
                require(sum(parts) == len(tokens), "its parts are not its tokens")
                if self.id_of(tokens, parts) == folder.name:  # not another model's
                    found.append(Document(folder.name, tokens, parts, stored=True, created=created))
            except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
                _log.warning("ignoring damaged document %s: %s", folder, error)
        return sorted(found, key=lambda document: document.created)

    def _free_disk(self, document: Document) -> None:
        """Has another thread free the bytes of a document, once entries are written."""
        self._writer.submit(shutil.rmtree, self._folder / document.id, ignore_errors=True)

    def load(self, document: Document) -> None:
        """Has another thread read a document from disk to host memory."""
        if document not in self._loading:
            self._loading[document] = self._reader.submit(Context.load, self._folder / document.id / _CONTEXT)

    def store(self) -> bool:
        """Starts to store the next document, one at a time: each needs a host copy. Whether any is stored or moves."""
        if self._writing is not None and self._writing[1].done():
            (document, written), self._writing = self._writing, None
            with self._storing(document):
                written.result()
                if document.storing:
                    with replacing(self._folder / document.id / _ENTRY) as file:
                        fields = {name: getattr(document, name) for name in ("tokens", "parts", "created")}
                        file.write_text(json.dumps(fields))
                    document.stored, document.storing = True, False
                else:  # it was forgotten
                    self._free_disk(document)
        for document in [each for each in self.all() if each.storing and each.state != "waiting"]:
            if self._writing is None:
                with self._storing(document):
                    chunks = document.chunks or self._copies(document)
                    self._writing = document, self._writer.submit(self._write, document, chunks)
        return bool(self._writing or self._moving or self._loading)

    @contextlib.contextmanager
    def _storing(self, document: Document) -> Iterator[None]:
        """A document whose body raises is not stored."""
        try:
            yield
        except Exception as error:
            _log.warning("document %s is not stored: %s", document.id, error)
            document.unstored, document.storing = error, False
            self._free_disk(document)

    def _write(self, document: Document, chunks: list[Rows]) -> None:
        """Writes the context of a document, in a thread of its own. OSError where the folder is full."""
        held = 0
        for file in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                held += file.stat().st_size
        need = f"a document of {document.num_bytes / 1e9:,.2f} GB does not fit"
        used = f"{self._folder} holds {held / 1e9:,.2f} of at most {self._disk_bytes / 1e9:,.2f} GB"
        require(held + document.num_bytes <= self._disk_bytes, f"{used}: {need}", OSError)
        axis, pages = 2 if self.pool.on_mesh else 0, np.arange(document.num_pages)

        def joined(*parts: Any) -> np.ndarray:
            return np.concatenate([np.asarray(on_host(x)) for x in parts], axis=axis).take(pages, axis=axis)

        k, v = jax.tree.map(joined, *[(chunk.k, chunk.v) for chunk in chunks])
        tokens, lengths = (jnp.asarray(x, jnp.int32) for x in ([document.tokens], [len(document.tokens)]))
        share, shards = jnp.asarray([document.attended_share], jnp.float32), self._lm.head_shards
        rows, window = dataclasses.replace(document.table, k=k, v=v, in_runs=True), self._lm.method.cache.window
        context = Context(rows, tokens, lengths, share, 0.0, 0.0, window, shards, self._identity)
        context.save(self._folder / document.id / _CONTEXT)

    def close(self) -> None:
        """Stores all documents that are not stored yet."""
        self.store()
        while self._writing is not None:
            wait([self._writing[1]])
            self.store()
        self._writer.shutdown()
        self._reader.shutdown(cancel_futures=True)


def _to_device(x: Any) -> jax.Array:
    return jax.device_put(x, x.sharding.with_memory_kind("device") if isinstance(x, jax.Array) else None)


def pins(user: Any) -> bool:
    """Whether the parent of a request, or of a document to be read, stays where it is for it."""
    return user.parent is not None and user in user.parent.users
