"""A folder of documents: contexts that engines have stored, found again by any of them, written by another thread."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tca_jax.engine.contexts import Context
from tca_jax.files import replacing

_log = logging.getLogger(__name__)
_SUFFIX = ".json"
_ID = re.compile(r"doc-[0-9a-f]{24}")  # an id of a request becomes a name of a file only if it is one


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a shelf says of a document without reading it: see `documents.Document`."""

    id: str
    tokens: list[int]
    parts: tuple[int, ...]
    created: float


class Shelf:
    """Documents on disk. A document is there from when its file is, which is written last.

    Args:
        folder: Made where there is none. Several engines of one model may share it.
        max_bytes: Most bytes of documents; None for no bound.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder, max_bytes
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tca-jax-shelf")
        self._writing: dict[str, Future[None]] = {}
        self._loading: dict[str, Future[Context]] = {}
        self._removing: set[str] = set()

    def ids(self) -> list[str]:
        """The ids of all documents that are there."""
        return [file.stem for file in self._folder.glob(f"*{_SUFFIX}")]

    def entries(self) -> list[Entry]:
        """What is there, oldest first; files that are no entries are named in the log and left alone."""
        found = [self._entry(file) for file in self._folder.glob(f"*{_SUFFIX}")]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.created)

    def entry(self, id_: str) -> Entry | None:
        """What is there of a document, whoever stored it; None if nothing is."""
        if _ID.fullmatch(id_) is None or not self.has(id_):
            return None
        return self._entry(self._file(id_))

    def _entry(self, file: Path) -> Entry | None:
        try:
            fields = json.loads(file.read_text())
            return Entry(file.stem, fields["tokens"], tuple(fields["parts"]), float(fields["created"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is no document: %s", file, error)
            return None

    def has(self, id_: str) -> bool:
        """Whether a document is stored."""
        return id_ not in self._removing and self._file(id_).exists()

    def store(self, entry: Entry, num_bytes: int, make: Callable[[], Context]) -> Future[None]:
        """Writes a document of so many bytes in another thread, which also makes its context.

        Returns:
            The writing, which fails with an OSError where the folder is full or cannot be written.
        """
        if self.has(entry.id):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        self._writing[entry.id] = self._worker.submit(self._write, entry, num_bytes, make)
        return self._writing[entry.id]

    def _write(self, entry: Entry, num_bytes: int, make: Callable[[], Context]) -> None:
        if self._max_bytes is not None and self.num_bytes + num_bytes > self._max_bytes:
            raise OSError(
                f"{self._folder} holds {self.num_bytes / 1e9:,.2f} of at most {self._max_bytes / 1e9:,.2f} GB: a "
                f"document of {num_bytes / 1e9:,.2f} GB does not fit"
            )
        make().save(self._folder / entry.id)
        fields = {"tokens": entry.tokens, "parts": entry.parts, "created": entry.created}
        with replacing(self._file(entry.id)) as file:
            file.write_text(json.dumps(fields))

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())

    def load(self, id_: str) -> Context | None:
        """A stored document in host memory; None until another thread has read it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged.
        """
        if id_ not in self._loading:
            self._loading[id_] = self._worker.submit(lambda: Context.load(self._folder / id_).to_host())
        if not self._loading[id_].done():
            return None
        return self._loading.pop(id_).result()

    def remove(self, id_: str) -> None:
        """Drops a document: its file first."""

        def remove() -> None:
            self._file(id_).unlink(missing_ok=True)
            shutil.rmtree(self._folder / id_, ignore_errors=True)
            self._removing.discard(id_)

        self._removing.add(id_)
        self._worker.submit(remove)

    def wait(self, id_: str, timeout: float | None = None) -> None:
        """Waits until a document that is being written is stored; raises what kept it from that."""
        if (writing := self._writing.get(id_)) is not None:
            writing.result(timeout)

    def close(self) -> None:
        """Waits for what is being written."""
        self._worker.shutdown(wait=True)

    def _file(self, id_: str) -> Path:
        return self._folder / f"{id_}{_SUFFIX}"
