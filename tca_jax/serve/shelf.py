"""A folder of documents: contexts that engines have stored, found again by any of them, written by another thread."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tca_jax.engine.contexts import Context
from tca_jax.errors import UserError

_log = logging.getLogger(__name__)
_ENTRY, _CONTEXT = "document.json", "context"  # in the folder of a document
_ID = re.compile(r"doc-[0-9a-f]{24}")  # an id of a request becomes a name of a folder only if it is one
_THREADS = 2  # one writes and removes while the other reads


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a shelf says of a document without reading it: see `document.Document`."""

    id: str
    tokens: list[int]
    parts: tuple[int, ...]
    created: float

    @classmethod
    def parse(cls, id_: str, text: str) -> Entry:
        """The entry that a file holds; ValueError, TypeError, KeyError or RecursionError if it holds none."""
        fields = json.loads(text)
        entry = cls(id_, fields["tokens"], tuple(fields["parts"]), float(fields["created"]))
        integers = [*entry.tokens, *entry.parts]
        if not all(type(x) is int and 0 <= x < 2**31 for x in integers) or not math.isfinite(entry.created):
            raise UserError("its tokens, parts or time are no numbers of such")
        if not entry.tokens or sum(entry.parts) != len(entry.tokens) or 0 in entry.parts:
            raise UserError(f"parts of {entry.parts} tokens are not the {len(entry.tokens)} that it has")
        return entry


class Shelf:
    """Documents on disk, each in a folder of its own that one rename makes whole, and one takes away.

    Args:
        folder: Made where there is none. Several engines of one model may share it. What processes that were killed
            have left half written is removed.
        max_bytes: Most bytes of documents; None for no bound. A document beyond it is not stored, for none that was
            reported as stored may be lost.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        self._folder, self._max_bytes = folder, max_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tca-jax-shelf")
        self._lock = threading.Lock()  # of what stands under the names of documents
        self._writing: dict[str, object] = {}  # what is to be published, by id
        self._damaged: set[str] = set()
        self._loading: tuple[str, Future[Context]] | None = None

    def ids(self) -> list[str]:
        """The names of all folders with an entry."""
        return [file.parent.name for file in self._folder.glob(f"*/{_ENTRY}")]

    def entries(self) -> list[Entry]:
        """What is there, oldest first; files that are no entries are named in the log and left alone."""
        found = map(self._entry, self.ids())
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.created)

    def entry(self, id_: str) -> Entry | None:
        """The entry of a stored document, whichever engine stored it; None if there is none of this id."""
        return self._entry(id_) if _ID.fullmatch(id_) and self.has(id_) else None

    def _entry(self, id_: str) -> Entry | None:
        file = self._folder / id_ / _ENTRY
        try:
            return Entry.parse(id_, file.read_text())
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%s is no document: %s", file, error)
            return None

    def has(self, id_: str) -> bool:
        """Whether a document is stored, as far as its names tell."""
        folder = self._folder / id_
        return id_ not in self._damaged and os.path.isfile(folder / _ENTRY) and os.path.isdir(folder / _CONTEXT)

    def store(self, entry: Entry, num_bytes: int, make: Callable[[], Context]) -> Future[None]:
        """Writes a document of so many bytes in another thread, which also makes its context.

        Returns:
            The writing, which fails with an OSError where the folder is full or cannot be written.
        """
        with self._lock:
            writing = self._writing[entry.id] = object()
        return self._threads.submit(self._write, entry, num_bytes, make, writing)

    def _write(self, entry: Entry, num_bytes: int, make: Callable[[], Context], writing: object) -> None:
        try:
            if self.has(entry.id):
                return
            self._require_room(num_bytes)
            with self._temporary_folder() as temporary:
                folder = Path(temporary) / "whole"
                folder.mkdir()
                make().save(folder / _CONTEXT)
                with open(folder / _ENTRY, "w") as file:
                    json.dump({"tokens": entry.tokens, "parts": entry.parts, "created": entry.created}, file)
                    file.flush()
                    os.fsync(file.fileno())
                self._require_room(0)
                with self._lock:
                    if self._writing.get(entry.id) is not writing:
                        raise UserError(f"document {entry.id!r} is no longer there")
                    self._publish(folder, entry.id, Path(temporary) / "damaged")
        finally:
            with self._lock:
                if self._writing.get(entry.id) is writing:
                    del self._writing[entry.id]

    def _publish(self, folder: Path, id_: str, instead: Path) -> None:
        """A folder becomes that of a document; one that is damaged goes."""
        if not self.has(id_):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._folder / id_, instead)
        try:
            os.rename(folder, self._folder / id_)
        except OSError:
            if not self.has(id_):  # another engine has stored it
                raise
        self._damaged.discard(id_)

    def _temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix=".tmp-", dir=self._folder, ignore_cleanup_errors=True)

    def _require_room(self, num_bytes: int) -> None:
        held = self.num_bytes
        if self._max_bytes is not None and held + num_bytes > self._max_bytes:
            raise OSError(
                f"{self._folder} holds {held / 1e9:,.2f} of at most {self._max_bytes / 1e9:,.2f} GB: a document of "
                f"{num_bytes / 1e9:,.2f} GB does not fit"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        total = 0
        for folder, _, files in os.walk(self._folder):
            for file in files:
                with contextlib.suppress(OSError):  # it has just gone
                    total += os.path.getsize(os.path.join(folder, file))
        return total

    def load(self, id_: str) -> Context | None:
        """A stored document in host memory; None until another thread has read it. One is read at a time.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        if self._loading is None:
            self._loading = id_, self._threads.submit(self._read, id_)
        name, loading = self._loading
        if name != id_ or not loading.done():
            return None
        self._loading = None
        return loading.result()

    def _read(self, id_: str) -> Context:
        return Context.load(self._folder / id_ / _CONTEXT)

    def load_no_others(self, ids: Collection[str]) -> None:
        """Forgets what is being loaded unless it is one of these documents."""
        if self._loading is not None and self._loading[0] not in ids:
            self._loading[1].cancel()
            self._loading = None

    def distrust(self, id_: str) -> None:
        """What is stored of a document is damaged: it counts as not stored until it is stored again."""
        self._damaged.add(id_)

    def remove(self, id_: str) -> None:
        """Drops a document, also one that is being written. It is gone at once; its bytes are freed by another thread.

        Raises:
            OSError: it cannot be removed, and is still there.
        """
        with self._lock, contextlib.ExitStack() as removing:
            self._writing.pop(id_, None)
            if os.path.lexists(self._folder / id_):
                temporary = removing.enter_context(self._temporary_folder())
                os.rename(self._folder / id_, Path(temporary) / "removed")
                self._threads.submit(removing.pop_all().close)
            self._damaged.discard(id_)

    def close(self) -> None:
        """Waits for what is being written."""
        self.load_no_others(())
        self._threads.shutdown(wait=True)
