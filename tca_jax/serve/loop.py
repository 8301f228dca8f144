"""The engine's thread: it works in rounds, between which it runs what other threads want done."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tca_jax.errors import UserError
from tca_jax.serve.scheduler import Scheduler

_T = TypeVar("_T")
_SOON_SECONDS = 0.001  # between looks at what is under way while nothing else is to be done
_log = logging.getLogger(__name__)


class EngineEnded(UserError):
    """An engine is closed, or has met an error that it cannot go on after: `__cause__` is that error then."""


class Loop:
    """The thread. Its methods are what other threads call.

    A function that raises fails its caller; a round that raises ends the thread, and fails all callers.

    Args:
        worker: What is worked at; its methods are called in the thread.
    """

    def __init__(self, worker: Scheduler) -> None:
        self._worker = worker
        self._calls: collections.deque[tuple[Callable[[], Any], Future[Any]]] = collections.deque()
        self._changed = threading.Condition()
        self._stopping = self._ended = False
        self._resting = True
        self.failure: EngineEnded | None = None
        self._thread = threading.Thread(target=self._run, name="tca-jax-engine", daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], _T]) -> Future[_T]:
        """Has the thread run a function soon.

        Raises:
            ValueError: the thread has ended.
        """
        done: Future[_T] = Future()
        with self._changed:
            if self._stopping:
                raise self._refusal()
            self._resting = False
            self._calls.append((function, done))
            self._changed.notify_all()
        return done

    def call(self, function: Callable[[], _T]) -> _T:
        """Has the thread run a function, and waits for it. Raises what it raises, or ValueError as `post`."""
        return self.post(function).result()

    def wait_until(self, holds: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until something holds that the thread brings about; whether it does.

        Raises:
            ValueError: it does not, and the thread has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._ended, timeout)
            if (held := holds()) or not self._ended:
                return held
            raise self._refusal()

    def wait_idle(self, timeout: float | None) -> bool:
        """Waits until nothing is to be done; whether that is so. Raises ValueError if the engine has failed."""
        return self.wait_until(lambda: self._resting, timeout)

    def stop(self) -> None:
        """Ends the thread, and waits until it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _refusal(self) -> EngineEnded:
        if self.failure is None:
            return EngineEnded("the engine is closed")
        refusal = EngineEnded(str(self.failure))
        refusal.__cause__ = self.failure.__cause__
        return refusal

    # The thread

    def _run(self) -> None:
        failure = None
        try:
            while not self._stopping:
                self._run_calls()
                busy = self._worker.once(self._is_called)
                with self._changed:
                    self._resting = self._worker.is_idle and not self._calls
                    self._changed.notify_all()
                    if busy is not True and not self._calls and not self._stopping:
                        self._changed.wait(_SOON_SECONDS if busy is None else None)
        except BaseException as error:
            _log.critical("the engine has failed", exc_info=error)
            failure = EngineEnded(f"the engine has failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            self.failure, self._stopping = failure, True
        try:
            self._worker.end(failure)
        except Exception as error:
            _log.error("the engine did not end as it should", exc_info=error)
        with self._changed:
            self._ended, self._resting = True, failure is None
            calls = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
        for _, done in calls:
            done.set_exception(self._refusal())

    def _is_called(self) -> bool:
        return bool(self._calls) or self._stopping

    def _run_calls(self) -> None:
        while self._calls:
            function, done = self._calls.popleft()
            try:
                result = function()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)
