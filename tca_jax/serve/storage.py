"""Documents on disk: each is a stored context and an entry, in a folder that one rename completes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.contexts import Context, identity_of
from tca_jax.engine.lm import LM
from tca_jax.engine.mesh import on_host
from tca_jax.engine.pages import FreePages, Numbers, Rows
from tca_jax.errors import require
from tca_jax.serve.pages import PagePool, counts

_log = logging.getLogger(__name__)
_ENTRY, _CONTEXT, _TEMPORARY = "document.json", "context", ".tmp-"
_THREADS = 2  # one writes and removes while the other reads


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored document without its pages; see `documents.Document`."""

    id: str
    tokens: list[int]
    parts: tuple[int, ...]
    created: float


class Storage:
    """A folder of documents of at most `max_bytes`. One engine owns it, and its thread calls all methods."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_TEMPORARY}*"):  # by an engine that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._folder, self._max_bytes = folder, max_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tca-jax-storage")
        self._lock = threading.Lock()  # of the folders of documents
        self._stored: set[str] = set()
        self._loading: tuple[str, Future[Context]] | None = None

    def entries(self) -> list[Entry]:
        """Stored documents, oldest first. A damaged entry is skipped, with a line in the log."""
        found = []
        for file in self._folder.glob(f"*/{_ENTRY}"):
            try:
                fields = json.loads(file.read_text())
                tokens = np.asarray(fields["tokens"], np.int32).tolist()
                entry = Entry(file.parent.name, tokens, tuple(fields["parts"]), float(fields["created"]))
                require(sum(entry.parts) == len(tokens), "its parts are not its tokens")
            except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
                _log.warning("ignoring damaged document %s: %s", file.parent, error)
            else:
                found.append(entry)
        self._stored = {entry.id for entry in found}
        return sorted(found, key=lambda entry: entry.created)

    def __contains__(self, id_: str) -> bool:
        return id_ in self._stored

    def store(
        self, entry: Entry, num_bytes: int, make: Callable[[], Context], wanted: Callable[[], bool]
    ) -> Future[None]:
        """Writes a document of `num_bytes` in another thread, which creates its context by `make`.

        It is published only if it is `wanted` then. The future fails with an OSError where the folder is full.
        """
        return self._threads.submit(self._write, entry, num_bytes, make, wanted)

    def _write(self, entry: Entry, num_bytes: int, make: Callable[[], Context], wanted: Callable[[], bool]) -> None:
        held = 0
        for folder, _, files in os.walk(self._folder):
            for name in files:
                with contextlib.suppress(OSError):  # it has just been removed
                    held += os.path.getsize(os.path.join(folder, name))
        most = math.inf if self._max_bytes is None else self._max_bytes
        require(
            held + num_bytes <= most,
            f"{self._folder} holds {held / 1e9:,.2f} of at most {most / 1e9:,.2f} GB: a document of "
            f"{num_bytes / 1e9:,.2f} GB does not fit",
            OSError,
        )
        with self._temporary() as temporary:
            written = Path(temporary) / "document"
            make().save(written / _CONTEXT)
            with open(written / _ENTRY, "w") as file:
                json.dump({"tokens": entry.tokens, "parts": entry.parts, "created": entry.created}, file)
                file.flush()
                os.fsync(file.fileno())
            _sync(written)
            with self._lock:
                if not wanted():
                    return
                with contextlib.suppress(FileNotFoundError):  # a damaged one
                    os.rename(self._folder / entry.id, Path(temporary) / "damaged")
                os.rename(written, self._folder / entry.id)
                _sync(self._folder)
                self._stored.add(entry.id)

    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=self._folder, ignore_cleanup_errors=True)

    def load(self, id_: str) -> Context | None:
        """A stored document in host memory; None until another thread has read it. One is read at a time."""
        if self._loading is None:
            self._loading = id_, self._threads.submit(self._read, id_)
        name, loading = self._loading
        if name != id_ or not loading.done():
            return None
        self._loading = None
        return loading.result()

    def _read(self, id_: str) -> Context:
        return Context.load(self._folder / id_ / _CONTEXT)

    def load_only(self, ids: Collection[str]) -> None:
        """Cancels the loading of another document than these."""
        if self._loading is not None and self._loading[0] not in ids:
            self._loading[1].cancel()
            self._loading = None

    def ignore(self, id_: str) -> None:
        """Counts a damaged document as not stored."""
        self._stored.discard(id_)

    def remove(self, id_: str) -> None:
        """Removes a document at once; another thread frees its bytes. OSError if it cannot be removed."""
        with self._lock, contextlib.ExitStack() as removing:
            if os.path.lexists(self._folder / id_):
                temporary = removing.enter_context(self._temporary())
                os.rename(self._folder / id_, Path(temporary) / "removed")
                self._threads.submit(removing.pop_all().close)
            self._stored.discard(id_)

    def close(self) -> None:
        """Waits for documents that are being written."""
        self.load_only(())
        self._threads.shutdown(wait=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def context_of(
    lm: LM, entry: Entry, pool: PagePool, table: Rows, pages: Numbers, share: float, chunks: Sequence[Rows]
) -> Context:
    """The context of a document whose pages are in host memory; the table names them in the pool."""
    axis, most = 2 if pool.on_mesh else 0, max(counts(pages))

    def joined(*parts: Any) -> np.ndarray:
        whole = np.concatenate([np.asarray(on_host(x)) for x in parts], axis=axis)
        return whole[(slice(None),) * axis + (slice(most),)]

    k, v = jax.tree.map(joined, *[(chunk.k, chunk.v) for chunk in chunks])
    table = pool.renumbered(table, pages, [np.arange(count, dtype=np.int32) for count in counts(pages)], most)
    lead = table.start.shape[:-1]
    free: Any = FreePages(np.zeros((*lead, 0), np.int32), np.zeros(lead, np.int32))  # type: ignore[arg-type]
    return Context(
        rows=dataclasses.replace(table, k=k, v=v, free=free, in_runs=True),
        tokens=jnp.asarray([entry.tokens], jnp.int32),
        lengths=jnp.asarray([len(entry.tokens)], jnp.int32),
        attended_share=jnp.asarray([share], jnp.float32),
        compile_seconds=0.0,
        prefill_seconds=0.0,
        window=lm.method.cache.window,
        shards=lm.head_shards,
        identity=identity_of(lm),
    )


def chunks_of(pool: PagePool, rows: Rows, size: int) -> tuple[Rows, Numbers, list[Rows]]:
    """The table of a context of one row on the host, the numbers of its pages, and these pages by `size`."""
    nothing: Any = None
    bare = dataclasses.replace(rows, k=nothing, v=nothing, free=nothing, in_runs=False)
    named = pool.named(pool.exact(bare), rows.num_pages)
    pages = [np.arange(len(own), dtype=np.int32) for own in named]
    table = pool.exact(pool.renumbered(bare, named, pages))

    def chunk(first: int, x: np.ndarray) -> np.ndarray:
        parts = []
        for own, numbers in zip(x[0] if pool.on_mesh else x[None], named, strict=True):
            picked = own[numbers[first : first + size]]
            parts.append(np.pad(picked, ((0, size - len(picked)), *((0, 0),) * (picked.ndim - 1))))
        return np.stack(parts)[None] if pool.on_mesh else parts[0]

    chunks = []
    for first in range(0, max(counts(named)), size):
        k, v = jax.tree.map(functools.partial(chunk, first), (rows.k, rows.v))
        chunks.append(dataclasses.replace(pool.arrays, k=k, v=v))
    return table, pages, chunks
