"""Clients of an engine: they note when tokens come, keep rows busy, and arrive at random."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tca_jax.serve.streams import Stream

T = TypeVar("T")


class Watched:
    """A stream, and when it had how many tokens.

    Attributes:
        stream: The stream.
        times: Seconds of `time.perf_counter`, and the tokens there were then.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.times: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        stream.listen(self._note)
        self._note()

    def _note(self) -> None:
        with self._changed:
            count = len(self.stream.tokens)
            if count > (self.times[-1][1] if self.times else 0):
                self.times.append((time.perf_counter(), count))
            self._changed.notify_all()

    def wait(self, tokens: int, timeout: float = 300) -> None:
        """Waits until there are so many.

        Raises:
            TimeoutError: they do not come in time, or never: the stream ends. Its own error, if it has one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.stream.ended or self._count >= tokens, timeout)
            count = self._count
        if count < tokens:
            if self.stream.ended:
                self.stream.result()
            raise TimeoutError(f"{count} of {tokens} tokens came within {timeout:.0f} seconds")

    @property
    def _count(self) -> int:
        return self.times[-1][1] if self.times else 0

    def seconds_per_token(self, begin: float, tokens: int) -> tuple[float, float]:
        """Mean seconds of so many tokens behind a moment, and the moment of the last of them."""
        (first, before), *later = [each for each in self.times if each[0] >= begin]
        last, count = next(each for each in later if each[1] >= before + tokens)
        return (last - first) / (count - before), last

    def pauses(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens that followed each other, as far as they touch a span of time."""
        times = [at for at, _ in self.times]
        return [b - a for a, b in itertools.pairwise(times) if b > begin and a < end]


class Background:
    """Keeps so many answers running; a context manager, in which all of them have begun.

    Args:
        asks: Each asks for one of them, anew when it has ended.
    """

    def __init__(self, asks: Sequence[Callable[[], Stream]]) -> None:
        self._asks, self._ended = asks, queue.Queue[int | None]()
        self._running: list[Watched] = []
        self.watched: list[Watched] = []
        self._thread = threading.Thread(target=self._ask_again, daemon=True)

    def __enter__(self) -> Background:
        self._running = [self._start(i) for i in range(len(self._asks))]
        for each in self._running:
            each.wait(1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.put(None)
        self._thread.join()
        for each in self._running:
            each.stream.cancel()

    def _start(self, number: int) -> Watched:
        stream = self._asks[number]()
        watched = Watched(stream)
        self.watched.append(watched)
        told: list[bool] = []

        def tell() -> None:
            if stream.ended and not told:
                told.append(True)
                self._ended.put(number)

        stream.listen(tell)
        tell()
        return watched

    def _ask_again(self) -> None:
        while (number := self._ended.get()) is not None:
            self._running[number] = self._start(number)

    def pauses(self, begin: float, end: float) -> list[float]:
        """See `Watched.pauses`; of all."""
        return [pause for each in self.watched for pause in each.pauses(begin, end)]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which so many requests of a Poisson process arrive."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()


def at_times(times: Sequence[float], call: Callable[[int, float], T]) -> list[T]:
    """Calls with each number and the moment of its turn, in threads, so that no call makes another one late.

    Args:
        times: Seconds from now on.
        call: Takes the number of a time, and that moment of `time.perf_counter`.
    """
    begin, turns = time.perf_counter(), list[Future[T]]()
    with ThreadPoolExecutor(min(len(times), 64)) as pool:
        for number, at in enumerate(times):
            time.sleep(max(0.0, begin + at - time.perf_counter()))
            turns.append(pool.submit(call, number, begin + at))
        return [turn.result() for turn in turns]


def percentiles(values: Sequence[float], *which: int) -> dict[str, float]:
    """Percentiles of milliseconds, of values in seconds, as columns of a table."""
    return {f"p{each} ms": float(1e3 * np.percentile(values, each)) for each in which}
