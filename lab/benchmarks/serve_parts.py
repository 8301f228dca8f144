"""What `tca-jax bench serve` measures of an engine, part by part: rows of tables."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from tca_jax.engine.lm import LM
from tca_jax.lab.benchmarks.models import weight_bytes
from tca_jax.lab.benchmarks.served_documents import (
    Rounds,
    UnreadDocuments,
    own_time,
    seconds_to_come_back,
    send_to_host,
)
from tca_jax.lab.benchmarks.watching import Background, Watched, arrivals, at_times, percentiles
from tca_jax.serve import Engine
from tca_jax.serve.streams import Stream

TIMED_STEPS = 128  # in as many a block of every row leaves the window once
_TIMES_BACK = 3
_BUS_REPEATS = 5
_SECONDS = 120.0  # most that anything is waited for


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes:
        tokens: Of a document.
        rows: Answers that are written at once.
        answer_tokens: Most tokens of question and answer.
        question_tokens: Of a question.
        prompt_tokens: Of a prompt that is about no document.
        rate: Requests a second.
        requests: How many arrive.
        seed: Of all that is random.
    """

    tokens: int
    rows: int
    answer_tokens: int
    question_tokens: int
    prompt_tokens: int
    rate: float
    requests: int
    seed: int


class Served:
    """An engine with documents, and what is measured of it.

    Args:
        lm: The model.
        load: What is asked.
        rows: Rows of the engine.
        documents: Documents that its pages are to suffice for; None for as many as fit.
        backend: Kernel backend.
    """

    def __init__(self, lm: LM, load: Load, rows: int, documents: int | None, backend: str) -> None:
        pages = None
        if documents is not None:
            pages = documents * lm.cache_layout(1, load.tokens).num_pages
        self.lm, self.load, self.rows = lm, load, rows
        self.engine = Engine(lm, max_rows=rows, pages=pages, answer_tokens=load.answer_tokens, backend=backend)
        self._unread = UnreadDocuments(self.engine, load.tokens)
        self._rounds = Rounds(self.engine)
        self._random = np.random.default_rng(load.seed)
        self.ids: list[str] = []

    @property
    def most(self) -> int:
        """Documents that its pages suffice for."""
        return self._unread.most

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()

    def hold(self, most: int) -> None:
        """Has the engine hold so many documents, or as many as it has pages for."""
        for id_ in self.ids[most:]:
            self.engine.forget(id_)
        self.ids = self.ids[:most]
        self.ids += self._unread.enter(most - len(self.ids))

    def settle(self) -> None:
        """Waits until nothing is asked any more. Raises TimeoutError if that takes too long."""
        if not self.engine.idle(_SECONDS):
            raise TimeoutError(f"the engine was still at work after {_SECONDS:.0f} seconds")

    # Parts

    def count_documents(self) -> dict[str, Any]:
        """How many documents the engine's pages hold."""
        begin = time.perf_counter()
        self.hold(self.most)
        self.engine._loop.call(lambda: jax.block_until_ready(self.engine._documents.pool.k))
        here = [each for each in self.engine.documents() if each.state == "device"]
        return {
            "documents": len(here),
            "GB each": self._unread.bytes_each / 1e9,
            "GB": sum(each.num_bytes for each in here) / 1e9,
            "fill s": time.perf_counter() - begin,
        }

    def time_steps(self, rows: int, copied: float) -> dict[str, Any]:
        """A step of so many rows, of different documents where there are as many; `copied` is the device's rate."""
        ids = [self.ids[i % len(self.ids)] for i in range(rows)]
        streams = [self._ask(id_) for id_ in ids]
        last = Watched(streams[-1])  # alone: what watches takes the engine's time
        last.wait(1, _SECONDS)
        begin = max(each.first_token_at for each in streams)
        assert all(each.first_token_at for each in streams), "requests are let in as they come"
        last.wait(1 + TIMED_STEPS, _SECONDS)
        step, end = last.seconds_per_token(begin, TIMED_STEPS)
        for each in streams:
            each.cancel()
        self.settle()
        floor = floor_seconds(weight_bytes(self.lm), rows * self._unread.bytes_each, copied)
        return {
            "rows": rows,
            "documents": len(set(ids)),
            "ms/step": 1e3 * step,
            "floor ms": 1e3 * floor,
            "over floor": step / floor,
            "tokens/s": rows / step,
            **own_time(self._rounds.rounds, begin, end),
        }

    def time_first_tokens(self) -> dict[str, Any]:
        """Questions that arrive at random while all rows but one decode."""
        ids = [self.ids[i % len(self.ids)] for i in range(self.rows)]
        times = arrivals(self.load.requests, self.load.rate, self.load.seed)

        def ask(number: int, at: float) -> float:
            stream = self._ask(ids[-1], 1)
            stream.result(_SECONDS)
            return stream.first_token_at - at

        with Background([functools.partial(self._ask, id_) for id_ in ids[:-1]]):
            self._ask(ids[-1], 1).result(_SECONDS)
            seconds = at_times(times, ask)
        self.settle()
        return {
            "rows that decode": self.rows - 1,
            "questions": len(seconds),
            "tokens each": self.load.question_tokens,
            "a second": self.load.rate,
            **percentiles(seconds, 50, 90, 99),
            "most ms": 1e3 * max(seconds),
        }

    def time_reading(self) -> dict[str, Any]:
        """Pauses of running answers while a document is read; programs are compiled by readings before."""
        needed = self.lm.cache_layout(1, self.load.tokens).num_pages
        self.hold(min(self.rows - 1, (self.engine.document_pages.total - needed) // self._unread.pages))
        assert self.ids, "the pool has room for two documents"
        self._read()
        alone = self._read()
        rows = self.rows - 1
        with Background([functools.partial(self._ask, self.ids[i % len(self.ids)]) for i in range(rows)]) as answers:
            self._read()
            begin = time.perf_counter()
            self._read()
            end = time.perf_counter()
            pauses = answers.pauses(begin, end)
            time.sleep(min(1.0, end - begin))
            without = answers.pauses(end, time.perf_counter())
        self.settle()
        return {
            "rows that decode": rows,
            "documents": len(self.ids),
            "read alone s": alone,
            "read s": end - begin,
            "longest pause ms": 1e3 * max(pauses),
            "p99 pause ms": 1e3 * float(np.percentile(pauses, 99)),
            "median pause ms": 1e3 * float(np.median(pauses)),
            "longest without ms": 1e3 * max(without),
        }

    def time_coming_back(self) -> dict[str, Any]:
        """A document back from host memory, and arrays of its chunks' shapes by themselves."""
        id_ = next(each.id for each in self.engine.documents() if each.state == "device")
        seconds, rates = list[float](), list[float]()
        chunks = send_to_host(self.engine, id_)
        sharding = chunks[0].sharding.with_memory_kind("device")
        for _ in range(_BUS_REPEATS):
            begin = time.perf_counter()
            there = jax.block_until_ready([jax.device_put(x, sharding) for x in chunks])
            rates.append(sum(x.nbytes for x in chunks) / (time.perf_counter() - begin))
            del there
        seconds_to_come_back(self.engine, id_)
        for _ in range(_TIMES_BACK):
            send_to_host(self.engine, id_)
            seconds.append(seconds_to_come_back(self.engine, id_))
        needed = self._unread.bytes_each / max(rates)
        return {
            "GB": self._unread.bytes_each / 1e9,
            "bus GB/s": max(rates) / 1e9,
            "bus ms": 1e3 * needed,
            "back ms": 1e3 * float(np.median(seconds)),
            "over bus": float(np.median(seconds)) / needed,
        }

    def time_load(self) -> dict[str, Any]:
        """Requests that arrive at random: four of five ask about a document, the others have a prompt of their own."""
        self.hold(min(self.rows, self.most - 1))  # prompts have room, too
        random = np.random.default_rng(self.load.seed)
        count, most = self.load.requests, self.load.answer_tokens - self.load.question_tokens
        about = [None if random.random() < 0.2 else self.ids[int(random.integers(len(self.ids)))] for _ in range(count)]
        lengths = random.integers(max(1, most // 16), max(2, most // 4), count).tolist()
        waiting: list[Stream] = []

        def ask(number: int, at: float) -> tuple[float, float, int, int]:
            stream = self._ask(about[number], lengths[number])
            waiting.append(stream)
            behind = sum(not each.first_token_at for each in list(waiting)) - 1
            out = stream.result(_SECONDS)
            return stream.first_token_at - at, stream.last_token_at - at, len(out.tokens), behind

        for id_ in (None, self.ids[0]):  # programs are compiled by requests before
            self._ask(id_, 2).result(_SECONDS)
        begin = time.perf_counter()
        found = at_times(arrivals(count, self.load.rate, self.load.seed), ask)
        seconds = time.perf_counter() - begin
        first, per_token = [x for x, *_ in found], [(b - a) / (n - 1) for a, b, n, _ in found if n > 1]
        by_name = {"first token": first, "per token": per_token}
        return {
            "requests/s": self.load.rate,
            "requests": count,
            "of them about documents": count - about.count(None),
            **{f"{name} {key}": x for name, of in by_name.items() for key, x in percentiles(of, 50, 90, 99).items()},
            "tokens/s": sum(n for _, _, n, _ in found) / seconds,
            "queue p50": float(np.percentile([n for *_, n in found], 50)),
            "queue most": max(n for *_, n in found),
        }

    # Inside

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(0, self.lm.config.vocab_size, count).tolist()

    def _ask(self, id_: str | None, new_tokens: int | None = None) -> Stream:
        """A question of random tokens; by default, its answer is as long as can be."""
        count = self.load.prompt_tokens if id_ is None else self.load.question_tokens
        most = self.load.answer_tokens - self.load.question_tokens if new_tokens is None else new_tokens
        return self.engine.ask(id_, self._tokens(count), max_new_tokens=most, stop_token_ids=())

    def _read(self) -> float:
        """Seconds in which a document of random tokens is read, which is dropped then."""
        tokens = self._tokens(self.load.tokens)
        begin = time.perf_counter()
        id_ = self.engine.read(tokens)
        self.engine.wait(id_, _SECONDS)
        seconds = time.perf_counter() - begin
        self.engine.forget(id_)
        return seconds


def floor_seconds(weights: int, pages: int, copied: float) -> float:
    """Least seconds of a step that reads so many bytes of weights and pages; `copied` is what `device_copy` says."""
    return (weights + pages) / copied
