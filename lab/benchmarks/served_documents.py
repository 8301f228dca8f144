"""Documents of an engine that nobody has read, for measurements to which their contents are nothing; and its rounds.

This reaches into the engine: what is done here no user can do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tca_jax.engine.cache import PagedCache, kept_of_prompt
from tca_jax.engine.contexts import first_local
from tca_jax.lab.benchmarks.common import random_normal
from tca_jax.pallas_kernels.kv import CODES, encode
from tca_jax.serve import Engine, programs
from tca_jax.serve.documents import Document
from tca_jax.serve.pages import LocalTable


class UnreadDocuments:
    """Enters documents of random keys and values, with as many pages as those that are read have, all their own.

    Args:
        engine: On one device.
        tokens: Of each document, a multiple of the block size.
    """

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine, self._documents, lm = engine, engine._documents, engine.lm
        policy, heads, self._tokens = lm.method.cache, lm.config.num_kv_heads, [0] * tokens
        kept = np.stack([kept_of_prompt(policy, layer, tokens, heads) for layer in range(lm.config.num_layers)])
        length = np.asarray([tokens])
        start = int(first_local(length, length, policy.block_size, policy.window)[0])
        self._table, self._layout = LocalTable.exactly(policy, kept[None].astype(np.int32), start, tokens)
        self.pages = self._table.most_pages
        self._chunk, self._count = self._random_chunk(), 0

    @property
    def most(self) -> int:
        """How many of them the engine's pages are enough for."""
        return self._documents.free.total // self.pages

    @property
    def bytes_each(self) -> int:
        """Of a document's pages."""
        return self.pages * self._documents.page_bytes

    def enter(self, most: int) -> list[str]:
        """Enters documents until there are so many, or no more have room; returns their ids."""
        ids: list[str] = []
        while len(ids) < most and (id_ := self._engine._loop.call(self._enter)) is not None:
            ids.append(id_)
        return ids

    def _enter(self) -> str | None:
        documents, table = self._documents, self._table
        if documents.free.free < self.pages:
            return None
        numbers, self._count = documents.free.take(table.used), self._count + 1
        for part in table.chunked(numbers, documents._chunk, documents.free.total):
            documents.pool = documents._run(programs.place, documents.pool, self._chunk, documents._numbers(part))
        document = Document(f"unread-{self._count}", self._tokens, (len(self._tokens),), named=True)
        documents.add(document)
        documents._entered(document, table, self._layout, numbers)
        return document.id

    def _random_chunk(self) -> PagedCache:
        empty = self._documents._empty_pool(self._documents._chunk)
        dtype = jnp.bfloat16 if empty.k.dtype == CODES else empty.k.dtype
        k, v = (encode(random_normal(jax.random.key(i), empty.k.shape, dtype), empty.k) for i in range(2))
        return dataclasses.replace(empty, k=k, v=v)


def send_to_host(engine: Engine, id_: str) -> list[Any]:
    """Has a document leave the device for host memory; returns its arrays there once they have arrived."""
    documents = engine._documents
    document = documents.get(id_)
    assert document is not None
    engine._loop.call(lambda: documents._leave(document))
    assert document.state == "host", "host memory has room for a document"
    return jax.block_until_ready(jax.tree.leaves(document.chunks))


def seconds_to_come_back(engine: Engine, id_: str) -> float:
    """Seconds from the wish to have a document on the device until its last page is where it belongs."""
    documents = engine._documents
    document = documents.get(id_)
    assert document is not None
    begin = time.perf_counter()
    assert engine._loop.call(lambda: documents.bring(document)), "the device has room for a document"
    engine._loop.wait_until(lambda: not documents._arriving, None)
    engine._loop.call(lambda: jax.block_until_ready(documents.pool.k))
    return time.perf_counter() - begin


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of an engine's thread.

    Attributes:
        begin: When the round before ended, in seconds of `time.perf_counter`.
        end: When this one did.
        waited: Seconds in which it waited for the device.
        called: Seconds in calls of the program of a step.
        steps: Steps that it launched.
    """

    begin: float
    end: float
    waited: float
    called: float
    steps: int


class Rounds:
    """Notes what each round of an engine takes, and for what."""

    def __init__(self, engine: Engine) -> None:
        self.rounds: list[Round] = []
        scheduler, batch = engine._scheduler, engine._scheduler._batch
        self._own_once, self._own_arrived, self._own_program = scheduler.once, batch._arrived, batch._step_program
        self._end = 0.0
        self._waited, self._called, self._steps = 0.0, 0.0, 0
        scheduler.once = self._once  # type: ignore[method-assign]
        batch._arrived = self._arrived  # type: ignore[method-assign]
        batch._step_program = self._program  # type: ignore[method-assign, assignment]

    def _once(self, is_called: Callable[[], bool]) -> bool | None:
        self._waited, self._called, self._steps = 0.0, 0.0, 0
        found = self._own_once(is_called)
        end = time.perf_counter()
        self.rounds.append(Round(self._end, end, self._waited, self._called, self._steps))
        self._end = end
        return found

    def _arrived(self, said: Any) -> Any:
        begin = time.perf_counter()
        found = self._own_arrived(said)
        self._waited += time.perf_counter() - begin
        return found

    def _program(self, *args: Any) -> Callable[..., Any]:
        program = self._own_program(*args)

        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            out = program(*args)
            self._called += time.perf_counter() - begin
            self._steps += 1
            return out

        return run


def own_time(rounds: Sequence[Round], begin: float, end: float) -> dict[str, float]:
    """Columns of the scheduler's own time between two moments, medians of milliseconds a step.

    Its own is all that a round takes beside waiting for the device and calling the program of a step, which is another
    column: in it arguments are checked and kernels are launched. Over the steps that the round launched. The device is
    at work meanwhile, as a step is launched before the one under way is taken.
    """
    inside = [each for each in rounds if begin <= each.begin and each.end <= end and each.steps]
    own = [(each.end - each.begin - each.waited - each.called) / each.steps for each in inside]
    calls = [each.called / each.steps for each in inside]
    return {"scheduler ms/step": 1e3 * float(np.median(own)), "call ms/step": 1e3 * float(np.median(calls))}
